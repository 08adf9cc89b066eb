"""`mlx-cb bench slow-connections` and `admin`: what goes on beside streams that run.

Owns the words; the measuring is `bench.beside`'s.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlx_cb.cli.looping import run_measurement

if TYPE_CHECKING:
    from mlx_cb.bench.beside import Pass
    from mlx_cb.bench.compare import Conditions
    from mlx_cb.bench.servers import RunningServer
    from mlx_cb.bench.workloads.base import Workload

_OPTIONS = [
    click.argument("url", required=False),
    click.option("--model", default="demo", show_default=True, help="Served, without a URL."),
    click.option("--float32", is_flag=True, help="Expand the weights to fp32 first."),
    click.option("--flag", "flags", multiple=True, help="Flag for the server started here."),
    click.option("--key", help="API key (for `admin` an admin's)."),
    click.option("--streams", default=16, show_default=True),
    click.option("--output", default=200, show_default=True, help="Tokens of each stream."),
    click.option("--rounds", default=3, show_default=True, help="Passes of each kind."),
    click.option("--seed", default=1, show_default=True),
    click.option("--allow-load", is_flag=True, help="Measure on a busy machine as well."),
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Given:
    """The options of both commands."""

    url: str | None
    model: str
    float32: bool
    flags: tuple[str, ...]
    key: str | None
    streams: int
    output: int
    rounds: int
    seed: int
    allow_load: bool


def _options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command("slow-connections")
@click.option("--connections", default=500, show_default=True)
@click.option("--limit", default=1.5, show_default=True, help="Ratio of p99 that is still right.")
@_options
def slow_connections(connections: int, limit: float, **options: Any) -> None:
    """Compare the gaps of streams alone and beside connections that never finish their request.

    Of the server at URL, or of one that is started here. At an https URL they never finish their
    handshake (SSL_CERT_FILE names the authority to trust).
    """
    given = _Given(**options)

    async def measure(server: RunningServer, conditions: Conditions, load: Workload) -> bool:
        from mlx_cb.bench.beside import Dripping, measure_beside

        drips = Dripping(server.endpoint, connections)
        rounds = await measure_beside(server, conditions, load, drips.going_on, _say)
        ratio = rounds.ratio("p99")
        click.echo(
            f"ITL p99 beside {connections} slow connections ({drips.closed} times closed by the "
            f"server): {ratio:.2f} x alone (limit {limit:g})"
        )
        return ratio <= limit

    _measure(given, measure)


@click.command("admin")
@click.option("--looks", default=20.0, show_default=True, help="A second; the page makes one.")
@_options
def admin(looks: float, **options: Any) -> None:
    """Measure what somebody who watches `/admin` costs the server under load.

    He looks more often than the page does, so that it shows; figures are for one look a second.
    """
    given = _Given(**options)

    async def measure(server: RunningServer, conditions: Conditions, load: Workload) -> bool:
        from mlx_cb.bench.beside import Onlookers, measure_beside, page_bytes
        from mlx_cb.bench.stats import median

        size = await page_bytes(server.endpoint, given.key)
        onlookers = Onlookers(server.endpoint, given.key, looks)
        rounds = await measure_beside(server, conditions, load, onlookers.going_on, _say)
        click.echo(f"the page is one request of {size / 1000:.1f} kB compressed (limit 200)")
        if not rounds.extra_cpu_s or not onlookers.looks:
            click.echo("the server's CPU time is not known: run this on its machine")
            return False
        each = onlookers.looks / len(rounds.beside)
        costs = [extra / each for extra in rounds.extra_cpu_s]
        cost = median(costs)
        by_round = ", ".join(f"{one * 1e3:.2f}" for one in costs)
        click.echo(
            f"a look costs {cost * 1e3:.2f} ms of CPU time (rounds: {by_round}), which is "
            f"{cost:.2%} of a core at one look a second (limit 1 %)"
        )
        click.echo(f"ITL p99 at {looks:g} looks a second: {rounds.ratio('p99'):.2f} x alone")
        return cost <= 0.01 and size < 200_000

    _measure(given, measure)


def _say(name: str, one: Pass) -> None:
    cpu = "" if one.cpu_s is None else f", {one.cpu_s:.2f} s of CPU"
    click.echo(
        f"{name:<7} ITL p50 {one.itl['p50'] * 1e3:7.1f} ms  p99 {one.itl['p99'] * 1e3:7.1f} ms  "
        f"{one.tokens} tokens in {one.span_s:.1f} s{cpu}"
    )


_Measure = Callable[["RunningServer", "Conditions", "Workload"], Awaitable[bool]]


def _measure(given: _Given, measure: _Measure) -> None:
    """Start what is needed, measure, say whether the machine was quiet; exit 1 above a limit."""
    from mlx_cb.bench.compare import Conditions, warm
    from mlx_cb.bench.environment import LoadWatch
    from mlx_cb.bench.measuring import FOREIGN_LIMIT, Policy
    from mlx_cb.bench.prompts import CommonWords
    from mlx_cb.bench.servers import Cores, RunningServer
    from mlx_cb.bench.workloads.closed import Steady

    async def run() -> bool:
        server = RunningServer(_spec(given), Cores())
        conditions = Conditions(
            CommonWords(), rounds=given.rounds, seed=given.seed, key=given.key,
            fields=(("ignore_eos", True), ("temperature", 0)),
        )  # fmt: skip
        load = Steady(streams=given.streams, output=given.output)
        try:
            await server.ready()
            await warm(server, conditions)
            watch = LoadWatch(lambda: [server.cpu_seconds()])
            is_within = await measure(server, conditions, load)
            foreign = watch.read().foreign_cores
        finally:
            server.stop()
        if foreign is not None:
            quiet = "" if foreign <= FOREIGN_LIMIT else ": too busy, no conclusion can be drawn"
            click.echo(f"other work kept {foreign:.2f} cores busy{quiet}")
        return is_within

    Policy(given.allow_load).check_before()
    if not run_measurement(run()):
        sys.exit(1)


def _spec(given: _Given) -> Any:
    from mlx_cb.bench.servers import Kind, ServerSpec, float32_copy
    from mlx_cb.config import ModelConfig
    from mlx_cb.model.resolve import cache_dir, resolve

    if given.url is not None:
        return ServerSpec("server", Kind.URL, None, url=given.url, key=given.key)
    folder: Path = resolve(ModelConfig(model=given.model))
    if given.float32:
        folder = float32_copy(folder, cache_dir() / "bench")
    return ServerSpec("ours", Kind.MLX_CB, str(folder), given.flags, key=given.key)

"""`mlx-cb bench`: put a load on a server, compare it with a peer, check it against goals."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from mlx_cb.cli import beside, kv_quality
from mlx_cb.cli.looping import run_measurement
from mlx_cb.cli.progress import announcer, progress, wide_console
from mlx_cb.cli.simulation import pair, sim
from mlx_cb.errors import MlxCbError

# Everything else is imported where it is used: `mlx-cb --help` must not wait for numpy.

_PEERS = "mlx-lm, mlx-lm-tuned, or the URL of a server that is already running"


@dataclass(frozen=True, slots=True)
class Options:
    """What all commands that measure have in common."""

    param: tuple[str, ...]
    rounds: int
    seed: int
    api: str
    token_ids: bool
    tokenizer: Path | None
    key: str | None
    user_key: tuple[str, ...]
    field: tuple[str, ...]
    gate: Path | None
    json_file: Path | None
    html_file: Path | None
    pin: str
    allow_load: bool


_OPTIONS = [
    click.option("--param", multiple=True, metavar="NAME=VALUE", help="A workload's parameter."),
    click.option("--rounds", default=3, show_default=True, help="Passes; figures are medians."),
    click.option("--seed", default=1, show_default=True, help="Decides prompts and arrivals."),
    click.option(
        "--api",
        type=click.Choice(["completions", "chat"]),
        default="completions",
        show_default=True,
        help="Chat adds the template's tokens to every prompt.",
    ),
    click.option("--token-ids", is_flag=True, help="Send prompts as token ids, not as text."),
    click.option(
        "--tokenizer",
        type=click.Path(path_type=Path),
        help="Folder with tokenizer.json, for prompts of exact length.",
    ),
    click.option("--key", help="API key for users without one of their own."),
    click.option("--user-key", multiple=True, metavar="USER=KEY", help="A user's API key."),
    click.option("--field", multiple=True, metavar="NAME=JSON", help="Sent in every body."),
    click.option(
        "--gate",
        type=click.Path(path_type=Path, exists=True),
        help="TOML file of thresholds; falling short of one makes the command fail.",
    ),
    click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the report."),
    click.option("--html", "html_file", type=click.Path(path_type=Path), help="Write a page."),
    click.option(
        "--pin",
        type=click.Choice(["auto", "split", "off"]),
        default="auto",
        show_default=True,
        help="Keep client and servers to different cores; auto: from three cores on.",
    ),
    click.option("--allow-load", is_flag=True, help="Measure on a busy machine as well."),
]


def _measuring_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


class _Stopped(click.ClickException):
    """An error on purpose, for people."""

    def __init__(self, error: MlxCbError) -> None:
        super().__init__(error.message)
        self.exit_code = error.exit_code  # type: ignore[misc]  # click declares it on the class


class _PlainErrors(click.Group):
    """Turns an error on purpose into one line and its exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except MlxCbError as error:
            raise _Stopped(error) from error


@click.group("bench", cls=_PlainErrors)
def bench() -> None:
    """Measure latency and throughput of a server, alone or against a peer.

    \b
    mlx-cb bench run http://127.0.0.1:8080 --workload steady16
    mlx-cb bench compare --peer mlx-lm --model demo --workload churn --html report.html
    """


@bench.command("run")
@click.argument("url")
@click.option("--workload", required=True, help="Name, e.g. steady16; see `bench workloads`.")
@click.option("--model", help="Value of the `model` field, where the server wants one.")
@_measuring_options
def run(url: str, workload: str, model: str | None, **options: Any) -> None:
    """Put WORKLOAD on the server at URL, any that speaks the OpenAI API."""
    from mlx_cb.bench.servers import Kind, ServerSpec

    spec = ServerSpec("server", Kind.URL, model, url=url)
    chosen = Options(**options)
    folder = _folder(str(chosen.tokenizer)) if chosen.tokenizer else None
    _measure(workload, [spec], chosen, (model or "unknown", folder))


@bench.command("compare")
@click.option("--peer", "peers", multiple=True, required=True, help=f"One of: {_PEERS}.")
@click.option("--model", default="demo", show_default=True, help="Served by all servers started.")
@click.option("--workload", required=True, help="Name, e.g. churn; see `bench workloads`.")
@click.option("--float32", is_flag=True, help="Expand the weights to fp32 first, for all servers.")
@click.option("--flag", "flags", multiple=True, help="Flag for our server, e.g. --flag=--lan.")
@_measuring_options
def compare(
    peers: tuple[str, ...],
    model: str,
    workload: str,
    float32: bool,
    flags: tuple[str, ...],
    **options: Any,
) -> None:
    """Start our server and peers on the same weights and put the same load on them in turn."""
    from mlx_cb.bench.servers import Kind, ServerSpec, float32_copy

    folder = _folder(model)
    if float32:
        folder = float32_copy(folder, _cache())
    specs = [ServerSpec("ours", Kind.MLX_CB, str(folder), flags)]
    specs += [_peer_spec(peer, str(folder)) for peer in peers]
    _measure(workload, specs, Options(**options), (model, folder))


@bench.command("suite")
@click.option("--model", default="demo", show_default=True, help="A quantized model.")
@click.option("--gate", type=click.Path(path_type=Path, exists=True), help="Instead of ours.")
@click.option("--only", multiple=True, metavar="RUN", help="Take only these runs and their gates.")
@click.option("--rounds", type=int, help="Instead of the file's own numbers.")
@click.option("--seed", default=1, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the report.")
@click.option("--html", "html_file", type=click.Path(path_type=Path), help="Write a page.")
@click.option("--pin", type=click.Choice(["auto", "split", "off"]), default="auto")
@click.option("--allow-load", is_flag=True, help="Measure on a busy machine as well.")
def suite(
    model: str, gate: Path | None, only: tuple[str, ...], rounds: int | None, **options: Any
) -> None:
    """Measure every goal of the gates file and print ours, P, T and the limit for each."""
    from mlx_cb.bench import gates
    from mlx_cb.bench.measuring import Policy
    from mlx_cb.bench.servers import float32_copy
    from mlx_cb.bench.suite import Models, SuiteSettings, run_suite
    from mlx_cb.bench.tiny import tiny_model

    file = gates.read_gates(gate or gates.SHIPPED)
    console = wide_console()
    folder = _folder(model)
    models = Models(float32_copy(folder, _cache()), folder, tiny_model(folder, _cache()))
    with progress(console) as bar:
        settings = SuiteSettings(
            policy=Policy(options["allow_load"], options["pin"]),
            seed=options["seed"],
            only=frozenset(only),
            rounds=rounds,
            announce=announcer(bar),
            keep=_keeper(options["json_file"]),
        )
        report = run_measurement(run_suite(file, models, settings))
    wanted = file.gate
    if only:
        wanted = gates.relevant(wanted, set(only))
    _finish(console, report, wanted, options["json_file"], options["html_file"])


@bench.command("workloads")
def workloads() -> None:
    """List the workloads and their parameters."""
    import dataclasses
    import inspect

    from mlx_cb.bench.workloads import WORKLOADS

    for name, cls in sorted(WORKLOADS.items()):
        parameters = " ".join(f"{f.name}={f.default}" for f in dataclasses.fields(cls))
        click.echo(f"{name}  {parameters}\n    {inspect.cleandoc(cls.__doc__ or '')}\n")


@bench.command("html")
@click.argument("report", type=click.Path(path_type=Path, exists=True))
@click.argument("page", type=click.Path(path_type=Path))
def html(report: Path, page: Path) -> None:
    """Make the PAGE of a REPORT written with --json."""
    import msgspec

    from mlx_cb.bench.html import render

    page.write_text(render(msgspec.json.decode(report.read_bytes())))


@bench.command("host")
@click.option("--model", default="demo", show_default=True, help="Whose tokenizer is used.")
def host(model: str) -> None:
    """Measure what a step costs beside the model, inside this process, on a tiny random model."""
    from mlx_cb.bench.host import measure_host
    from mlx_cb.bench.tiny import tiny_model

    for name, value in measure_host(tiny_model(_folder(model), _cache())).items():
        click.echo(f"{name:45} {value:.4g}")


def _measure(
    workload: str, specs: list[Any], options: Options, model: tuple[str, Path | None]
) -> None:
    from mlx_cb.bench import gates
    from mlx_cb.bench.measuring import Assignment, Policy, measure_load
    from mlx_cb.bench.workloads import make

    load = make(workload, dict(pair(text) for text in options.param))
    wanted = gates.relevant(gates.read_gates(options.gate).gate, {workload}) if options.gate else ()
    console = wide_console()
    total = len(load.plan(options.seed).calls())
    with progress(console) as bar:
        lines = {
            spec.label: bar.add_task(spec.label, total=total * options.rounds) for spec in specs
        }

        def advance(label: str, record: object) -> None:
            if record is not None:
                bar.advance(lines[label])

        report = run_measurement(
            measure_load(
                [Assignment(workload, load, tuple(specs))],
                _conditions(options, model[1]),
                Policy(options.allow_load, options.pin),
                model,
                advance,
            )
        )
    _finish(console, report, wanted, options.json_file, options.html_file)


def _conditions(options: Options, folder: Path | None) -> Any:
    import msgspec

    from mlx_cb.bench.compare import Conditions
    from mlx_cb.bench.prompts import CommonWords, TokenizerWords
    from mlx_cb.bench.wire import Api

    if options.token_ids and folder is None:
        raise click.UsageError("--token-ids needs --tokenizer")
    fields = {}
    for name, text in (pair(text) for text in options.field):
        try:
            fields[name] = msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise click.UsageError(f"--field {name}: {text!r} is not JSON") from error
    return Conditions(
        TokenizerWords(folder) if folder else CommonWords(),
        rounds=options.rounds,
        seed=options.seed,
        api=Api(options.api),
        as_ids=options.token_ids,
        fields=tuple(fields.items()),
        key=options.key,
        keys=dict(pair(text) for text in options.user_key),
    )


def _finish(
    console: Console,
    report: dict[str, Any],
    gates: tuple[Any, ...],
    json_file: Path | None,
    html_file: Path | None,
) -> None:
    """Print, write the files, and exit 1 when a gate fell short or nothing can be concluded."""
    from mlx_cb.bench import html, table
    from mlx_cb.bench.measuring import apply_gates
    from mlx_cb.bench.report import write_json

    passed = apply_gates(report, gates)
    for run in report["runs"]:
        make_table = table.run_table if "workload" in run else table.direct_table
        console.print(make_table(run))
    if gates:
        console.print(table.gate_table(report["gates"]))
    console.print(report["verdict"]["text"])
    if json_file:
        write_json(report, json_file)
    if html_file:
        html_file.parent.mkdir(parents=True, exist_ok=True)
        html_file.write_text(html.render(report))
    for gate in report["gates"]:
        if not gate["passed"]:
            goal = f"{gate['gate']['goal']} {gate['gate']['name']}"
            click.echo(f"falls short: {goal}: {gate['reason']}", err=True)
    if not passed or not report["verdict"]["concluded"]:
        sys.exit(1)


def _keeper(path: Path | None) -> Callable[[dict[str, Any]], None]:
    from mlx_cb.bench.report import write_json

    return lambda report: write_json(report, path) if path else None


def _peer_spec(peer: str, folder: str) -> Any:
    from mlx_cb.bench.servers import PEER_TUNED, Kind, ServerSpec

    if peer == "mlx-lm":
        return ServerSpec("P", Kind.MLX_LM, folder)
    if peer == "mlx-lm-tuned":
        return ServerSpec("T", Kind.MLX_LM, folder, PEER_TUNED)
    if "://" not in peer:
        raise click.UsageError(f"--peer {peer!r} is none of: {_PEERS}")
    return ServerSpec("peer", Kind.URL, None, url=peer)


def _folder(model: str) -> Path:
    """Folder of a MODEL; `demo`, hub ids and files are the loader's to find."""
    from mlx_cb.config import ModelConfig
    from mlx_cb.model.resolve import resolve

    return resolve(ModelConfig(model=model))


def _cache() -> Path:
    """Where models made for measuring are kept."""
    from mlx_cb.model.resolve import cache_dir

    return cache_dir() / "bench"


bench.add_command(sim)
bench.add_command(kv_quality.command)
bench.add_command(beside.slow_connections)
bench.add_command(beside.admin)
# The name under which the command line's group looks for it.
command = bench

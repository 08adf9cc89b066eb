"""What goes on beside a load: slow connections and onlookers are there, and are counted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from mlx_cb.bench import beside
from mlx_cb.bench.beside import Dripping, Onlookers, Pass, Rounds, measure_beside, page_bytes
from mlx_cb.bench.compare import Conditions
from mlx_cb.bench.exchange import Endpoint
from mlx_cb.bench.prompts import CommonWords
from mlx_cb.bench.servers import Cores, Kind, RunningServer, ServerSpec
from mlx_cb.bench.workloads.closed import Steady
from mlx_cb.cli.bench import command
from mlx_cb.errors import MlxCbError
from mlx_cb.server.connections import ConnectionLimits
from mlx_cb.server.tls import LocalAuthority
from tests.server.conftest import LiveServer, serve, stopping

__all__ = ["serve", "stopping"]

Serve = Callable[..., LiveServer]
ENDLESS = {"tokens": ["x "], "repeat": True, "delay_s": 0.002}
FIELDS = (("ignore_eos", True),)


def measured(url: str, going_on: beside.Beside, rounds: int = 2) -> Rounds:
    server = RunningServer(ServerSpec("server", Kind.URL, None, url=url), Cores())
    conditions = Conditions(CommonWords(), rounds=rounds, fields=FIELDS)
    load = Steady(streams=3, prompt=8, output=12)
    return asyncio.run(measure_beside(server, conditions, load, going_on))


def test_slow_connections_are_there_while_streams_run(serve: Serve) -> None:
    server = serve(ENDLESS)
    drips = Dripping(Endpoint.parse(server.url), 40)
    seen: list[int] = []
    generate = server.engine.generate

    def counting(*given: object, **named: object) -> object:
        seen.append(server.serving.connections.half_open.count)
        return generate(*given, **named)  # type: ignore[arg-type]

    server.engine.generate = counting  # type: ignore[method-assign,assignment]
    rounds = measured(server.url, drips.going_on)
    assert [len(rounds.alone), len(rounds.beside)] == [2, 2]
    assert all(one.tokens == 36 for one in rounds.alone + rounds.beside)
    assert rounds.ratio("p99") > 0
    assert len(seen) == 12
    assert sorted(count >= 30 for count in seen) == [False] * 6 + [True] * 6
    deadline = time.monotonic() + 20
    while server.serving.connections.half_open.count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_who_is_closed_comes_back_also_by_tls(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside, "DRIP_EVERY_S", 0.05)
    authority = LocalAuthority(tmp_path / "tls")
    server = serve(ENDLESS, certificates=authority, limits=ConnectionLimits(head_s=0.2))
    drips = Dripping(Endpoint.parse(server.url), 5)

    async def watch() -> None:
        async with drips.going_on():
            while drips.closed < 10:
                await asyncio.sleep(0.01)
            assert server.serving.connections.half_open.count <= 5

    asyncio.run(asyncio.wait_for(watch(), 20))


def test_onlookers_look_as_the_page_does(serve: Serve) -> None:
    server = serve(ENDLESS)
    endpoint = Endpoint.parse(server.url)
    onlookers = Onlookers(endpoint, None, per_second=200)
    rounds = measured(server.url, onlookers.going_on)
    assert onlookers.looks >= 2
    assert len(rounds.extra_cpu_s) == 2
    assert 5_000 < asyncio.run(page_bytes(endpoint, None)) < 200_000


def test_an_onlooker_who_may_not_look_is_an_error(serve: Serve, tmp_path: Path) -> None:
    server = serve(ENDLESS, host="0.0.0.0")  # which asks everyone for a key
    endpoint = Endpoint.parse(server.url)
    with pytest.raises(MlxCbError, match="401"):
        asyncio.run(page_bytes(endpoint, "mcb_wrong"))

    async def look() -> None:
        async with Onlookers(endpoint, "mcb_wrong", per_second=100).going_on():
            await asyncio.sleep(0.5)

    with pytest.raises(MlxCbError, match="401"):
        asyncio.run(look())


def test_the_middle_round_decides() -> None:
    def made(p99: float, cpu: float) -> Pass:
        return Pass({"n": 1, "p50": 1.0, "p99": p99}, cpu, 1.0, 1, 0)

    rounds = Rounds([made(1, 5), made(2, 6), made(9, 7)], [made(3, 6), made(4, 8), made(5, 8)])
    assert rounds.ratio("p99") == 2.0
    assert rounds.extra_cpu_s == [1, 2, 1]


def test_a_server_that_is_not_there_is_one_line() -> None:
    done = CliRunner().invoke(command, ["admin", "http://127.0.0.1:9", "--looks", "x"])
    assert done.exit_code == 2
    assert "'x' is not a valid float" in done.output

"""Seconds of machine by user: what the engine charges is what is written down, once."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import httpx2
import pytest

from mlx_cb.engine.scripted import ScriptedEngine
from mlx_cb.server.machine_time import MachineTime
from mlx_cb.server.usage import Taken, Usage
from tests import tiny
from tests.team.conftest import Serve, Team

CHAT = {"messages": [{"role": "user", "content": "a"}]}


def test_all_measured_time_is_somebodys() -> None:
    core = tiny.engine(tiny.llama_model(), max_num_batched_tokens=16)
    core.add("a", list(range(40)), tiny.greedy(6), user="alice")
    core.add("b", list(range(9)), tiny.greedy(3), user="bob")
    carols = core.add("c", list(range(90)), tiny.greedy(9), user="carol")
    while not carols.num_computed_tokens:
        core.step()
    core.abort("c")  # is charged for what was computed before it was given up
    tiny.run(core)
    charged = core.scheduler.service
    measured = [record.seconds for record in core.scheduler.journal.records]
    assert set(charged) == {"alice", "bob", "carol"}
    assert all(seconds > 0 for seconds in charged.values())
    assert sum(charged.values()) == pytest.approx(sum(s for s in measured if s is not None))


class _Engine:
    """Says what it is told to say."""

    def __init__(self) -> None:
        self.said: dict[str, Any] = {}

    async def status(self) -> dict[str, Any]:
        return self.said


def test_each_second_is_written_down_once() -> None:
    engine, usage = _Engine(), Usage(None)
    time = MachineTime(engine, usage)  # type: ignore[arg-type]

    async def seconds(worker: int | None, **totals: float) -> dict[str, float]:
        engine.said = {"worker_pid": worker} | ({"machine_seconds": totals} if worker else {})
        await time.look()
        return {t.user: t.machine_seconds for t in await usage.since("", None)}

    async def run() -> None:
        assert await seconds(None) == {}
        assert await seconds(1, a=1.0) == {"a": 1.0}
        assert await seconds(1, a=1.0) == {"a": 1.0}
        assert await seconds(1, a=3.0, b=0.5) == {"a": 3.0, "b": 0.5}
        assert await seconds(None) == {"a": 3.0, "b": 0.5}
        # Another worker counts from the beginning.
        assert await seconds(2, a=0.25) == {"a": 3.25, "b": 0.5}
        # Two looks at once may be answered in the other order.
        time.take({"worker_pid": 2, "machine_seconds": {"a": 2.0}})
        time.take({"worker_pid": 2, "machine_seconds": {"a": 1.0}})
        assert await seconds(2, a=2.0) == {"a": 5.0, "b": 0.5}
        (alices, _) = await usage.since("", None)
        assert alices.requests == 0

    asyncio.run(run())
    usage.close()


def test_usage_tells_the_seconds_also_of_an_answer_that_was_left(serve: Serve, team: Team) -> None:
    server = serve({"tokens": ["x"], "repeat": True, "delay_s": 0.01}, keys_file=team.path)
    with httpx2.stream(
        "POST", server.url + "/v1/chat/completions", json=CHAT | {"stream": True},
        headers=team.as_("alice"),
    ) as answer:  # fmt: skip
        lines = answer.iter_lines()
        for _ in range(8):
            next(lines)
    server.wait_until_idle()
    (mine,) = server.get("/usage", headers=team.as_("alice")).json()["days"]
    assert isinstance(server.engine, ScriptedEngine)
    assert mine["machine_seconds"] == pytest.approx(server.engine._machine_seconds["alice"])
    assert mine["machine_seconds"] > 0
    table = server.get("/usage?format=csv", headers=team.as_("boss")).text
    assert table.splitlines()[0].split(",")[-1] == "machine_seconds"
    assert float(table.splitlines()[1].split(",")[-1]) == pytest.approx(mine["machine_seconds"])


def test_the_last_seconds_are_written_when_the_server_ends(
    serve: Serve, team: Team, tmp_path: Path
) -> None:
    path = tmp_path / "usage.sqlite"
    server = serve({"text": "a b", "delay_s": 0.01}, keys_file=team.path, usage_file=path)
    assert server.post(
        "/v1/chat/completions", CHAT, headers=team.as_("bob")
    ).status_code == 200  # fmt: skip
    server.wait_until_idle()
    server.begin_stop()
    assert server.has_stopped()
    usage = Usage(path)
    (bobs,) = asyncio.run(usage.since("", "bob"))
    usage.close()
    assert bobs.machine_seconds > 0


def test_a_file_of_before_gets_the_column(tmp_path: Path) -> None:
    path = tmp_path / "usage.sqlite"
    with sqlite3.connect(path) as database:
        database.execute(
            "CREATE TABLE usage (day TEXT NOT NULL, user TEXT NOT NULL, requests INTEGER NOT NULL,"
            " prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL, completion_tokens"
            " INTEGER NOT NULL, seconds REAL NOT NULL, PRIMARY KEY (day, user)) WITHOUT ROWID"
        )
        database.execute("INSERT INTO usage VALUES ('2026-01-01', 'a', 1, 10, 4, 5, 0.5)")
    database.close()
    for _ in range(2):
        usage = Usage(path)
        usage.record(Taken("2026-01-01", "a", machine_seconds=2.0))
        usage.close()
    usage = Usage(path)
    assert asyncio.run(usage.since("", None)) == [Taken("2026-01-01", "a", 1, 10, 4, 5, 0.5, 4.0)]
    usage.close()

"""What is kept of use, and the limits by day and by number of answers."""

from __future__ import annotations

import asyncio
import csv
import io
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2
import pytest

from mlx_cb.server.usage import Taken, Usage, next_day
from tests.server.conftest import LiveServer
from tests.team.conftest import Serve, Team

CHAT = {"messages": [{"role": "user", "content": "a"}]}
PATH = "/v1/chat/completions"


def ask(server: LiveServer, who: dict[str, str], **fields: Any) -> httpx2.Response:
    return server.post(PATH, CHAT | fields, headers=who)


def days(server: LiveServer, who: dict[str, str], query: str = "") -> list[dict[str, Any]]:
    return server.get("/usage" + query, headers=who).json()["days"]


def test_requests_and_tokens_are_counted_by_user(serve: Serve, team: Team) -> None:
    server = serve({"text": "a b c", "cached_tokens": 4, "delay_s": 0.02}, keys_file=team.path)
    prompt = 0
    for stream in (False, True):
        answer = ask(server, team.as_("alice"), stream=stream)
        assert answer.status_code == 200
        server.wait_until_idle()
        prompt += len(server.prompts[answer.headers["x-request-id"]])
    ask(server, team.as_("alice"), temperature=-1)  # refused: nothing was taken
    ask(server, team.as_("bob"), n=2)
    server.wait_until_idle()
    (mine,) = days(server, team.as_("alice"))
    assert (mine["user"], mine["requests"]) == ("alice", 2)
    assert (mine["prompt_tokens"], mine["cached_tokens"]) == (prompt, 8)
    assert mine["completion_tokens"] == 6
    assert mine["seconds"] > 0.1
    everyone = days(server, team.as_("boss"))
    assert [(row["user"], row["completion_tokens"]) for row in everyone] == [
        ("alice", 6), ("bob", 6),
    ]  # fmt: skip
    assert days(server, team.as_("boss"), "?user=bob") == everyone[1:]
    table = server.get("/usage?format=csv", headers=team.as_("monitor"))
    assert table.headers["content-type"].startswith("text/csv")
    rows = list(csv.DictReader(io.StringIO(table.text)))
    assert [row["user"] for row in rows] == ["alice", "bob"]
    assert rows[0]["prompt_tokens"] == str(prompt)


@pytest.mark.parametrize("query", ["?days=0", "?days=x", "?days=²", "?format=xml", "?days=99999"])
def test_bad_questions(serve: Serve, query: str) -> None:
    assert serve({"text": "a"}).get("/usage" + query).status_code == 400


def test_an_answer_that_was_left_counts_what_it_took(serve: Serve, team: Team) -> None:
    reply = {"tokens": ["x"], "repeat": True, "delay_s": 0.01}
    server = serve(reply, keys_file=team.path)
    with httpx2.stream(
        "POST", server.url + PATH, json=CHAT | {"stream": True}, headers=team.as_("alice")
    ) as answer:
        lines = answer.iter_lines()
        for _ in range(8):
            next(lines)
    server.wait_until_idle()
    (mine,) = days(server, team.as_("alice"))
    assert mine["requests"] == 1
    assert mine["prompt_tokens"] > 0
    assert 2 <= mine["completion_tokens"] < 100


def test_the_days_limit(serve: Serve, team: Team) -> None:
    team.add("kim", daily_tokens=20)
    server = serve({"text": " ".join("abcdefgh")}, keys_file=team.path)
    kim = team.as_("kim")
    codes = []
    for _ in range(4):
        codes.append(ask(server, kim).status_code)
        server.wait_until_idle()
    assert codes[0] == 200
    assert codes[-1] == 429
    refused = ask(server, kim)
    error = refused.json()["error"]
    assert (error["code"], error["type"]) == ("insufficient_quota", "rate_limit_error")
    midnight = next_day(datetime.now().astimezone())
    assert midnight.isoformat(timespec="minutes") in error["message"]
    left = (midnight - datetime.now().astimezone()).total_seconds()
    assert abs(int(refused.headers["retry-after"]) - left) < 5
    assert server.post("/v1/messages", CHAT | {"max_tokens": 5}, headers=kim).status_code == 429
    assert ask(server, team.as_("alice")).status_code == 200
    today = server.get("/usage", headers=kim).json()["today"]
    assert today["tokens"] >= today["limit"] == 20
    # The next day all is well again.
    later = datetime.now().astimezone() + timedelta(days=1)
    server.front.accounts.usage.clock = lambda: later
    assert ask(server, kim).status_code == 200


def test_open_answers_count_towards_the_day(serve: Serve, team: Team) -> None:
    team.add("kim", daily_tokens=12)
    reply = {"tokens": ["x"], "repeat": True, "delay_s": 0.01}
    server = serve(reply, keys_file=team.path)
    kim = team.as_("kim")
    with httpx2.stream(
        "POST", server.url + PATH, json=CHAT | {"stream": True}, headers=kim
    ) as answer:
        lines = answer.iter_lines()
        for _ in range(30):
            next(lines)
        assert ask(server, kim, max_tokens=1).status_code == 429


def test_at_most_so_many_answers_at_once(serve: Serve, team: Team) -> None:
    team.add("kim", max_running=2)
    server = serve({"text": "a b c", "delay_s": 0.05}, keys_file=team.path)
    most, codes = 0, []

    def run() -> None:
        codes.append(ask(server, team.as_("kim")).status_code)

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        played = list(server.engine.played.values())
        most = max(most, sum(p.user == "kim" and p.status == "running" for p in played))
        time.sleep(0.005)
    assert codes == [200] * 6
    assert most == 2
    too_many = ask(server, team.as_("kim"), n=3)
    assert too_many.status_code == 400
    assert too_many.json()["error"]["param"] == "n"


def test_a_wait_that_is_given_up_leaves_no_trace(serve: Serve, team: Team) -> None:
    team.add("kim", max_running=1)
    reply = {"tokens": ["x"], "repeat": True, "delay_s": 0.01}
    server = serve(reply, keys_file=team.path)
    kim = team.as_("kim")
    with httpx2.stream(
        "POST", server.url + PATH, json=CHAT | {"stream": True}, headers=kim
    ) as answer:
        next(answer.iter_lines())
        for _ in range(3):
            with pytest.raises(httpx2.ReadTimeout):
                httpx2.post(server.url + PATH, json=CHAT, headers=kim, timeout=0.2)
        assert ask(server, team.as_("bob"), max_tokens=1).status_code == 200
    server.wait_until_idle()
    assert ask(server, kim, max_tokens=1).status_code == 200
    server.wait_until_idle()
    assert server.front.accounts._open == {}


def taken(day: str, user: str = "a") -> Taken:
    return Taken(day, user, 1, 10, 4, 5, 0.5)


def test_days_add_up_and_stay(tmp_path: Path) -> None:
    path = tmp_path / "new" / "usage.sqlite"
    for _ in range(2):
        usage = Usage(path)
        usage.record(taken("2026-01-01"))
        usage.record(taken("2026-01-02", "b"))
        usage.close()
    usage = Usage(path)
    found = asyncio.run(usage.since("2026-01-01", None))
    assert found == [
        Taken("2026-01-01", "a", 2, 20, 8, 10, 1.0),
        Taken("2026-01-02", "b", 2, 20, 8, 10, 1.0),
    ]
    assert asyncio.run(usage.since("2026-01-02", "a")) == []
    usage.close()
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.fixture
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("berlin")
@pytest.mark.parametrize(
    ("now", "hours"),
    [("2026-03-29T00:00", 23), ("2026-10-25T00:00", 25), ("2026-06-01T23:00", 1)],
)
def test_days_of_23_and_25_hours(now: str, hours: int) -> None:
    start = datetime.fromisoformat(now).astimezone()
    assert (next_day(start) - start).total_seconds() == hours * 3600


WRITER = """
import sys
from pathlib import Path
from mlx_cb.server.usage import Taken, Usage
usage = Usage(Path(sys.argv[1]))
for k in range(100_000):
    usage.record(Taken("2026-01-01", "a", 1, 1, 1, 1, 1.0)).result()
    print(k + 1, flush=True)
"""


def test_a_killed_server_loses_nothing_that_was_written(tmp_path: Path) -> None:
    path = tmp_path / "usage.sqlite"
    written = 0
    for wait in (20, 57, 101):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(wait)]
        os.kill(process.pid, signal.SIGKILL)
        rest, _ = process.communicate()
        written += int([*lines, *rest.splitlines()][-1])
        with sqlite3.connect(path) as database:
            assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            (kept,) = database.execute("SELECT requests FROM usage").fetchone()
        database.close()
        # The last one may have been written and not yet been told.
        assert written <= kept <= written + 1
        written = kept

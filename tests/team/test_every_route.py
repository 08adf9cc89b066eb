"""Route by route: what the second user is told is the same whatever the first one does."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest

from tests.server.conftest import LiveServer
from tests.team.conftest import Team
from tests.team.test_routes import PARAMETERS, ROWS, Row

MARKER = "ALICES-SECRET"
#: Differ from one answer to the next, whoever asks.
VOLATILE = re.compile(r"[0-9a-f]{32}|\d{10}\.\d+|\d{4}-\d\d-\d\dT[0-9:.]+(Z|[+-]\d\d:\d\d)?")


@dataclass
class Watched:
    """A server on which Bob asked everything while he was alone, and Alice came then."""

    server: LiveServer
    team: Team
    alone: dict[Row, tuple[int, str]] = field(default_factory=dict)
    alices_id: str = ""

    def ask(self, row: Row) -> tuple[int, str]:
        path = row.path
        for name, value in PARAMETERS.items():
            path = path.replace(name, value)
        body = None if row.method == "GET" else {}  # which changes nothing
        with httpx2.stream(
            row.method, self.server.url + path, json=body, headers=self.team.as_("bob"), timeout=20
        ) as answer:
            is_endless = answer.headers.get("content-type", "").startswith("text/event-stream")
            text = "" if is_endless else answer.read().decode()
        names = sorted(set(answer.headers) - {"date", "content-length"})
        assert MARKER not in text
        assert "alice" not in text.lower().replace("alice's", "")
        return answer.status_code, VOLATILE.sub("", f"{names} {text}")


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    team = Team(tmp_path_factory.mktemp("team") / "keys.json")
    replies = [
        {"match": MARKER, "tokens": [MARKER], "repeat": True, "delay_s": 0.02, "cached_tokens": 7},
        {"text": "a b c"},
    ]
    server = LiveServer({"replies": replies}, keys_file=team.path)
    found = Watched(server, team)
    for row in ROWS:
        found.alone[row] = found.ask(row)
    ended = threading.Event()
    thread = threading.Thread(target=_alice, args=(found, ended))
    thread.start()
    deadline = time.monotonic() + 20
    while not found.alices_id:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    yield found
    ended.set()
    thread.join()
    server.begin_stop()
    assert server.has_stopped(20)


def _alice(watched: Watched, ended: threading.Event) -> None:
    """One answer that was made, one that was refused, one that goes on."""
    url = watched.server.url + "/v1/chat/completions"
    headers = watched.team.as_("alice")
    body: dict[str, Any] = {"messages": [{"role": "user", "content": MARKER}]}
    assert httpx2.post(url, json=body | {"max_tokens": 3}, headers=headers).status_code == 200
    assert httpx2.post(url, json=body | {"top_p": 7}, headers=headers).status_code == 400
    with httpx2.stream(
        "POST", url, json=body | {"stream": True}, headers=headers, timeout=60
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        watched.alices_id = answer.headers["x-request-id"]
        while not ended.is_set():
            next(lines)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.method} {row.path}")
def test_bob_is_told_the_same(watched: Watched, row: Row) -> None:
    assert watched.ask(row) == watched.alone[row]


PATHS_WITH_IDS = [row for row in ROWS if "{request_id}" in row.path]


@pytest.mark.parametrize("row", PATHS_WITH_IDS, ids=lambda row: f"{row.method} {row.path}")
def test_bob_can_neither_read_nor_stop_alices_request(watched: Watched, row: Row) -> None:
    path = row.path.replace("{request_id}", watched.alices_id)
    for name, value in PARAMETERS.items():
        path = path.replace(name, value)
    before = watched.server.engine.played[watched.alices_id].num_tokens
    answer = watched.server.request(row.method, path, headers=watched.team.as_("bob"))
    assert answer.status_code in (403, 404)
    assert MARKER not in answer.text
    deadline = time.monotonic() + 20
    while watched.server.engine.played[watched.alices_id].num_tokens <= before:
        assert time.monotonic() < deadline, "her answer was stopped"
        time.sleep(0.01)


def test_the_alone_answers_were_worth_comparing(watched: Watched) -> None:
    codes = {code for code, _ in watched.alone.values()}
    assert {200, 400, 403, 404} <= codes

"""Every route × no key, wrong key, user, admin × loopback, network: the code of docs/team.md.

The document's table is read here; a route of the server that it does not name fails.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from starlette.routing import Route

from mlx_cb.server.app import all_routes
from tests.server.conftest import LiveServer
from tests.team.conftest import Serve, Team

DOCS = Path(__file__).parents[2] / "docs" / "team.md"
ROW = re.compile(r"\| `(\w+) (\S+)` \| ([a-z ]+) \| (\d+) \|")
PARAMETERS = {
    "{name}": "scripted",
    "{request_id}": "0" * 32,
    "{code}": "0000",
    "{verb}": "resume",
    "{path}": "chat.html",
    "{conversation}": "0" * 32,
}

#: What a route is for -> who may.
MAY = {
    "anyone": {"nobody", "stranger", "alice", "boss", "monitor"},
    "any key": {"alice", "boss", "monitor"},
    "model": {"alice", "boss"},
    "admin": {"boss", "monitor"},
}


@dataclass(frozen=True)
class Row:
    """A line of the document's table."""

    method: str
    path: str
    right: str
    code: int

    def ask(self, server: LiveServer, headers: dict[str, str]) -> int:
        path = self.path
        for name, value in PARAMETERS.items():
            path = path.replace(name, value)
        content = None if self.method == "GET" else b"{}"
        # The head alone: a stream of events has no end.
        with server.stream(self.method, path, content=content, headers=headers) as answer:
            return answer.status_code


ROWS = [Row(m, path, right, int(code)) for m, path, right, code in ROW.findall(DOCS.read_text())]


def test_the_table_names_every_route(serve: Serve) -> None:
    front = serve({"text": "a"}).front
    found = {
        (method, route.path.replace(":path}", "}"))
        for route in all_routes(front)
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert {(row.method, row.path) for row in ROWS} == found


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("who", ["nobody", "stranger", "alice", "boss", "monitor"])
def test_every_route_with_keys(serve: Serve, team: Team, host: str, who: str) -> None:
    server = serve({"text": "a"}, keys_file=team.path, host=host)
    got = {row: row.ask(server, team.as_(who)) for row in ROWS}
    refusal = 401 if who in ("nobody", "stranger") else 403
    assert got == {row: row.code if who in MAY[row.right] else refusal for row in ROWS}


@pytest.mark.parametrize("who", ["nobody", "stranger"])
def test_every_route_of_a_server_without_keys(serve: Serve, team: Team, who: str) -> None:
    own = serve({"text": "a"})
    assert {row: row.ask(own, team.as_(who)) for row in ROWS} == {row: row.code for row in ROWS}
    network = serve({"text": "a"}, host="::")
    for row in ROWS:
        wanted = row.code if row.right == "anyone" else 401
        assert row.ask(network, team.as_(who)) == wanted, row


@pytest.mark.parametrize(
    "path", ["/metrics/", "//metrics", "/%6detrics", "/./metrics", "/status/../metrics", "/METRICS"]
)
def test_no_spelling_of_a_path_gets_around_its_right(serve: Serve, team: Team, path: str) -> None:
    server = serve({"text": "a"}, keys_file=team.path)
    answer = server.get(path, headers=team.as_("alice"), follow_redirects=True)
    assert answer.status_code in (403, 404)
    assert "mlx_cb:" not in answer.text

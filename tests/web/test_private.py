"""A conversation is its owner's alone: to everyone else, admins too, it is one that never was."""

from __future__ import annotations

import logging

import pytest
from starlette.routing import Route

from mlx_cb.server.app import all_routes
from tests.team.conftest import Team
from tests.web.conftest import Person, Serve

REPLY = {"text": "SECRET-ANSWER, which nobody else may see."}
BODIES = {
    "PATCH": {"title": "mine now"},
    "/messages": {"content": "and?", "parent": None},
    "/answers": {"parent": "0" * 32},
}


def routes_of_one(server: object) -> list[tuple[str, str]]:
    """Every method and path that names a conversation."""
    return [
        (method, route.path)
        for route in all_routes(server.front)  # type: ignore[attr-defined]
        if isinstance(route, Route) and "{conversation}" in route.path
        for method in (route.methods or set()) - {"HEAD"}
    ]


@pytest.mark.parametrize("who", ["bob", "boss"])
def test_every_route_to_anothers_conversation(serve: Serve, team: Team, who: str) -> None:
    server = serve(REPLY, keys_file=team.path)
    alice, other = Person(server, team.as_("alice")), Person(server, team.as_(who))
    hers = alice.begin()
    asked = alice.ask(hers, "SECRET-QUESTION")
    alice.answer_to(asked, hers)
    before = alice.load(hers)
    found = routes_of_one(server)
    assert len(found) == 7
    for method, path in found:
        body = BODIES.get(method) or BODIES.get("/" + path.rsplit("/", 1)[1])
        if body and "parent" in body and body["parent"]:
            body = {"parent": asked["question"]["id"]}
        answers = []
        for conversation in (hers, "0" * 32):
            target = path.replace("{conversation}", conversation)
            options = {} if body is None else {"json": body}
            answer = server.request(method, target, headers=other.headers, **options)
            assert answer.status_code == 404, (method, path)
            hidden = {"x-request-id", "date"}
            headers = {k: v for k, v in answer.headers.items() if k not in hidden}
            answers.append((answer.content, headers))
        assert answers[0] == answers[1], (method, path)
    assert alice.load(hers) == before


def test_nothing_of_hers_is_in_what_he_can_list(serve: Serve, team: Team) -> None:
    server = serve(REPLY, keys_file=team.path)
    alice, bob = Person(server, team.as_("alice")), Person(server, team.as_("bob"))
    hers = alice.begin(system="SECRET-SYSTEM")
    alice.answer_to(alice.ask(hers, "SECRET-QUESTION"), hers)
    secrets = ("SECRET", hers, "alice")
    for path in (
        "/web/conversations", "/web/conversations?q=SECRET", "/web/export", "/web/me", "/usage",
        "/status", "/status/steps",
    ):  # fmt: skip
        text = server.get(path, headers=bob.headers).text
        assert not [secret for secret in secrets if secret in text], path
    # His import names her conversation, and still makes one of his own.
    bundle = alice.server.get("/web/export", headers=alice.headers).text
    (made,) = bob.call("POST", "/import", {"json": bundle})["conversations"]
    assert made["id"] != hers
    bob.call("DELETE", "/conversations")
    assert len(alice.load(hers)["messages"]) == 2


def test_no_log_holds_what_was_said(
    serve: Serve, team: Team, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server = serve(REPLY, keys_file=team.path)
    alice = Person(server, team.as_("alice"))
    hers = alice.begin(system="SECRET-SYSTEM")
    alice.answer_to(alice.ask(hers, "SECRET-QUESTION"), hers)
    alice.call("PATCH", f"/conversations/{hers}", {"title": "SECRET-TITLE"})
    alice.call("GET", "/conversations?q=SECRET-SEARCH")
    alice.call("POST", "/import", {"markdown": "SECRET-FILE"}, 400)
    # What the test's own client writes is not the server's.
    logged = [r.getMessage() for r in caplog.records if not r.name.startswith("http")]
    assert any("path=/web/conversations " in line for line in logged)
    assert not [line for line in logged if "SECRET" in line]
    metrics = server.get("/metrics", headers=team.as_("boss")).text
    assert "SECRET" not in metrics


def test_what_she_asks_counts_as_hers(serve: Serve, team: Team) -> None:
    server = serve(REPLY, keys_file=team.path)
    alice, bob = Person(server, team.as_("alice")), Person(server, team.as_("bob"))
    hers = alice.begin()
    answer = alice.answer_to(alice.ask(hers, "hello"), hers)
    assert server.engine.played[answer["request_id"]].user == "alice"
    path = f"/status/requests/{answer['request_id']}"
    assert server.get(path, headers=alice.headers).status_code == 200
    assert server.get(path, headers=bob.headers).status_code == 404
    days = server.get("/usage", headers=alice.headers).json()["days"]
    assert [day["requests"] for day in days] == [1]
    assert days[0]["completion_tokens"] == answer["figures"]["completion_tokens"]


def test_a_days_limit_holds_in_the_chat_too(serve: Serve, team: Team) -> None:
    key = team.add("carol", daily_tokens=3)
    server = serve({"text": "a b c d e f"}, keys_file=team.path)
    carol = Person(server, {"authorization": f"Bearer {key}"})
    conversation = carol.begin()
    first = carol.answer_to(carol.ask(conversation, "hello"), conversation)
    second = carol.answer_to(carol.ask(conversation, "more", first["id"]), conversation)
    assert second["state"] == "failed"
    assert "tokens of today" in second["error"]

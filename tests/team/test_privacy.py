"""What one user can learn of another: nothing, by status, journal, usage or error texts."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from mlx_cb.server.users import LOCAL, User
from mlx_cb.server.views import Owners, status_for, steps_for, story_for
from tests.server.conftest import LiveServer
from tests.team.conftest import Serve, Team

CHAT = {"messages": [{"role": "user", "content": "a"}]}
ALICE, BOB = User("alice"), User("bob")
A, B = "a" * 32, "b" * 32
STEP = {
    "step": 7, "started": 1.0, "seconds": 0.1, "decodes": [A, B], "padding": 0, "num_waiting": 3,
    "prefills": [{"request_id": B + "-1", "num_tokens": 512}], "passed_over": {B: "blocks"},
    "token_budget": 99, "predicted_seconds": 0.1, "context_sum": 4000, "admitted": [B],
    "preempted": {A: f"no block for {B}"}, "finished": {B: "stop"}, "blocks_used": 5,
    "blocks_available": 6, "rows_decode": 2, "rows_prefill": 512,
}  # fmt: skip


def ask(server: LiveServer, who: dict[str, str], **fields: Any) -> str:
    answer = server.post("/v1/chat/completions", CHAT | fields, headers=who)
    assert answer.status_code == 200
    return answer.headers["x-request-id"]


def test_another_users_request_looks_like_none(serve: Serve, team: Team) -> None:
    server = serve({"text": "a b"}, keys_file=team.path)
    found = ask(server, team.as_("alice"))
    for who, code in (("alice", 200), ("boss", 200), ("monitor", 200), ("bob", 404)):
        assert server.get(f"/status/requests/{found}", headers=team.as_(who)).status_code == code
    foreign = server.get(f"/status/requests/{found}", headers=team.as_("bob"))
    unknown = server.get(f"/status/requests/{'0' * 32}", headers=team.as_("bob"))
    assert foreign.content == unknown.content
    hidden = {"x-request-id", "date"}
    assert {k: v for k, v in foreign.headers.items() if k not in hidden} == {
        k: v for k, v in unknown.headers.items() if k not in hidden
    }


def test_status_is_the_same_however_much_others_do(serve: Serve, team: Team) -> None:
    server = serve({"text": "a b"}, keys_file=team.path)
    before = server.get("/status", headers=team.as_("bob"))
    for _ in range(3):
        ask(server, team.as_("alice"))
    after = server.get("/status", headers=team.as_("bob"))
    assert before.content == after.content
    assert "alice" not in after.text
    assert server.get("/status", headers=team.as_("boss")).json()["answers"] is not None


def test_the_engines_status_for_a_user() -> None:
    status = {
        "ready": True, "blocks": {"used": 5}, "requests": {"waiting": 4},
        "users": {"alice": {"waiting": 1, "running": 2}, "bob": {"waiting": 3, "running": 0}},
    }  # fmt: skip
    assert status_for(ALICE, status) == {
        "ready": True, "user": "alice", "requests": {"waiting": 1, "running": 2},
    }  # fmt: skip
    assert status_for(LOCAL, status) is status
    assert status_for(BOB, {"ready": False})["requests"] == {"waiting": 0, "running": 0}


def test_the_journal_for_a_user() -> None:
    owners = Owners()
    owners.note([A], "alice")
    owners.note([B, B + "-1"], "bob")
    (part,) = steps_for(ALICE, owners, [STEP, {**STEP, "decodes": [B], "preempted": {}}])
    assert part == {
        "started": 1.0, "seconds": 0.1, "decodes": [A], "prefills": [], "admitted": [],
        "passed_over": {}, "preempted": {A: "no block for another request"}, "finished": {},
    }  # fmt: skip
    assert B not in json.dumps(steps_for(ALICE, owners, [STEP]))
    (other,) = steps_for(BOB, owners, [STEP])
    assert other["prefills"] == STEP["prefills"]
    assert A not in json.dumps(other)
    assert steps_for(User("carol"), owners, [STEP]) == []
    assert steps_for(LOCAL, owners, [STEP]) == [STEP]


def test_a_story_names_nobody_else() -> None:
    event = {"time": 1.0, "step": 9, "what": "preempted", "detail": f"no block for {B}-2"}
    story = {"request_id": A, "user": "alice", "step": 9, "waiting_for": "", "events": [event]}
    shown = story_for(ALICE, story)
    assert shown is not None
    assert B not in json.dumps(shown)
    assert "step" not in json.dumps(shown)
    assert story_for(BOB, story) is None
    assert story_for(User("boss", is_admin=True), story) is story


def test_owners_are_forgotten_not_confused() -> None:
    owners = Owners()
    owners.note([A], "alice")
    owners.note((f"{k:032x}" for k in range(20_000)), "bob")
    assert owners.of(A) is None
    assert not ALICE.may_see(owners.of(A))


def test_usage_is_ones_own(serve: Serve, team: Team) -> None:
    server = serve({"text": "a b c"}, keys_file=team.path)
    ask(server, team.as_("alice"))
    own = server.get("/usage", headers=team.as_("bob"))
    assert own.json()["days"] == []
    assert "alice" not in own.text
    for query in ("?user=alice", "?user=nobody", "?user=alice&format=csv"):
        refused = server.get("/usage" + query, headers=team.as_("bob"))
        assert refused.status_code == 403
        assert "alice" not in refused.text


def test_the_engine_is_told_who_asks_each_time(serve: Serve, team: Team) -> None:
    """The prefix cache's salt is the user's name, so a mix-up here would share a cache."""
    server = serve({"text": "a"}, keys_file=team.path)
    for _ in range(20):
        for who in ("alice", "bob"):
            found = ask(server, team.as_(who))
            assert server.engine.played[found].user == who


def test_c123_a_refused_prompt_is_nowhere(
    serve: Serve, team: Team, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server = serve({"text": "a", "match": "nothing like it"}, keys_file=team.path)
    secret = {"messages": [{"role": "user", "content": "SECRET-MARKER"}]}
    answer = server.post("/v1/chat/completions", secret, headers=team.as_("alice"))
    assert answer.status_code == 400
    for path in ("/status", "/status/steps", "/usage", "/metrics"):
        assert "SECRET-MARKER" not in server.get(path, headers=team.as_("boss")).text
    assert "status=400" in caplog.text
    assert "SECRET-MARKER" not in caplog.text

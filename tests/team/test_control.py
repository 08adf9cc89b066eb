"""What an operator does to a running server, over its admin API and with `mlx-cb ctl`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from click.testing import CliRunner

from mlx_cb.cli.ctl import command
from tests.server.conftest import LiveServer
from tests.team.conftest import Serve, Team

CHAT = {"messages": [{"role": "user", "content": "a"}]}
PATH = "/v1/chat/completions"
ENDLESS = {"tokens": ["x"], "repeat": True, "delay_s": 0.01}


def until(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


class Asking:
    """A question that is asked beside the test."""

    def __init__(
        self, server: LiveServer, who: dict[str, str] | None = None, **fields: Any
    ) -> None:
        self.answer: httpx2.Response | None = None

        def ask() -> None:
            with httpx2.Client(timeout=60) as client:
                self.answer = client.post(server.url + PATH, json=CHAT | fields, headers=who or {})

        self._thread = threading.Thread(target=ask, daemon=True)
        self._thread.start()

    def join(self) -> httpx2.Response:
        self._thread.join(30)
        assert self.answer is not None
        return self.answer


def running(server: LiveServer, user: str) -> list[Any]:
    played = list(server.engine.played.values())
    return [p for p in played if p.user == user and p.status == "running"]


def test_drain_finishes_what_runs_and_refuses_what_is_new(serve: Serve) -> None:
    server = serve({"text": "a b c d", "delay_s": 0.1})
    asking = Asking(server)
    until(lambda: running(server, "local"))
    assert server.post("/admin/control/drain").json()["draining"] is True
    refused = server.chat("hello")
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "draining"
    assert int(refused.headers["retry-after"]) >= 1
    health = server.get("/health")
    assert (health.status_code, health.json()) == (503, {"status": "draining"})
    assert asking.join().json()["choices"][0]["message"]["content"] == "a b c d"
    assert server.get("/status").json()["control"]["draining"] is True
    assert server.post("/admin/control/resume").json()["draining"] is False
    assert server.chat("hello").status_code == 200
    assert server.get("/health").status_code == 200


def test_cancelling_a_request_ends_it_with_the_operators_word(serve: Serve, team: Team) -> None:
    server = serve(ENDLESS, keys_file=team.path)
    asking = Asking(server, team.as_("alice"), n=2)
    until(lambda: len(running(server, "alice")) == 2)
    request_id = min((p.request_id for p in running(server, "alice")), key=len)
    done = server.post(f"/admin/requests/{request_id}/cancel", headers=team.as_("monitor"))
    assert done.status_code == 200
    answer = asking.join()
    assert answer.status_code == 403, "a client does not try a 403 again"
    assert answer.json()["error"]["code"] == "cancelled"
    assert "operator" in answer.json()["error"]["message"]
    server.wait_until_idle(20)
    again = server.post(f"/admin/requests/{request_id}/cancel", headers=team.as_("boss"))
    assert again.status_code == 404


def test_a_cancelled_stream_ends_with_an_error_event(serve: Serve, team: Team) -> None:
    server = serve(ENDLESS, keys_file=team.path)
    with httpx2.stream(
        "POST", server.url + PATH, json=CHAT | {"stream": True}, headers=team.as_("alice"),
        timeout=30,
    ) as answer:  # fmt: skip
        lines = answer.iter_lines()
        for _ in range(6):
            next(lines)
        server.post("/admin/users/alice/cancel", headers=team.as_("boss"))
        rest = "\n".join(lines)
    assert "cancelled" in rest
    assert "[DONE]" not in rest


def test_a_paused_user_waits_and_others_do_not(serve: Serve, team: Team) -> None:
    server = serve({"text": "a b", "delay_s": 0.02}, keys_file=team.path)
    shown = server.post("/admin/users/alice/pause", headers=team.as_("boss")).json()
    assert shown["restraint"]["paused_users"] == ["alice"]
    asking = Asking(server, team.as_("alice"))
    until(lambda: running(server, "alice"))
    assert server.post(PATH, CHAT, headers=team.as_("bob")).status_code == 200
    assert running(server, "alice")
    shown = server.post("/admin/users/alice/resume", headers=team.as_("boss")).json()
    assert shown["restraint"]["paused_users"] == []
    assert asking.join().status_code == 200


def test_waiting_for_a_place_among_ones_own_counts_towards_the_time(
    serve: Serve, team: Team
) -> None:
    team.add("kim", max_running=1)
    server = serve(ENDLESS, keys_file=team.path)
    asking = Asking(server, team.as_("kim"))
    until(lambda: running(server, "kim"))
    hurried = team.as_("kim") | {"x-request-timeout": "0.2"}
    late = server.post(PATH, CHAT, headers=hurried)
    assert (late.status_code, late.json()["error"]["code"]) == (408, "deadline_exceeded")
    server.post("/admin/users/kim/cancel", headers=team.as_("boss"))
    assert asking.join().status_code == 403


def test_caps_of_a_key(serve: Serve, team: Team) -> None:
    team.add("kim", max_input_tokens=1)
    team.add("lee", max_output_tokens=2, max_queued=1)
    server = serve({"text": "a b c d"}, keys_file=team.path, max_output_tokens=3)
    refused = server.post(PATH, CHAT, headers=team.as_("kim"))
    assert refused.status_code == 400
    assert "max_input_tokens of kim" in refused.json()["error"]["message"]
    for name, most, whose in (("lee", 2, "of lee"), ("bob", 3, "of this server")):
        asked = server.post(PATH, CHAT | {"max_tokens": 4}, headers=team.as_(name))
        assert asked.status_code == 400
        assert whose in asked.json()["error"]["message"]
        cut = server.post(PATH, CHAT, headers=team.as_(name)).json()
        assert cut["usage"]["completion_tokens"] == most
    two = server.post(PATH, CHAT | {"n": 2}, headers=team.as_("lee"))
    assert two.status_code == 429
    assert "max_queued of lee" in two.json()["error"]["message"]


@pytest.mark.parametrize(
    "path", ["/admin/control/explode", "/admin/users/alice/promote", "/admin/requests/x/love"]
)
def test_unknown_verbs(serve: Serve, path: str) -> None:
    answer = serve({"text": "a"}).post(path)
    assert answer.status_code == 404
    assert "none of" in answer.json()["error"]["message"]


def test_a_user_sees_nothing_of_it_in_the_status(serve: Serve, team: Team) -> None:
    server = serve({"text": "a"}, keys_file=team.path)
    assert "control" not in server.get("/status", headers=team.as_("alice")).json()
    assert "control" in server.get("/status", headers=team.as_("boss")).json()


def test_metrics_show_the_control(serve: Serve) -> None:
    server = serve({"text": "a"})
    assert "mlx_cb:control_frozen 0.0" in server.get("/metrics").text
    assert server.post("/admin/control/freeze").json()["frozen"] is True
    assert "mlx_cb:control_frozen 1.0" in server.get("/metrics").text
    assert server.post("/admin/control/unfreeze").json()["frozen"] is False


def ctl(server: LiveServer, *arguments: str, key: str | None = None) -> Any:
    more = ["--url", server.url, *(["--key", key] if key else [])]
    return CliRunner().invoke(command, [*arguments, *more])


def test_the_command_says_and_does(serve: Serve, team: Team) -> None:
    server = serve(ENDLESS, keys_file=team.path)
    boss = team.keys["boss"]
    shown = ctl(server, "status", key=boss)
    assert shown.exit_code == 0, shown.output
    assert "control: acting" in shown.stdout
    assert "taking requests: yes" in shown.stdout
    for verb, line in (("freeze", "control: frozen"), ("unfreeze", "control: acting")):
        assert ctl(server, verb, key=boss).exit_code == 0
        assert line in ctl(server, "status", key=boss).stdout
    ctl(server, "drain", key=boss)
    assert "no, draining" in ctl(server, "status", key=boss).stdout
    ctl(server, "resume", key=boss)
    assert "taking requests: yes" in ctl(server, "status", key=boss).stdout
    asking = Asking(server, team.as_("alice"))
    until(lambda: running(server, "alice"))
    assert ctl(server, "pause", "alice", key=boss).exit_code == 0
    assert ctl(server, "resume", "alice", key=boss).exit_code == 0
    (played,) = running(server, "alice")
    assert ctl(server, "cancel", played.request_id, key=boss).exit_code == 0
    assert asking.join().status_code == 403


def test_the_command_says_why_not(serve: Serve, team: Team) -> None:
    server = serve({"text": "a"}, keys_file=team.path)
    refused = ctl(server, "status", key=team.keys["alice"])
    assert "admin" in str(refused.exception)
    nobody = CliRunner().invoke(command, ["status", "--url", "http://127.0.0.1:9"])
    assert "is the server running there?" in str(nobody.exception)
    unknown = ctl(server, "cancel", "0" * 32, key=team.keys["boss"])
    assert "no request of this id" in str(unknown.exception)

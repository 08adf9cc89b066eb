"""The keys file, the forms of a key in a request, guessing: C068, C069, C071, C074, C123."""

from __future__ import annotations

import base64
import json
import logging
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from mlx_cb.cli import main
from mlx_cb.errors import InvalidRequest
from mlx_cb.server import keys
from mlx_cb.server.access import presented_keys
from mlx_cb.server.keys import Keys, KeysError, parse_expiry
from mlx_cb.server.rate import FREE_GUESSES, Attempts
from mlx_cb.standing import Standing
from tests.server.conftest import LiveServer
from tests.team.conftest import Serve, Team

CHAT = {"model": "scripted", "messages": [{"role": "user", "content": "a"}], "max_tokens": 5}
ERROR_TYPES = {
    "/v1/chat/completions": lambda error: error["error"]["code"] == "invalid_api_key",
    "/v1/messages": lambda error: (
        error["type"] == "error" and error["error"]["type"] == "authentication_error"
    ),
    "/api/chat": lambda error: isinstance(error["error"], str),
    "/status": lambda error: error["error"]["type"] == "authentication_error",
}


def chat(server: LiveServer, headers: dict[str, str], **fields: Any) -> httpx2.Response:
    return server.post("/v1/chat/completions", CHAT | fields, headers=headers)


def test_the_file_holds_no_key_and_is_private(team: Team) -> None:
    text = team.path.read_text()
    assert not any(key in text or key[4:20] in text for key in team.keys.values())
    assert team.path.stat().st_mode & 0o777 == 0o600
    assert all(key.startswith("mcb_") and len(key) == 47 for key in team.keys.values())
    team.path.chmod(0o640)
    with pytest.raises(KeysError, match="chmod 600"):
        keys.read(team.path)


@pytest.mark.parametrize("name", ["", "local", "a b", "a\n", "../x", "=1+1", "x" * 65, "ü"])
def test_names_that_no_one_may_have(team: Team, name: str) -> None:
    with pytest.raises(InvalidRequest):
        team.add(name)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.touch(0o600)
    with pytest.raises(KeysError, match="not a keys file"):
        keys.read(path)
    path.write_text('{"version": 2, "keys": []}')
    with pytest.raises(KeysError, match="newer"):
        keys.read(path)


def test_two_commands_at_once_lose_nothing(team: Team) -> None:
    threads = [threading.Thread(target=team.add, args=(f"user{k}",)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {record.name for record in keys.read(team.path)} >= {f"user{k}" for k in range(8)}


@pytest.mark.parametrize("path", sorted(ERROR_TYPES))
def test_c069_c074_every_form_of_a_key(serve: Serve, team: Team, path: str) -> None:
    server = serve({"text": "a"}, keys_file=team.path)
    method, body = ("GET", None) if path == "/status" else ("POST", CHAT)
    key = team.keys["alice"]
    basic, no_password, wrong = (
        base64.b64encode(text.encode()).decode() for text in (f"alice:{key}", f"{key}:", "alice:no")
    )
    right = [
        {"authorization": f"Bearer {key}"}, {"authorization": f"bearer {key}"},
        {"authorization": f"Bearer  {key}"}, {"x-api-key": key},
        {"authorization": f"Basic {basic}"}, {"authorization": f"basic {no_password}"},
        {"authorization": "Bearer", "x-api-key": key},
        {"authorization": "Bearer dummy", "x-api-key": key},
    ]  # fmt: skip
    for headers in right:
        answer = server.request(method, path, json=body, headers=headers)
        assert answer.status_code == 200, headers
    bad = [
        {}, {"authorization": "Bearer"}, {"api-key": key},
        {"authorization": f"Bearer {key[:-1]}"}, {"authorization": f"Basic {wrong}"},
        {"authorization": "Basic %%%"}, {"authorization": key}, {"x-api-key": ""},
        {"authorization": f"Bearer {keys.digest(key.encode())}"},
    ]  # fmt: skip
    server = serve({"text": "a"}, keys_file=team.path)
    for headers in bad:
        answer = server.request(method, path, json=body, headers=headers)
        assert answer.status_code == 401, headers
        assert answer.headers["www-authenticate"].startswith("Bearer")
        assert ERROR_TYPES[path](answer.json())
        assert key not in answer.text


@pytest.mark.parametrize(
    ("value", "found"),
    [(b"Bearer  k \t", [b"k"]), (b"Bearer ", []), (b"bearer\tk", []), (b"Basic OmsK", [b"k\n"])],
)
def test_values_that_clients_do_not_send_but_programs_may(value: bytes, found: list[bytes]) -> None:
    assert presented_keys({b"authorization": value, b"x-api-key": b" "}) == found


def test_c068_a_preflight_needs_no_key_and_its_page_can_read_the_401(
    serve: Serve, team: Team
) -> None:
    server = serve({"text": "a"}, keys_file=team.path, host="0.0.0.0")
    headers = {"origin": "http://localhost:3000", "access-control-request-method": "POST"}
    assert server.request("OPTIONS", "/v1/chat/completions", headers=headers).status_code == 204
    refused = server.post("/v1/chat/completions", CHAT, headers={"origin": headers["origin"]})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == headers["origin"]


def test_c071_health_needs_no_key(serve: Serve, team: Team) -> None:
    server = serve({"text": "a"}, keys_file=team.path, host="0.0.0.0")
    for method in ("GET", "HEAD"):
        assert server.request(method, "/health").status_code == 200
    server.engine._is_ready = False
    assert server.get("/health").status_code == 503


def test_a_browser_that_opens_a_url_is_asked_for_the_key(serve: Serve, team: Team) -> None:
    server = serve({"text": "a"}, keys_file=team.path)
    answer = server.get("/docs", headers={"sec-fetch-mode": "navigate"})
    assert answer.status_code == 401
    assert answer.headers["content-type"].startswith("text/html")
    assert 'id="by-key"' in answer.text
    assert "script-src 'sha256-" in answer.headers["content-security-policy"]


XHTML = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


@pytest.mark.parametrize("who", ["nobody", "alice"])
@pytest.mark.parametrize(
    ("asked", "is_page"),
    [
        ({"sec-fetch-mode": "navigate"}, True),
        ({"accept": XHTML}, True),  # a browser without TLS says no more
        ({"sec-fetch-mode": "cors", "accept": XHTML}, False),
        ({"accept": "text/html, image/gif, */*; q=.2"}, False),  # Java's programs
        ({"accept": "*/*"}, False),
        ({}, False),
    ],
)
def test_people_get_a_page_and_programs_json(
    serve: Serve, team: Team, who: str, asked: dict[str, str], is_page: bool
) -> None:
    server = serve({"text": "a"}, keys_file=team.path)
    answer = server.get("/admin", headers=team.as_(who) | asked)
    assert answer.status_code == (401 if who == "nobody" else 403)
    if is_page:
        assert answer.headers["content-type"].startswith("text/html")
        assert "script-src 'sha256-" in answer.headers["content-security-policy"]
    else:
        assert answer.json()["error"]["message"]
    posted = server.post("/admin/control/drain", headers=team.as_(who) | asked)
    assert posted.json()["error"]["message"]


def test_keys_change_without_a_restart(serve: Serve, team: Team) -> None:
    server = serve({"text": "a"}, keys_file=team.path)
    assert chat(server, team.as_("alice")).status_code == 200
    old = team.as_("alice")
    team.keys["alice"] = keys.rotate(team.path, "alice")
    assert chat(server, old).status_code == 401
    assert chat(server, team.as_("alice")).status_code == 200
    team.add("carol")
    assert chat(server, team.as_("carol")).status_code == 200
    for name in ("alice", "bob", "boss", "monitor", "carol"):
        keys.revoke(team.path, name)
    assert chat(server, team.as_("carol")).status_code == 401
    assert server.chat().status_code == 401  # without its last key it does not open


def test_a_broken_file_keeps_what_held(team: Team, caplog: pytest.LogCaptureFixture) -> None:
    known = Keys(team.path)
    team.path.write_text("{")
    found = known.find(team.keys["alice"].encode())
    assert found is not None
    assert found.name == "alice"
    assert "stay as they were" in caplog.text
    team.path.unlink()
    assert known.find(team.keys["alice"].encode()) is None
    assert known.ever_had_any


def test_keys_end(team: Team) -> None:
    now = time.time()
    key = team.add("guest", expires=parse_expiry("12h", now)).encode()
    assert Keys(team.path, lambda: now + 43_000).find(key) is not None
    assert Keys(team.path, lambda: now + 43_300).find(key) is None
    assert parse_expiry("2w", 5.0) == 5.0 + 14 * 86400
    for text in ("", "d", "-1d", "1y", "tomorrow", "2027-13-01"):
        with pytest.raises(InvalidRequest):
            parse_expiry(text, now)


def test_the_key_names_the_engines_user(serve: Serve, team: Team) -> None:
    server = serve({"text": "a"}, keys_file=team.path)
    headers = team.as_("alice")
    # What a client says of itself is not who it is.
    answer = chat(server, headers, user="bob")
    assert server.engine.played[answer.headers["x-request-id"]].user == "alice"
    local = serve({"text": "a"})
    answer = chat(local, headers)
    assert local.engine.played[answer.headers["x-request-id"]].user == "local"


def test_the_key_carries_weight_and_class_to_the_engine(serve: Serve, team: Team) -> None:
    team.add("kim", weight=2.5, rank=1)
    server = serve({"text": "a"}, keys_file=team.path)
    for who, standing in (("kim", Standing(2.5, 1)), ("alice", Standing())):
        answer = chat(server, team.as_(who))
        assert server.engine.played[answer.headers["x-request-id"]].standing == standing


def test_guesses_are_slowed_and_others_are_not(serve: Serve, team: Team) -> None:
    server = serve({"text": "a"}, keys_file=team.path)
    assert chat(server, team.as_("alice")).status_code == 200
    for _ in range(20):  # one old key sent again and again is no guess
        assert chat(server, {"x-api-key": "old"}).status_code == 401
    codes = [chat(server, {"x-api-key": f"guess{k}"}).status_code for k in range(FREE_GUESSES + 3)]
    assert codes[: FREE_GUESSES - 1] == [401] * (FREE_GUESSES - 1)
    assert codes[-1] == 429
    refused = chat(server, {"x-api-key": "another"})
    assert int(refused.headers["retry-after"]) >= 1
    # A right key that was never seen from here is not even looked at ...
    assert chat(server, team.as_("bob")).status_code == 429
    # ... but who was here before goes on, and so does the probe.
    assert chat(server, team.as_("alice")).status_code == 200
    assert server.get("/health").status_code == 200


def test_the_wait_grows_and_is_per_address() -> None:
    now = 0.0
    attempts = Attempts(lambda: now)
    waits = []
    for k in range(40):
        attempts.failed("2001:db8::1", f"d{k}")
        waits.append(attempts.wait("2001:db8::ffff", "new"))  # the same network of IPv6
        now += waits[-1]
    assert waits[: FREE_GUESSES - 1] == [0.0] * (FREE_GUESSES - 1)
    assert waits[FREE_GUESSES - 1 : FREE_GUESSES + 3] == [1.0, 2.0, 4.0, 8.0]
    assert waits[-1] == 60.0
    attempts.failed("2001:db8::1", "one more")
    assert attempts.wait("2001:db8:0:1::1", "new") == 0.0
    assert attempts.wait("192.0.2.1", "new") == 0.0
    now += 1000
    attempts.failed("2001:db8::1", "much later")
    assert attempts.wait("2001:db8::1", "new") == 0.0


def test_no_key_reaches_the_log(serve: Serve, team: Team, caplog: pytest.LogCaptureFixture) -> None:
    server = serve({"text": "a"}, keys_file=team.path, log_prompts=True)
    given = [*team.keys.values(), "mcb_secret_guess"]
    with caplog.at_level(logging.DEBUG):
        for key in given:
            chat(server, {"x-api-key": key})
            server.get("/status", headers={"authorization": f"Bearer {key}"})
            server.get("/usage", headers={"authorization": f"Basic {key}"})
    assert "user=alice" in caplog.text
    assert "user=-" in caplog.text
    assert not any(key[4:14] in caplog.text for key in given)


def run(*arguments: str) -> int:
    return main(list(arguments))


def test_the_command_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "deep" / "keys.json")
    assert run("keys", "add", "dora", "--admin", "--daily-tokens", "9", "--keys", file) == 0
    assert run("keys", "add", "bot", "--class", "batch", "--weight", "0.5", "--keys", file) == 0
    assert run("keys", "add", "zero", "--weight", "0", "--keys", file) == 2
    out, _ = capfd.readouterr()
    key = out.split()[0]
    found = Keys(Path(file)).find(key.encode())
    assert found is not None
    assert (found.name, found.is_admin, found.daily_tokens) == ("dora", True, 9)
    assert run("keys", "add", "dora", "--keys", file) == 1
    assert "rotate" in capfd.readouterr().err
    assert run("keys", "add", "a/b", "--keys", file) == 2
    assert run("keys", "add", "x", "--expires", "2001-01-01", "--keys", file) == 2
    assert run("keys", "list", "--keys", file) == 0
    listed = capfd.readouterr().out
    assert "model+admin" in listed
    assert re.search(r"bot +model +batch +0\.5 ", listed)
    assert key not in listed
    assert run("keys", "rotate", "dora", "--keys", file) == 0
    assert Keys(Path(file)).find(key.encode()) is None
    assert run("keys", "revoke", "dora", "--keys", file) == 0
    assert run("keys", "revoke", "dora", "--keys", file) == 1
    assert run("keys", "revoke", "bot", "--keys", file) == 0
    assert json.loads(Path(file).read_text()) == {"version": 1, "keys": []}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.2"])
def test_the_network_is_not_let_in_without_a_key(tmp_path: Path, host: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "mlx_cb", "serve", "demo", "--host", host, "--port", "0"],
        env={"XDG_CONFIG_HOME": str(tmp_path), "PATH": ""},
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    assert f"--host {host} lets the network in" in ended.stderr
    assert "mlx-cb keys add NAME" in ended.stderr

"""Browsers that are signed in: by a key, by a link, by an admin's word; and what they cannot do."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from mlx_cb.cli import main
from mlx_cb.errors import InvalidRequest, MlxCbError
from mlx_cb.server import keys
from mlx_cb.server.cookies import cookie_name, cookie_of, is_own_page, set_cookie
from mlx_cb.server.keys import Keys
from mlx_cb.server.links import (
    Entered,
    LinkError,
    Links,
    NameTaken,
    NeedsName,
    NobodyWaits,
    Waits,
)
from mlx_cb.server.rate import FREE_GUESSES
from mlx_cb.server.sign_ins import HOLDS_S, MOST_PER_USER, SignIns, file_beside
from tests.server.conftest import LiveServer
from tests.team.conftest import Serve, Team

CHAT = {"messages": [{"role": "user", "content": "a"}]}
PATH = "/v1/chat/completions"
NEW_KEY = {"ends_the_old_one": True}
OWN = {"sec-fetch-site": "same-origin"}


def send(server: LiveServer, path: str, content: Any = None, **headers: str) -> httpx2.Response:
    """As our own page does, unless headers say otherwise; without a jar for cookies."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    method = "GET" if content is None else "POST"
    return httpx2.request(method, server.url + path, json=content, headers=OWN | named, timeout=20)


def sign_in(server: LiveServer, key: str) -> str:
    """The cookie that a key gives."""
    answer = send(server, "/sign-in", {"key": key})
    assert answer.status_code == 200, answer.text
    return cookie_in(answer)


def cookie_in(answer: httpx2.Response) -> str:
    return answer.headers["set-cookie"].partition(";")[0]


def who(server: LiveServer, cookie: str) -> str | None:
    answer = send(server, "/account", cookie=cookie)
    return answer.json()["user"] if answer.status_code == 200 else None


def test_a_key_signs_a_browser_in(serve: Serve, team: Team) -> None:
    server = serve({"text": "a"}, keys_file=team.path)
    answer = send(server, "/sign-in", {"key": f" {team.keys['alice']}\n"})
    assert answer.json() == {"user": "alice"}
    given = answer.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(given.split("; "))
    assert answer.headers["cache-control"] == "no-store"
    cookie = cookie_in(answer)
    account = send(server, "/account", cookie=cookie).json()
    assert (account["user"], account["admin"], account["has_key"]) == ("alice", False, True)
    made = send(server, PATH, CHAT, cookie=f"other=x; {cookie}; more=y")
    assert made.status_code == 200
    assert server.engine.played[made.headers["x-request-id"]].user == "alice"
    assert send(server, "/metrics", cookie=cookie).status_code == 403
    boss = sign_in(server, team.keys["boss"])
    assert send(server, "/metrics", cookie=boss).status_code == 200
    monitor = sign_in(server, team.keys["monitor"])
    assert send(server, PATH, CHAT, cookie=monitor).status_code == 403


def test_the_file_holds_no_cookie_and_is_private(serve: Serve, team: Team) -> None:
    server = serve({"text": "a"}, keys_file=team.path)
    token = sign_in(server, team.keys["alice"]).partition("=")[2]
    path = file_beside(team.path).path
    assert token not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    stored = file_beside(team.path).read().sign_ins[0].sha256
    assert who(server, f"mlx-cb={stored}") is None


def test_by_tls_the_cookie_is_this_hosts_alone() -> None:
    secure = set_cookie("t", True, 9).split("; ")
    assert secure[0] == "__Host-mlx-cb=t"
    assert {"Secure", "HttpOnly", "SameSite=Strict", "Path=/", "Max-Age=9"} == set(secure[1:])
    assert "Secure" not in set_cookie("t", False, 9)
    # A cookie that another scheme's server set is not taken for this one's.
    assert cookie_of({b"cookie": b"mlx-cb=t"}, True) is None
    assert cookie_of({b"cookie": b"x; =; mlx-cb; mlx-cb=; mlx-cb=t; a=b"}, False) == "t"
    assert cookie_name(True).startswith("__Host-")


FORGED = [
    ({}, 401),
    ({"sec-fetch-site": "cross-site"}, 401),
    ({"sec-fetch-site": "same-site"}, 401),
    ({"sec-fetch-site": "none"}, 401),
    ({"sec-fetch-site": "cross-site", "origin": "https://evil.example"}, 403),
    ({"origin": "https://evil.example"}, 403),
    ({"origin": "null"}, 403),
    ({"origin": "http://localhost:3000"}, 401),  # may use the server, but not as who sits there
    ({"origin": "http://localhost:3000", "sec-fetch-site": "same-site"}, 401),
    ({"sec-fetch-site": "same-origin"}, 200),
    ({"origin": "OWN"}, 200),
]


@pytest.mark.parametrize(("headers", "code"), FORGED)
@pytest.mark.parametrize("basic", [False, True])
def test_a_forged_request_is_nobodys(
    serve: Serve, team: Team, headers: dict[str, str], code: int, basic: bool
) -> None:
    """What a browser adds by itself counts only for our own pages."""
    server = serve({"text": "a"}, keys_file=team.path)
    given = {name: server.url if value == "OWN" else value for name, value in headers.items()}
    auth = ("alice", team.keys["alice"]) if basic else None
    if not basic:
        given["cookie"] = sign_in(server, team.keys["alice"])
    answer = httpx2.post(server.url + PATH, json=CHAT, headers=given, auth=auth)
    if basic and not ({"origin", "sec-fetch-site"} & set(headers)):
        code = 200  # curl -u: no browser
    if basic and headers == {"sec-fetch-site": "none"}:
        code = 200
    assert answer.status_code == code
    assert bool(server.engine.played) == (code == 200)


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, 200), ({"sec-fetch-site": "none"}, 200), ({"sec-fetch-site": "same-origin"}, 200),
        ({"sec-fetch-site": "cross-site"}, 401), ({"sec-fetch-site": "same-site"}, 401),
        ({"origin": "http://localhost:3000"}, 401),
    ],
)  # fmt: skip
def test_reading_by_another_page_is_nobodys(
    serve: Serve, team: Team, headers: dict[str, str], code: int
) -> None:
    server = serve({"text": "a"}, keys_file=team.path)
    cookie = {"cookie": sign_in(server, team.keys["alice"])}
    assert httpx2.get(server.url + "/usage", headers=headers | cookie).status_code == code


@pytest.mark.parametrize(
    "kind",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""],
)
@pytest.mark.parametrize("path", [PATH, "/sign-out", "/account/key"])
def test_no_form_can_be_sent(serve: Serve, team: Team, kind: str, path: str) -> None:
    server = serve({"text": "a"}, keys_file=team.path)
    cookie = sign_in(server, team.keys["alice"])
    headers = OWN | {"content-type": kind, "cookie": cookie}
    answer = httpx2.post(server.url + path, content=json.dumps(CHAT), headers=headers)
    assert answer.status_code == 403
    assert "application/json" in answer.text
    assert not server.engine.played


def test_nobody_is_signed_in_by_another_site(serve: Serve, team: Team) -> None:
    server = serve({"text": "a"}, keys_file=team.path)
    for headers in ({"sec-fetch-site": "cross-site"}, {"origin": "http://localhost:1"}):
        body = {"key": team.keys["bob"]}
        answer = httpx2.post(server.url + "/sign-in", json=body, headers=headers)
        assert answer.status_code == 403
        assert "set-cookie" not in answer.headers


def test_a_key_that_is_sent_is_the_one_that_counts(serve: Serve, team: Team) -> None:
    server = serve({"text": "a"}, keys_file=team.path)
    cookie = sign_in(server, team.keys["alice"])
    assert send(server, "/account", cookie=cookie, **{"x-api-key": "wrong"}).status_code == 401
    as_bob = send(server, "/account", cookie=cookie, authorization=f"Bearer {team.keys['bob']}")
    assert as_bob.json()["user"] == "bob"


def test_signing_out(serve: Serve, team: Team) -> None:
    server = serve({"text": "a"}, keys_file=team.path)
    first, second, bobs = (sign_in(server, team.keys[n]) for n in ("alice", "alice", "bob"))
    answer = send(server, "/sign-out", {}, cookie=first)
    assert answer.status_code == 204
    assert "Max-Age=0" in answer.headers["set-cookie"]
    assert [who(server, one) for one in (first, second, bobs)] == [None, "alice", "bob"]
    third = sign_in(server, team.keys["alice"])
    assert send(server, "/sign-out", {"everywhere": True}, cookie=third).status_code == 204
    assert [who(server, one) for one in (second, third, bobs)] == [None, None, "bob"]


def test_sign_ins_end_with_the_key(serve: Serve, team: Team) -> None:
    server = serve({"text": "a"}, keys_file=team.path)
    alices, bobs = sign_in(server, team.keys["alice"]), sign_in(server, team.keys["bob"])
    keys.rotate(team.path, "alice")
    assert [who(server, one) for one in (alices, bobs)] == [None, "bob"]
    keys.revoke(team.path, "bob")
    assert who(server, bobs) is None
    team.add("bob")  # another one of this name is somebody else
    assert who(server, bobs) is None


def test_they_outlive_a_restart_and_then_end(team: Team) -> None:
    now = time.time()
    record = Keys(team.path).record_of("alice")
    assert record is not None
    token = SignIns(Keys(team.path), lambda: now).sign_in(record)
    later = SignIns(Keys(team.path), lambda: now + HOLDS_S - 1).user_of(token)
    assert later is not None
    assert later.name == "alice"
    assert SignIns(Keys(team.path), lambda: now + HOLDS_S).user_of(token) is None
    newest = [SignIns(Keys(team.path), lambda: now).sign_in(record) for _ in range(MOST_PER_USER)]
    known = SignIns(Keys(team.path))
    assert known.user_of(token) is None
    assert all(known.user_of(one) is not None for one in newest)


def test_a_broken_file_keeps_who_is_signed_in(team: Team, caplog: pytest.LogCaptureFixture) -> None:
    known = SignIns(Keys(team.path))
    record = Keys(team.path).record_of("alice")
    assert record is not None
    token = known.sign_in(record)
    assert known.user_of(token) is not None
    known.file.path.write_text("{")
    assert known.user_of(token) is not None
    assert "stay as they were" in caplog.text


def test_a_new_key_for_programs(serve: Serve, team: Team) -> None:
    server = serve({"text": "a"}, keys_file=team.path)
    here, elsewhere = sign_in(server, team.keys["alice"]), sign_in(server, team.keys["alice"])
    assert send(server, "/account/key", {"ends_the_old_one": False}, cookie=here).status_code == 400
    answer = send(server, "/account/key", NEW_KEY, cookie=here)
    made = answer.json()["key"]
    assert send(server, PATH, CHAT, authorization=f"Bearer {made}").status_code == 200
    assert send(server, PATH, CHAT, **team.as_("alice")).status_code == 401
    assert [who(server, one) for one in (here, elsewhere, cookie_in(answer))] == [
        None, None, "alice",
    ]  # fmt: skip


def test_a_server_without_keys_needs_no_sign_in(serve: Serve) -> None:
    server = serve({"text": "a"})
    account = send(server, "/account").json()
    assert (account["user"], account["has_key"]) == ("local", False)
    for path, body in (("/sign-in", {"key": "x"}), ("/account/key", NEW_KEY)):
        assert send(server, path, body).status_code == 400


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"key": "a", "link": "b"},
        {"name": "x"},
        {"key": 1},
        {"who": "x"},
        [],
        {"key": "x" * 9999},
    ],
)
def test_sign_in_bodies_that_say_nothing(serve: Serve, team: Team, given: Any) -> None:
    server = serve({"text": "a"}, keys_file=team.path)
    assert send(server, "/sign-in", given).status_code in (400, 413)


def test_guessed_keys_and_links_are_slowed(serve: Serve, team: Team) -> None:
    for what in ("key", "link"):
        server = serve({"text": "a"}, keys_file=team.path)
        codes = [
            send(server, "/sign-in", {what: f"guess{k}"}).status_code
            for k in range(FREE_GUESSES + 2)
        ]
        refusal = 401 if what == "key" else 403
        assert codes[: FREE_GUESSES - 1] == [refusal] * (FREE_GUESSES - 1)
        assert codes[-1] == 429


def test_an_invitation_signs_in_once(serve: Serve, team: Team) -> None:
    server = serve({"text": "a"}, keys_file=team.path)
    token = Links(team.path).make("bob")
    assert token not in file_beside(team.path).path.read_text()
    first, second = (send(server, "/sign-in", {"link": token}) for _ in range(2))
    assert (first.status_code, second.status_code) == (200, 403)
    assert who(server, cookie_in(first)) == "bob"
    revoked = Links(team.path).make("alice")
    keys.revoke(team.path, "alice")
    assert send(server, "/sign-in", {"link": revoked}).status_code == 403


def test_of_many_who_open_a_link_at_once_one_comes_in(team: Team) -> None:
    links = Links(team.path)
    token = links.make("bob")
    ends: list[Any] = []

    def run() -> None:
        try:
            ends.append(links.open(token, None, "-"))
        except LinkError as error:
            ends.append(error)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(isinstance(end, Entered) for end in ends) == 1
    assert sum(isinstance(end, LinkError) for end in ends) == 7


def test_links_end(team: Team) -> None:
    now = 1000.0
    links = Links(team.path, lambda: now)
    token = links.make("bob", 60)
    now += 61
    with pytest.raises(LinkError, match="too old"):
        links.open(token, None, "-")


def test_a_stranger_is_let_in_by_an_admins_word(
    serve: Serve, team: Team, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    server = serve({"text": "a"}, keys_file=team.path)
    token = Links(team.path).make()
    assert send(server, "/sign-in", {"link": token}).json() == {"needs": "name"}
    bad = send(server, "/sign-in", {"link": token, "name": "../x"})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "name")
    asked = send(server, "/sign-in", {"link": token, "name": "carol"})
    assert asked.status_code == 202
    wish = {"asking": asked.json()["asking"]}
    code = asked.json()["code"]
    assert f"mlx-cb keys confirm {code}" in caplog.text
    assert token not in caplog.text
    assert send(server, "/sign-in", {"link": token, "name": "dora"}).status_code == 403
    again = send(server, "/sign-in", wish)
    assert (again.status_code, "set-cookie" in again.headers) == (202, False)
    (waiting,) = Links(team.path).asking()
    assert (waiting.name, waiting.code, waiting.address) == ("carol", code, "127.0.0.1")
    assert Links(team.path).confirm(code) == "carol"
    entered = send(server, "/sign-in", wish)
    assert who(server, cookie_in(entered)) == "carol"
    made = send(server, PATH, CHAT, cookie=cookie_in(entered))
    assert server.engine.played[made.headers["x-request-id"]].user == "carol"
    assert send(server, "/sign-in", wish).status_code == 403
    assert Links(team.path).asking() == []


def test_nobody_becomes_somebody_else_by_saying_so(serve: Serve, team: Team) -> None:
    server = serve({"text": "a"}, keys_file=team.path)
    links = Links(team.path)
    waits = links.open(links.make(), "boss", "-")
    assert isinstance(waits, Waits)
    with pytest.raises(NameTaken, match="has an account"):
        links.confirm(waits.code)
    assert send(server, "/sign-in", {"asking": waits.secret}).status_code == 202
    assert links.refuse(waits.code) == "boss"
    assert send(server, "/sign-in", {"asking": waits.secret}).status_code == 403
    with pytest.raises(NobodyWaits):
        links.confirm(waits.code)
    with pytest.raises(InvalidRequest):
        links.open(links.make(), "local", "-")


def test_not_too_many_wait(team: Team) -> None:
    links = Links(team.path)
    codes = set()
    for k in range(50):
        waits = links.open(links.make(), f"u{k}", "-")
        assert isinstance(waits, Waits)
        codes.add(waits.code)
    assert len(codes) == 50
    token = links.make()
    assert links.open(token, None, "-") == NeedsName()
    with pytest.raises(LinkError, match="too many"):
        links.open(token, "one-more", "-")
    links.refuse(codes.pop())
    assert isinstance(links.open(token, "one-more", "-"), Waits)


def run(*arguments: str) -> int:
    return main(list(arguments))


def test_the_command_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = ("--keys", str(tmp_path / "keys.json"))
    path = Path(file[1])
    assert run("keys", "invite", "eve", *file) == 2
    assert "--url" in capfd.readouterr().err
    assert run("keys", "invite", "eve", "--weight", "2", "--url", "https://m.local:1/", *file) == 0
    out, errors = capfd.readouterr()
    found = re.fullmatch(r"https://m\.local:1/sign-in#(\S+)\n", out)
    assert found is not None
    assert found[1] not in errors
    entered = Links(path).open(found[1], None, "-")
    assert isinstance(entered, Entered)
    record = Keys(path).record_of("eve")
    assert record is not None
    assert record.weight == 2
    SignIns(Keys(path)).announce("https://n.local:2")
    assert run("keys", "pair", "--valid", "1h", *file) == 0
    out, _ = capfd.readouterr()
    assert out.startswith("https://n.local:2/sign-in#")
    waits = Links(path).open(out.strip().partition("#")[2], "finn", "192.0.2.1")
    assert isinstance(waits, Waits)
    assert run("keys", "asking", *file) == 0
    assert f"{waits.code}  finn  from 192.0.2.1" in capfd.readouterr().out
    assert run("keys", "confirm", waits.code, *file) == 0
    assert run("keys", "confirm", waits.code, *file) == 1
    assert isinstance(Links(path).ask_again(waits.secret), Entered)
    assert run("keys", "refuse", "0000", *file) == 1
    assert run("keys", "pair", "--valid", "x", *file) == 2


def test_files_of_sign_ins_are_refused_when_others_may_read_them(team: Team) -> None:
    Links(team.path).make()
    file_beside(team.path).path.chmod(0o644)
    with pytest.raises(MlxCbError, match="chmod 600"):
        SignIns(Keys(team.path))


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "DELETE"])
def test_which_page_is_our_own(method: str) -> None:
    own = {b"host": b"a.local:1", b"origin": b"https://a.local:1"}
    other = {b"host": b"a.local:1", b"origin": b"https://a.local:2"}
    assert is_own_page(method, own)
    assert not is_own_page(method, other)
    assert is_own_page(method, {b"host": b"a"}) == (method in ("GET", "HEAD"))
    # Behind a proxy the browser's word stands, whatever the names are.
    assert is_own_page(method, {**other, b"sec-fetch-site": b"same-origin"})
    assert not is_own_page(method, {**own, b"sec-fetch-site": b"cross-site"})

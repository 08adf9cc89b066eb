"""Signing in and the operator's page in a real browser."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest

from mlx_cb.server.links import Links, address_of
from tests.server.conftest import LiveServer
from tests.team.conftest import Serve, Team
from tests.web.browser import NARROW, NewPage, axe_findings, browser, new_page, picture

__all__ = ["browser", "new_page"]

CHAT = {"messages": [{"role": "user", "content": "a"}], "stream": True}


def signed_in(new_page: NewPage, server: LiveServer, key: str, path: str, **options: Any) -> Any:
    """A page that asked who one is, was told a key, and went on."""
    page = new_page(server, path=path, **options)
    page.get_by_label("Your key").fill(key)
    page.get_by_role("button", name="Sign in").click()
    return page


@contextmanager
def talking(server: LiveServer, headers: dict[str, str]) -> Iterator[None]:
    """An answer that is being made meanwhile."""
    ended = threading.Event()

    def run() -> None:
        with httpx2.stream(
            "POST", server.url + "/v1/chat/completions", json=CHAT, headers=headers, timeout=60
        ) as answer:
            for _ in answer.iter_lines():
                if ended.is_set():
                    return

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_a_key_opens_the_page_that_was_asked_for(
    serve: Serve, team: Team, new_page: NewPage
) -> None:
    server = serve({"text": "a"}, keys_file=team.path)
    page = new_page(server, path="/admin")
    page.get_by_label("Your key").fill("mcb_wrong")
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("alert").get_by_text("not known here").wait_for()
    picture(page, "sign-in")
    assert axe_findings(page) == []
    page.get_by_label("Your key").fill(team.keys["boss"])
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="scripted").wait_for()
    (cookie,) = page.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"], cookie["path"]) == (True, "Strict", "/")
    assert page.evaluate("document.cookie + JSON.stringify(localStorage)") == "{}"


def test_who_is_no_admin_is_told_what_to_do(serve: Serve, team: Team, new_page: NewPage) -> None:
    server = serve({"text": "a"}, keys_file=team.path)
    page = signed_in(new_page, server, team.keys["alice"], "/admin")
    page.get_by_text("You are signed in as alice. This page is for").wait_for()
    picture(page, "no-admin")
    assert axe_findings(page) == []
    assert page.get_by_role("link", name="Chat").get_attribute("href") == "/"
    page.get_by_role("button", name="Sign in with another key").click()
    page.get_by_label("Your key").fill(team.keys["boss"])
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="scripted").wait_for()


@pytest.mark.slow
def test_who_may_not_use_the_model_is_told_so(serve: Serve, team: Team, new_page: NewPage) -> None:
    server = serve({"text": "a"}, keys_file=team.path)
    page = signed_in(new_page, server, team.keys["monitor"], "/v1/models")
    page.get_by_text("does not carry the right to use the model").wait_for()
    assert page.get_by_role("link", name="Chat").count() == 0


@pytest.mark.slow
def test_an_account_in_the_browser(serve: Serve, team: Team, new_page: NewPage) -> None:
    server = serve({"text": "a"}, keys_file=team.path)
    page = new_page(server, path="/sign-in", viewport=NARROW, color_scheme="dark")
    address = address_of(server.url, Links(team.path).make("bob"))
    page.goto(address)
    page.wait_for_url(server.url + "/")
    page.goto(server.url + "/sign-in")
    page.get_by_text("You are bob").wait_for()
    page.get_by_text("0 requests").wait_for()
    page.get_by_role("button", name="Make a key").click()
    shown = page.locator("#shown-key code")
    shown.wait_for()
    made = shown.inner_text()
    picture(page, "account-narrow-dark")
    assert axe_findings(page) == []
    assert server.get("/account", headers={"x-api-key": made}).json()["user"] == "bob"
    page.get_by_role("button", name="Sign out", exact=True).click()
    page.get_by_label("Your key").wait_for()
    assert page.context.cookies() == []
    # The link was for once.
    page.goto(address)
    page.get_by_role("alert").get_by_text("used already").wait_for()


def test_somebody_new_is_let_in_by_the_admin(serve: Serve, team: Team, new_page: NewPage) -> None:
    server = serve({"text": "a"}, keys_file=team.path)
    admin = signed_in(new_page, server, team.keys["boss"], "/admin")
    admin.get_by_role("button", name="Make a link").click()
    admin.get_by_alt_text("picture for a phone").wait_for()
    picture(admin, "admin-link")
    address = admin.locator(".link code").inner_text()
    page = new_page(server, path="/sign-in", viewport=NARROW)
    page.goto(address)
    page.get_by_label("Your name").fill("carol")
    page.get_by_role("button", name="Ask to be let in").click()
    code = page.locator("#code")
    code.get_by_text(re.compile(r"\d{4}")).wait_for()
    picture(page, "waiting-narrow")
    assert axe_findings(page) == []
    page.reload()  # the wish is not lost
    page.get_by_text("Waiting to be let in").wait_for()
    asking = admin.get_by_role("alert").filter(has_text="carol")
    assert code.inner_text() in asking.inner_text()
    asking.get_by_role("button", name="Let in").click()
    page.wait_for_url(server.url + "/")
    page.goto(server.url + "/sign-in")
    page.get_by_text("You are carol").wait_for()
    asking.wait_for(state="detached")
    admin.get_by_role("region", name="People").get_by_text("carol").wait_for()


@pytest.mark.slow
def test_the_page_in_japanese(serve: Serve, team: Team, new_page: NewPage) -> None:
    server = serve({"text": "a"}, keys_file=team.path)
    page = new_page(server, path="/sign-in", locale="ja-JP")
    page.get_by_role("heading", name="サインイン").wait_for()
    assert page.evaluate("document.documentElement.lang") == "ja"


def test_the_operators_page(serve: Serve, team: Team, new_page: NewPage) -> None:
    server = serve(
        {"tokens": ["x"], "repeat": True, "delay_s": 0.02}, keys_file=team.path,
        script={"max_num_seqs": 2},
    )  # fmt: skip
    page = signed_in(new_page, server, team.keys["boss"], "/admin")
    page.get_by_role("heading", name="scripted").wait_for()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.reload()
    page.get_by_role("heading", name="scripted").wait_for()
    assert [url for url in asked if "/admin/state" not in url] == [server.url + "/admin"]
    with talking(server, team.as_("alice")), talking(server, team.as_("bob")):
        users = page.get_by_role("region", name="Users at work").last
        for name in ("alice", "bob"):
            users.get_by_text(name).wait_for()
        page.get_by_text("writes").first.wait_for()
        picture(page, "admin")
        assert axe_findings(page) == []
        page.set_viewport_size(NARROW)
        page.emulate_media(color_scheme="dark")
        picture(page, "admin-narrow-dark")
        assert axe_findings(page) == []
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= NARROW["width"]
    page.get_by_text("Nobody is at work").or_(page.get_by_text("–").first).first.wait_for()
    assert page.get_by_role("list", name="Newest log lines").count() == 1


HOSTILE = """<!doctype html><title>elsewhere</title>
<form id=f method=post enctype="text/plain" action="{url}/v1/chat/completions" target=frame>
<input name='{{"messages":[{{"role":"user","content":"a' value='"}}]}}'></form>
<iframe name=frame></iframe>
<script>
  const send = (path, kind) => fetch("{url}" + path, {{method: "POST", mode: "no-cors",
    credentials: "include", headers: {{"content-type": kind}},
    body: JSON.stringify({{messages: [{{role: "user", content: "a"}}]}})}}).catch(() => 0);
  const read = (path) => fetch("{url}" + path, {{credentials: "include"}})
    .then((answer) => answer.text(), () => "nothing");
  document.getElementById("f").submit();
  Promise.all([send("/v1/chat/completions", "text/plain"), send("/sign-out", "text/plain"),
    read("/usage"), read("/account")])
    .then((all) => {{ document.title = "told " + all.slice(2); }});
</script>"""


@pytest.mark.parametrize(
    "other", ["http://localhost:1", pytest.param("http://evil.example", marks=pytest.mark.slow)]
)
def test_another_sites_page_acts_as_nobody(
    serve: Serve, team: Team, new_page: NewPage, other: str
) -> None:
    """A page of another origin, in the browser of somebody who is signed in here."""
    server = serve({"text": "a"}, keys_file=team.path)
    page = signed_in(new_page, server, team.keys["alice"], "/sign-in")
    page.wait_for_url(server.url + "/")
    hostile = page.context.new_page()
    body = HOSTILE.format(url=server.url)
    hostile.route(other + "/**", lambda route: route.fulfill(body=body, content_type="text/html"))
    hostile.goto(other + "/")
    hostile.wait_for_function("document.title.startsWith('told')")
    assert not server.engine.played
    assert "alice" not in hostile.title()
    page.goto(server.url + "/sign-in")
    page.get_by_text("You are alice").wait_for()  # nor was she signed out

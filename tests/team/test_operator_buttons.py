"""Every button of `/admin` is clicked in a browser, and does to streams what it says."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from mlx_cb.server.links import Links, Waits
from tests.e2e.server import Server
from tests.team.conftest import Serve, Team
from tests.team.test_browser import signed_in
from tests.team.test_control import CHAT, ENDLESS, PATH, until
from tests.web.browser import NewPage, axe_findings, browser, chromium, new_page, picture

__all__ = ["browser", "new_page"]

chromium()  # without it, the whole module is skipped at once
Start = Callable[[], Any]


class Stream:
    """An answer without an end, of which somebody counts the pieces."""

    def __init__(self, server: Any, who: dict[str, str]) -> None:
        self.count = 0
        self.said = ""
        self.request_id = ""
        self.status = 0
        self.is_enough = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(server.url + PATH, who))
        self._thread.start()
        until(lambda: self.count > 2, 60)

    def _read(self, url: str, who: dict[str, str]) -> None:
        body = CHAT | {"stream": True, "ignore_eos": True}
        with httpx2.stream("POST", url, json=body, headers=who, timeout=120) as answer:
            self.request_id = answer.headers["x-request-id"]
            for line in answer.iter_lines():
                self.count += line.startswith("data: {")
                self.said += line if '"error"' in line else ""
                if self.is_enough.is_set():
                    return

    def goes_on(self) -> None:
        """Wait for more of it."""
        before = self.count
        until(lambda: self.count > before + 2, 60)

    def stands_while(self, other: Stream) -> None:
        """What was on its way when it was paused has come; then nothing comes any more."""
        other.goes_on()
        before = self.count
        for _ in range(3):
            other.goes_on()
        assert self.count == before

    def has_ended(self) -> str:
        """Wait for the end; how the client was told."""
        self._thread.join(60)
        assert not self._thread.is_alive()
        error: str = json.loads(self.said.removeprefix("data: "))["error"]["code"]
        return error

    def end(self) -> None:
        self.is_enough.set()
        self._thread.join(60)


@pytest.fixture
def streams() -> Iterator[list[Stream]]:
    made: list[Stream] = []
    yield made
    for stream in made:
        stream.end()


@pytest.fixture(params=["scripted", pytest.param("demo", marks=pytest.mark.slow)])
def server(
    request: pytest.FixtureRequest, serve: Serve, team: Team, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Iterator[Any]:  # fmt: skip
    """The same buttons in front of a script, and of the engine with its record of orders."""
    if request.param == "scripted":
        yield serve(ENDLESS, keys_file=team.path)
        return
    monkeypatch.setenv("MLX_CB_CONFIG", str(tmp_path / "config.toml"))
    started = Server("demo", "--keys", str(team.path))
    yield started
    started.stop()


def row(page: Any, region: str, text: str) -> Any:
    part = page.get_by_role("region", name=region, exact=True).first
    return part.get_by_role("row").filter(has_text=text)


def click(part: Any, name: str) -> None:
    part.get_by_role("button", name=name, exact=True).click()


def post(server: Any, who: dict[str, str]) -> int:
    body = CHAT | {"max_tokens": 1}
    return httpx2.post(server.url + PATH, json=body, headers=who, timeout=60).status_code


def test_pausing_and_ending_what_people_ask(
    server: Any, team: Team, new_page: NewPage, streams: list[Stream]
) -> None:
    page = signed_in(new_page, server, team.keys["boss"], "/admin")
    alice, bob = (Stream(server, team.as_(name)) for name in ("alice", "bob"))
    streams += [alice, bob]

    hers = row(page, "Users at work", "alice")
    click(hers, "Pause")
    hers.get_by_text("paused", exact=True).wait_for()
    alice.stands_while(bob)
    click(hers, "Resume")
    hers.get_by_text("paused", exact=True).wait_for(state="detached")
    alice.goes_on()

    his = row(page, "Requests", "bob")
    click(his, "Pause")
    his.get_by_text("paused", exact=True).wait_for()
    bob.stands_while(alice)
    picture(page, "admin-paused")
    click(his, "Resume")
    bob.goes_on()
    click(his, "Cancel")
    assert bob.has_ended() == "cancelled"
    his.wait_for(state="detached")

    click(hers, "Cancel all")
    sure = hers.get_by_role("button", name="Really end them?")
    sure.wait_for()
    alice.goes_on()  # one click ends nobody's work
    sure.click()
    assert alice.has_ended() == "cancelled"
    page.get_by_text("No request is being answered.").wait_for()
    assert post(server, team.as_("alice")) == 200


def test_draining_and_freezing_the_server(
    server: Any, team: Team, new_page: NewPage, streams: list[Stream]
) -> None:
    page = signed_in(new_page, server, team.keys["boss"], "/admin")
    alice = Stream(server, team.as_("alice"))
    streams.append(alice)
    click(page, "Drain")
    assert post(server, team.as_("bob")) == 200  # the first click only asks
    click(page, "Really take nothing new?")
    page.get_by_text("draining: takes nothing new").wait_for()
    assert httpx2.get(server.url + "/health").status_code == 503
    assert post(server, team.as_("bob")) == 503
    alice.goes_on()
    assert axe_findings(page) == []
    click(page, "Take requests again")
    page.get_by_text("draining: takes nothing new").wait_for(state="detached")
    assert post(server, team.as_("bob")) == 200

    def is_frozen() -> bool:
        told = httpx2.get(server.url + "/admin/control", headers=team.as_("boss"), timeout=20)
        return bool(told.json()["frozen"])

    click(page, "Freeze control")
    page.get_by_text("It watches, and does nothing by itself.").wait_for()
    assert is_frozen()
    click(page, "Unfreeze control")
    page.get_by_text("It watches, and does nothing by itself.").wait_for(state="detached")
    assert not is_frozen()
    if isinstance(server, Server):
        record = row(page, "Alarms and actions", "freeze")
        record.first.get_by_text("boss", exact=True).wait_for()


def test_an_order_that_fails_is_said_where_it_was_given(
    serve: Serve, team: Team, new_page: NewPage, streams: list[Stream]
) -> None:
    server = serve(ENDLESS, keys_file=team.path)
    page = signed_in(new_page, server, team.keys["boss"], "/admin")
    streams.append(Stream(server, team.as_("alice")))
    his = row(page, "Requests", "alice")
    reason = '{"error": {"message": "no request of this id is being answered"}}'
    page.route(
        "**/admin/requests/**",
        lambda route: route.fulfill(status=404, body=reason, content_type="application/json"),
    )
    click(his, "Cancel")
    his.get_by_role("alert").get_by_text("no request of this id").wait_for()


def test_links_are_made_and_people_refused(serve: Serve, team: Team, new_page: NewPage) -> None:
    server = serve({"text": "a"}, keys_file=team.path)
    page = signed_in(new_page, server, team.keys["boss"], "/admin")
    page.get_by_label("Invite").fill("dora")
    click(page, "Make a link")
    page.get_by_text("Lets dora in, once.").wait_for()
    row(page, "People", "dora").wait_for()
    address = page.locator(".link code").inner_text()
    click(page, "Done")
    page.locator(".link").wait_for(state="detached")
    dora = new_page(server, path="/sign-in")
    dora.goto(address)
    dora.wait_for_url(server.url + "/")
    waits = Links(team.path).open(Links(team.path).make(), "mallory", "192.0.2.9")
    assert isinstance(waits, Waits)
    asking = page.get_by_role("alert").filter(has_text="mallory")
    assert waits.code in asking.inner_text()
    click(asking, "Refuse")
    asking.wait_for(state="detached")
    asked = httpx2.post(server.url + "/sign-in", json={"asking": waits.secret})
    assert asked.status_code in (401, 403, 404)
    assert not re.search("mallory", page.get_by_role("region", name="People").first.inner_text())

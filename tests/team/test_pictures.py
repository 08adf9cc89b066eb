"""The pictures of docs/team.md, from the real server with the demo model and people at work.

`MLX_CB_PICTURES=docs/pictures pytest -m slow tests/team/test_pictures.py` makes them anew.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from mlx_cb.server.links import Links
from tests.e2e.server import Server
from tests.team.conftest import Team
from tests.web.browser import ARTIFACTS, FLAGS, TIMEOUT_MS, chromium

FOLDER = Path(os.environ.get("MLX_CB_PICTURES", ARTIFACTS / "docs"))
LARGEST = 200_000
QUESTIONS = [
    "Tell a long story about a lighthouse.", "What is a glacier? Explain at length.",
    "List many uses of a brick.", "Write a letter to an old friend about the sea.",
]  # fmt: skip


@pytest.fixture
def demo(team: Team, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    for name in ("carol", "dora"):
        team.add(name, weight=2.0 if name == "dora" else 1.0)
    monkeypatch.setenv("MLX_CB_CONFIG", str(tmp_path / "config.toml"))
    server = Server("demo", "--keys", str(team.path))
    yield server
    server.stop()


class Crowd:
    """People who ask one thing after another until it is enough."""

    def __init__(self, server: Server, team: Team) -> None:
        self._url = server.url + "/v1/chat/completions"
        self._ended = threading.Event()
        self.threads = [
            threading.Thread(target=self._talk, args=(team.as_(name), k))
            for k in range(2)
            for name in ("alice", "bob", "carol", "dora")
        ]
        for thread in self.threads:
            thread.start()

    def _talk(self, headers: dict[str, str], start: int) -> None:
        number = start
        while not self._ended.is_set():
            content = QUESTIONS[number % len(QUESTIONS)] * (1 + number % 5)
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 60,
                    "stream": True}  # fmt: skip
            with httpx2.stream("POST", self._url, json=body, headers=headers, timeout=60) as answer:
                for _ in answer.iter_lines():
                    if self._ended.is_set():
                        return
            number += 1

    def end(self) -> None:
        self._ended.set()
        for thread in self.threads:
            thread.join()


def keep(page: Any, name: str) -> None:
    """A picture for the document, small enough to be kept with it."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{name}.png"
    page.screenshot(path=str(path))
    assert path.stat().st_size < LARGEST


def sign_in(page: Any, key: str, url: str) -> None:
    page.goto(url)
    page.get_by_label("Your key").fill(key)
    page.get_by_role("button", name="Sign in").click()


@pytest.mark.slow
def test_pictures_of_the_document(demo: Server, team: Team) -> None:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=FLAGS)

        def new_page(width: int, height: int) -> Any:
            context = browser.new_context(
                viewport={"width": width, "height": height}, locale="en-US", color_scheme="light",
                reduced_motion="reduce",
            )  # fmt: skip
            context.set_default_timeout(TIMEOUT_MS)
            return context.new_page()

        admin, person = new_page(1280, 1180), new_page(480, 560)
        sign_in(admin, team.keys["boss"], demo.url + "/admin")
        crowd = Crowd(demo, team)
        try:
            person.goto(f"{demo.url}/sign-in#{Links(team.path).make()}")
            person.get_by_label("Your name").fill("emil")
            person.get_by_role("button", name="Ask to be let in").click()
            person.locator("#waiting").wait_for()
            keep(person, "waiting")
            asking = admin.get_by_role("alert").filter(has_text="emil")
            asking.get_by_role("button", name="Let in").click()
            person.wait_for_url(demo.url + "/")
            person.goto(demo.url + "/sign-in")
            person.get_by_text("You are emil").wait_for()
            person.set_viewport_size({"width": 480, "height": 620})
            keep(person, "account")
            _wait_for_steps(demo, team, 240)
            admin.get_by_role("row").filter(has_text="alice").first.wait_for()
            keep(admin, "admin")
        finally:
            crowd.end()
        _chat(person, demo.url)
        browser.close()


def _chat(page: Any, url: str) -> None:
    """A conversation while its answer is being written, and how one begins on a phone."""
    page.set_viewport_size({"width": 1180, "height": 760})
    page.goto(url + "/")
    for question in ("What is a glacier?", "And how does it move? Answer in a list."):
        page.get_by_label("Message", exact=True).fill(question)
        page.keyboard.press("Enter")
        answer = page.locator("article.answer").last
        answer.locator("p").first.wait_for()
        if question.startswith("And"):
            page.wait_for_function(
                "() => [...document.querySelectorAll('.answer')].at(-1).innerText.length > 250"
            )
            keep(page, "chat")
            page.get_by_role("button", name="Stop the answer").click()
        page.locator("article.answer:not([data-state=running])").last.wait_for(timeout=120_000)
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(url + "/")
    page.get_by_role("button", name="Find ideas").wait_for()
    keep(page, "chat-phone")


def _wait_for_steps(server: Server, team: Team, number: int) -> None:
    """Until the timeline is full."""
    deadline = time.monotonic() + 240
    while True:
        status = httpx2.get(server.url + "/status", headers=team.as_("boss"), timeout=20).json()
        if status.get("steps", {}).get("count", 0) >= number:
            return
        assert time.monotonic() < deadline
        time.sleep(0.5)

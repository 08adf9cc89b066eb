"""Three colleagues chat with the demo model in three browsers at once, as the document promises.

Slow: the model is real. What each step looks like is kept beside the other pictures (`demo-…`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlx_cb.server.links import Links, address_of
from tests.e2e.server import Server
from tests.team.conftest import Team, team
from tests.web.browser import NARROW, NewPage, axe_findings, browser, chromium, new_page, picture
from tests.web.test_chat_page import last_answer, send

__all__ = ["browser", "new_page", "team"]

chromium()  # without it, the whole module is skipped at once
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning")]
STORY = "Tell a long story about a lighthouse keeper and a whale."
PATIENCE_MS = 180_000


@pytest.fixture
def demo(team: Team, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    """Two answers at once, so that a third person waits."""
    monkeypatch.setenv("MLX_CB_CONFIG", str(tmp_path / "config.toml"))
    team.add("carol")
    server = Server("demo", "--keys", str(team.path), "--max-num-seqs", "2")
    yield server
    server.stop()


@pytest.fixture
def come_in(demo: Server, team: Team, new_page: NewPage) -> Callable[..., Any]:
    """Open an invitation's link in a browser of one's own."""

    def enter(name: str, **options: Any) -> Any:
        page = new_page(demo, path="/sign-in", **options)
        page.context.set_default_timeout(PATIENCE_MS)
        page.goto(address_of(demo.url, Links(team.path).make(name)))
        page.wait_for_url(demo.url + "/")
        return page

    return enter


def grows(page: Any, by: int = 40) -> None:
    before = len(last_answer(page).inner_text())
    page.wait_for_function(
        "n => [...document.querySelectorAll('.answer')].at(-1)?.innerText.length > n",
        arg=before + by,
    )


def ended(page: Any, state: str = "done") -> Any:
    page.locator(f"article.answer[data-state={state}]").last.wait_for()
    page.get_by_role("button", name="Send").wait_for()
    return last_answer(page)


def settings(page: Any, **fields: str) -> None:
    page.get_by_role("button", name="Settings of this conversation").click()
    for label, value in fields.items():
        page.get_by_label(label.replace("_", " "), exact=True).fill(value)
    page.get_by_role("button", name="Save").click()
    page.get_by_role("dialog").wait_for(state="detached")


def test_three_people_and_the_demo_model(
    demo: Server, come_in: Callable[..., Any], tmp_path: Path
) -> None:
    alice, bob = come_in("alice"), come_in("bob", color_scheme="dark")
    carol = come_in("carol", viewport=NARROW)
    picture(alice, "demo-welcome")
    picture(carol, "demo-welcome-phone")
    settings(carol, Temperature="0", Maximum_tokens="40")
    send(carol, "Say hello.")  # how long an answer takes is known once one has ended
    ended(carol)
    for page in (alice, bob):
        send(page, STORY)
        last_answer(page).locator("p").first.wait_for()
    for page in (alice, bob):
        grows(page)
        assert last_answer(page).get_attribute("aria-busy") == "true"
    send(carol, "What is the capital of France?")
    waits = carol.get_by_text(re.compile(r"Waiting for its turn … 2 people ahead, about \d+ s"))
    waits.wait_for()
    picture(carol, "demo-waiting-phone")
    picture(bob, "demo-streaming-dark")

    # A reload in the middle of an answer, a stop, an edit; Bob's goes on meanwhile.
    bob.reload()
    grows(bob)
    alice.get_by_role("button", name="Stop the answer").click()
    ended(alice, "stopped").get_by_text("Stopped.").wait_for()
    assert "Paris" in ended(carol).inner_text()
    assert re.search(r"\d tokens/s · first token after \d", ended(carol).inner_text())
    picture(carol, "demo-answer-phone")
    assert axe_findings(carol) == []
    settings(alice, System_prompt="Answer in one short sentence.", Maximum_tokens="24",
             Temperature="0")  # fmt: skip
    alice.get_by_label("Message", exact=True).focus()
    alice.keyboard.press("ArrowUp")
    alice.get_by_label("Your message").fill("Why is the sky blue?")
    alice.keyboard.press("Enter")
    alice.locator("article.question").get_by_text("2 of 2").wait_for()
    ended(alice)
    alice.get_by_role("button", name="Answer anew").click()
    last_answer(alice).get_by_text("2 of 2").wait_for()
    ended(alice)
    picture(alice, "demo-branches")
    alice.get_by_role("button", name="Previous version").first.click()
    alice.get_by_text("Stopped.").wait_for()
    bob.get_by_role("button", name="Stop the answer").click()
    ended(bob, "stopped")
    _files_and_search(alice, tmp_path)


def _files_and_search(page: Any, folder: Path) -> None:
    """Out as both kinds of file, in again, found by a word, in Japanese."""
    for form, suffix in (("Markdown", "md"), ("JSON", "json")):
        page.get_by_role("button", name="Export").click()
        with page.expect_download() as download:
            page.get_by_role("menuitem", name=f"As {form}").click()
        path = folder / f"lighthouse.{suffix}"
        download.value.save_as(path)
        assert "lighthouse" in path.read_text()
        page.get_by_role("button", name=re.compile("^Account and display")).click()
        with page.expect_file_chooser() as chooser:
            page.get_by_role("button", name="Import").click()
        chooser.value.set_files(path)
        page.get_by_text("1 imported").wait_for()
    page.get_by_label("Search conversations").fill("LIGHTHOUSE keeper")
    page.get_by_role("navigation").get_by_role("link").nth(2).wait_for()
    page.get_by_label("Search conversations").fill("")
    page.get_by_role("button", name=re.compile("^Account and display")).click()
    page.get_by_label("Language").select_option("ja")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="もう一度回答").last.wait_for()
    picture(page, "demo-japanese")

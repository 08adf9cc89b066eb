"""The chat in Chromium, as people use it: asking, stopping, editing, reloading, looking."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.team.conftest import Team
from tests.web.browser import (
    NARROW,
    NewPage,
    axe_findings,
    browser,
    chromium,
    new_page,
    picture,
    watch,
)
from tests.web.conftest import Serve, at_end
from tests.web.hostile import HOSTILE

__all__ = ["browser", "new_page"]

chromium()  # without it, the whole module is skipped at once
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")

MANY = [f"word{k} " for k in range(100)]
SLOW = {"match": at_end("slow"), "tokens": MANY, "delay_s": 0.01}
ENDLESS = {**SLOW, "match": at_end("endless"), "repeat": True}
RICH = """Here is **how**, with a formula $e^{i\\pi} = -1$ in the line and one by itself:

$$\\int_0^1 x^2\\,dx = \\frac{1}{3}$$

```python
def greet(name: str) -> str:
    # a comment
    return f"Hello, {name}!"
```

| step | what |
|---|---|
| 1 | read the [guide](https://example.com/guide) |
| 2 | try `greet("you")` |

1. first
2. second

> A quotation."""
REPLIES = (
    SLOW,
    ENDLESS,
    {"match": at_end("rich"), "reasoning": "The user wants to see everything.", "text": RICH},
    {"match": "hostile", "text": HOSTILE},
    {"match": at_end("blue"), "text": "It is blue."},
    {"text": "Hello **there**."},
)
SCRIPT = {"model": "demo-model"}


def send(page: Any, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def last_answer(page: Any) -> Any:
    return page.locator("article.answer").last


def answered(page: Any, state: str = "done") -> Any:
    """The last answer, once it has ended."""
    page.locator(f"article.answer[data-state={state}]").last.wait_for()
    page.get_by_role("button", name="Send").wait_for()
    return last_answer(page)


def test_two_people_chat_at_the_same_time(serve: Serve, team: Team, new_page: NewPage) -> None:
    server = serve(*REPLIES, keys_file=team.path, script=SCRIPT)
    alice, bob = new_page(server, team.as_("alice")), new_page(server, team.as_("bob"))
    send(alice, "endless and SECRET")
    send(bob, "slow, too")
    for page in (alice, bob):
        page.get_by_text("word3 ").wait_for()
    assert {played.user for played in server.engine.played.values()} == {"alice", "bob"}
    alice.get_by_role("button", name="Stop the answer").click()
    answered(alice, "stopped").get_by_text("Stopped.").wait_for()
    send(bob, "ignored while an answer comes")
    answered(bob)
    assert "word99" in last_answer(bob).inner_text()
    assert "tokens/s" in last_answer(bob).inner_text()
    assert "first token after" in last_answer(bob).inner_text()
    bob.reload()
    bob.get_by_role("navigation").get_by_role("link").first.wait_for()
    assert "SECRET" not in bob.content()
    # Alice's address shows Bob nothing.
    bob.goto(alice.url)
    bob.get_by_text("This conversation is not here").wait_for()
    assert "SECRET" not in bob.content()


def test_a_reload_in_mid_answer_shows_it_still_arriving(serve: Serve, new_page: NewPage) -> None:
    server = serve(*REPLIES)
    page = new_page(server)
    send(page, "endless")
    page.get_by_text("word5 ").wait_for()
    page.reload()
    page.get_by_text("word5 ").wait_for()
    answer = last_answer(page)
    assert answer.get_attribute("aria-busy") == "true"
    before = len(answer.inner_text())
    page.wait_for_function(
        "before => document.querySelector('.answer').innerText.length > before + 50", arg=before
    )
    page.get_by_role("button", name="Stop the answer").click()
    words = answered(page, "stopped").locator(".text").inner_text().split()
    assert words == [f"word{k % len(MANY)}" for k in range(len(words))]  # none lost, none twice
    assert len(server.engine.played) == 1


@pytest.mark.slow
def test_two_tabs_stay_in_step(serve: Serve, new_page: NewPage) -> None:
    server = serve(*REPLIES)
    one = new_page(server)
    send(one, "slow")
    one.get_by_text("word2 ").wait_for()
    two = one.context.new_page()
    wrong: list[str] = []
    watch(two, wrong)
    two.goto(one.url)
    for page in (one, two):
        assert answered(page).locator(".text").inner_text().split()[-1] == "word99"
    send(two, "blue?")
    one.get_by_text("It is blue.").wait_for()
    two.get_by_role("button", name=re.compile("^Title")).click()
    two.get_by_label("Title").fill("A better title")
    two.keyboard.press("Enter")
    one.get_by_role("button", name="Title: A better title").wait_for()
    one.get_by_role("button", name="Delete").click()
    one.get_by_role("dialog").get_by_role("button", name="Delete").click()
    for page in (one, two):
        page.get_by_text("What can I do for you?").wait_for()
        page.get_by_text("Your conversations will be listed here.").wait_for()
    assert not wrong


def test_edit_branch_and_answer_anew(serve: Serve, new_page: NewPage) -> None:
    page = new_page(serve(*REPLIES))
    send(page, "hello")
    answered(page)
    page.keyboard.press("ArrowUp")  # edits the last question
    field = page.get_by_label("Your message")
    assert field.input_value() == "hello"
    field.fill("blue?")
    page.keyboard.press("Enter")
    page.get_by_text("It is blue.").wait_for()
    question = page.locator("article.question")
    question.get_by_text("2 of 2").wait_for()
    question.get_by_role("button", name="Previous version").click()
    answered(page).get_by_text("Hello there.").wait_for()
    assert question.locator(".bubble").inner_text() == "hello"
    last_answer(page).get_by_role("button", name="Answer anew").click()
    last_answer(page).get_by_text("2 of 2").wait_for()
    page.reload()
    last_answer(page).get_by_text("2 of 2").wait_for()
    assert page.locator("article").count() == 2


@pytest.mark.slow
def test_rich_text_is_drawn(serve: Serve, new_page: NewPage) -> None:
    page = new_page(
        serve(*REPLIES, script=SCRIPT), permissions=["clipboard-read", "clipboard-write"]
    )
    send(page, "rich")
    answer = answered(page)
    answer.locator("math").nth(1).wait_for()
    assert answer.locator("math[display=block] mfrac").count() == 1
    assert answer.locator(".hljs-keyword").first.inner_text() == "def"
    assert answer.locator("td").count() == 4
    assert answer.locator("annotation, .katex-html").count() == 0
    reasoning = answer.locator("details")
    assert not reasoning.locator("div").is_visible()
    reasoning.get_by_text("Reasoning").click()
    reasoning.get_by_text("The user wants to see everything.").wait_for()
    link = answer.get_by_role("link")
    assert link.get_attribute("rel") == "noopener noreferrer nofollow"
    answer.locator(".code-head button").click()
    answer.get_by_role("button", name="Copied").wait_for()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.startswith("def greet(name: str) -> str:\n    # a comment")
    answer.get_by_role("button", name="Copy").last.click()
    assert page.evaluate("navigator.clipboard.readText()").strip() == RICH


def test_hostile_output_runs_nothing(serve: Serve, new_page: NewPage) -> None:
    server = serve(*REPLIES)
    page = new_page(server)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    send(page, "hostile " + HOSTILE)
    answered(page)
    page.reload()  # what is stored is drawn again
    answer = answered(page)
    page.get_by_role("button", name="Export").click()
    page.keyboard.press("Escape")
    forbidden = "script iframe object embed svg img video audio form input style link base meta"
    assert page.locator(", ".join(f".text {name}" for name in forbidden.split())).count() == 0
    attributes = page.evaluate(
        "[...document.querySelectorAll('.text *')].flatMap(e => e.getAttributeNames())"
    )
    allowed = {"class", "href", "target", "rel", "title", "tabindex", "type", "start", "display",
               "xmlns", "mathvariant", "stretchy", "fence", "form", "accent", "lspace", "rspace",
               "separator", "movablelimits", "mathcolor"}  # fmt: skip
    assert set(attributes) <= allowed
    links = [link.get_attribute("href") for link in answer.locator("a").all()]
    assert links
    assert all(re.match(r"(https?://|mailto:)", link) for link in links)
    assert [url for url in asked if not url.startswith((server.url, "blob:"))] == []
    assert page.evaluate("[window.ran, document.title.includes('ran')]") == [None, False]


def test_nothing_serious_for_screen_readers(serve: Serve, new_page: NewPage) -> None:
    server = serve(*REPLIES, script=SCRIPT)
    page = new_page(server, color_scheme="light")
    found = {"new": axe_findings(page)}
    send(page, "rich")
    answered(page).locator(".hljs-keyword").first.wait_for()
    found["conversation"] = axe_findings(page)
    page.emulate_media(color_scheme="dark")
    found["dark"] = axe_findings(page)
    page.get_by_role("button", name="Settings of this conversation").click()
    found["settings"] = axe_findings(page)
    page.keyboard.press("Escape")
    page.get_by_role("button", name=re.compile("^Account and display")).click()
    found["account"] = axe_findings(page)
    page.get_by_label("Colours").select_option("light")
    found["light"] = axe_findings(page)
    page.keyboard.press("Escape")
    page.set_viewport_size(NARROW)
    found["narrow"] = axe_findings(page)
    page.get_by_role("button", name="Show the list of conversations").click()
    found["list"] = axe_findings(page)
    assert {state: findings for state, findings in found.items() if findings} == {}


@pytest.mark.slow
def test_settings_reach_the_model(serve: Serve, new_page: NewPage) -> None:
    server = serve(*REPLIES, aliases=(("second-name", "scripted"),))
    page = new_page(server)
    page.get_by_role("button", name="Settings of this conversation").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.3")
    page.get_by_label("Maximum tokens").fill("1")
    page.get_by_role("button", name="Save").click()
    page.get_by_label("Model", exact=True).select_option("second-name")
    send(page, "hello")
    answered(page).get_by_text("Ended at the limit of tokens.").wait_for()
    (played,) = server.engine.played.values()
    assert (played.params.temperature, played.params.max_tokens) == (0.3, 1)
    page.reload()
    page.get_by_role("button", name="Settings of this conversation").click()
    assert page.get_by_label("System prompt").input_value() == "Be brief."
    page.get_by_label("Temperature").fill("")
    page.get_by_role("button", name="Save").click()
    page.get_by_role("dialog").wait_for(state="detached")
    assert page.get_by_label("Model", exact=True).input_value() == "second-name"


def test_files_go_out_and_come_back(serve: Serve, new_page: NewPage, tmp_path: Path) -> None:
    page = new_page(serve(*REPLIES))
    send(page, "blue?")
    answered(page)
    for form in ("Markdown", "JSON"):
        page.get_by_role("button", name="Export").click()
        with page.expect_download() as download:
            page.get_by_role("menuitem", name=f"As {form}").click()
        path = tmp_path / download.value.suggested_filename
        download.value.save_as(path)
        assert path.name == ("blue.md" if form == "Markdown" else "blue.json")
        assert "It is blue." in path.read_text()
        page.get_by_role("button", name=re.compile("^Account and display")).click()
        with page.expect_file_chooser() as chooser:
            page.get_by_role("button", name="Import").click()
        chooser.value.set_files(path)
        page.get_by_text("1 imported").wait_for()
        page.get_by_text("It is blue.").wait_for()
    page.get_by_role("navigation").get_by_role("link").nth(2).wait_for()


@pytest.mark.slow
def test_a_conversation_of_this_browser_only(
    serve: Serve, new_page: NewPage, tmp_path: Path
) -> None:
    server = serve(*REPLIES)
    page = new_page(server)
    page.get_by_label("Keep it").select_option("browser")
    page.get_by_text("Nothing of it is kept on the server.").wait_for()
    send(page, "endless SECRET")
    page.get_by_text("word5 ").wait_for()
    two = page.context.new_page()
    two.goto(page.url)
    two.get_by_text("word9 ").wait_for()
    two.get_by_role("button", name="Stop the answer").click()
    for tab in (page, two):
        answered(tab, "stopped")
    send(page, "blue?")
    two.get_by_text("It is blue.").wait_for()
    page.reload()
    page.get_by_text("It is blue.").wait_for()
    assert server.get("/web/conversations").json() == {"conversations": [], "running": []}
    page.get_by_label("Search conversations").fill("IS BLUE")
    page.get_by_role("navigation").get_by_text("It is blue.").wait_for()
    page.get_by_role("button", name="Export").click()
    with page.expect_download() as download:
        page.get_by_role("menuitem", name="As JSON").click()
    download.value.save_as(tmp_path / "a.json")
    (kept,) = json.loads((tmp_path / "a.json").read_text())["conversations"]
    assert len(kept["messages"]) == 4
    assert "owner" not in kept
    answer = server.post("/web/import", {"json": (tmp_path / "a.json").read_text()})
    assert answer.status_code == 200  # the same form as the account's


@pytest.mark.slow
def test_what_a_waiting_answer_waits_for_is_said(
    serve: Serve, team: Team, new_page: NewPage
) -> None:
    server = serve(*REPLIES, keys_file=team.path, script={"max_num_seqs": 1})
    alice, bob = new_page(server, team.as_("alice")), new_page(server, team.as_("bob"))
    send(alice, "endless")
    alice.get_by_text("word1 ").wait_for()
    send(bob, "hello")
    bob.get_by_text("Waiting for its turn … 1 person ahead").wait_for()
    picture(bob, "waiting")
    alice.get_by_role("button", name="Stop the answer").click()
    answered(bob).get_by_text("Hello there.").wait_for()


@pytest.mark.slow
def test_by_the_keyboard_alone(serve: Serve, new_page: NewPage) -> None:
    page = new_page(serve(*REPLIES))
    page.get_by_label("Message", exact=True).wait_for()
    page.keyboard.type("endless")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("and more")
    assert page.get_by_label("Message", exact=True).input_value() == "endless\nand more"
    page.keyboard.press("Enter")
    page.get_by_text("word2 ").wait_for()
    page.keyboard.press("Escape")
    answered(page, "stopped")
    page.keyboard.press("Control+k")
    page.keyboard.type("nothing like it")
    page.get_by_text("Nothing found.").wait_for()
    page.keyboard.press("Control+Shift+O")
    page.get_by_text("What can I do for you?").wait_for()
    page.keyboard.type("blue?")
    page.keyboard.press("Enter")
    page.get_by_text("It is blue.").wait_for()


@pytest.mark.slow
def test_a_word_being_chosen_is_not_sent(serve: Serve, new_page: NewPage) -> None:
    """Enter ends the choice of a Japanese word; only the next one sends."""
    server = serve(*REPLIES)
    page = new_page(server, locale="ja-JP")
    field = page.get_by_label("メッセージ", exact=True)
    field.fill("青い blue")
    field.evaluate(
        "f => f.dispatchEvent(new KeyboardEvent('keydown',"
        " {key: 'Enter', isComposing: true, bubbles: true, cancelable: true}))"
    )
    assert field.input_value() == "青い blue"
    page.keyboard.press("Enter")
    page.get_by_text("It is blue.").wait_for()
    assert page.evaluate("document.documentElement.lang") == "ja"
    assert page.get_by_role("button", name="もう一度回答").count() == 1


def look(page: Any, name: str) -> None:
    """A page's pictures: nothing of it may stick out at the side."""
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
    picture(page, name)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_wide_and_narrow_light_and_dark(serve: Serve, new_page: NewPage, scheme: str) -> None:
    page = new_page(serve(*REPLIES, script=SCRIPT), color_scheme=scheme)
    page.get_by_text("What can I do for you?").wait_for()
    look(page, f"new-{scheme}")
    for text in ("blue?", "rich"):
        send(page, text)
        answered(page)
    last_answer(page).locator(".hljs-keyword").first.wait_for()
    last_answer(page).locator("math").nth(1).wait_for()
    look(page, f"wide-{scheme}")
    page.get_by_role("button", name="Settings of this conversation").click()
    look(page, f"settings-{scheme}")
    page.keyboard.press("Escape")
    page.get_by_role("button", name=re.compile("^Account and display")).click()
    look(page, f"account-{scheme}")
    page.keyboard.press("Escape")
    page.set_viewport_size(NARROW)
    look(page, f"narrow-{scheme}")
    page.get_by_role("button", name="Show the list of conversations").click()
    page.get_by_role("navigation").get_by_role("link").first.click(trial=True)
    look(page, f"list-{scheme}")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Settings of this conversation").click()
    look(page, f"narrow-settings-{scheme}")


@pytest.mark.slow
def test_a_server_that_comes_back_is_found_again(
    serve: Serve, new_page: NewPage, file: Path
) -> None:
    first = serve(*REPLIES, conversations_file=file)
    port = int(first.url.rsplit(":", 1)[1])
    page = new_page(first)
    send(page, "endless")
    page.get_by_text("word5 ").wait_for()
    first.begin_stop().result(20)
    assert first.has_stopped()
    page.get_by_text("The connection to the server is lost").wait_for()
    again = serve(*REPLIES, conversations_file=file, listen_port=port)
    page.get_by_text("Interrupted").wait_for()
    page.get_by_text("The connection to the server is lost").wait_for(state="detached")
    send(page, "blue?")
    page.get_by_text("It is blue.").wait_for()
    assert len(again.engine.played) == 1

"""Debian's Chromium, driven by Playwright: started once for a module of tests.

Its event loop occupies the thread while it runs, so it must not outlive the module: other tests
start loops of their own.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.npm import npm_package

ARTIFACTS = Path(__file__).parents[2] / "artifacts" / "web"
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
]  # fmt: skip
TIMEOUT_MS = 30_000
NARROW = {"width": 390, "height": 844}
WIDE = {"width": 1280, "height": 860}

NewPage = Callable[..., Any]


def chromium() -> str:
    """Where Chromium is; skips, loudly, on a machine without it."""
    found = os.environ.get("MLX_CB_CHROMIUM") or shutil.which("chromium")
    if found is None:
        reason = "NO BROWSER: install Debian's chromium (apt-get install chromium)"
        pytest.skip(reason, allow_module_level=True)
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = chromium()
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield started
        started.close()


@pytest.fixture
def new_page(browser: Any) -> Iterator[NewPage]:
    """`new_page(server, headers, **context options)`: a page in a context of its own, at `/`.

    What goes wrong in a page (an exception, a policy that was broken) fails the test.
    """
    contexts: list[Any] = []
    wrong: list[str] = []

    def start(
        server: Any, headers: dict[str, str] | None = None, path: str = "/", **options: Any
    ) -> Any:
        options = {"viewport": WIDE, "locale": "en-US", "reduced_motion": "reduce", **options}
        context = browser.new_context(extra_http_headers=headers or {}, **options)
        context.set_default_timeout(TIMEOUT_MS)
        contexts.append(context)
        page = context.new_page()
        watch(page, wrong)
        page.goto(server.url + path)
        return page

    yield start
    for context in contexts:
        context.close()
    assert not wrong


def watch(page: Any, wrong: list[str]) -> None:
    """Collect what goes wrong in a page, and any dialog, which none of ours is."""

    def on_console(message: Any) -> None:
        # A refusal, or a server that is away, is what some tests are about.
        if message.type == "error" and not message.text.startswith("Failed to load resource"):
            wrong.append(message.text)

    def on_dialog(dialog: Any) -> None:
        wrong.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    page.on("console", on_console)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", on_dialog)


def picture(page: Any, name: str) -> None:
    """Keep what the page looks like, for people to look at."""
    ARTIFACTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=str(ARTIFACTS / f"{name}.png"))


def axe_findings(page: Any) -> list[str]:
    """What axe-core finds wrong with the page, if serious."""
    page.evaluate((npm_package("axe-core", "4.14.1") / "axe.min.js").read_text())
    found = page.evaluate(
        "axe.run(document, {resultTypes: ['violations']}).then(result => result.violations)"
    )
    return [
        f"{one['id']}: {node['html'][:160]} {node.get('failureSummary', '')[:300]}"
        for one in found
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"]
    ]

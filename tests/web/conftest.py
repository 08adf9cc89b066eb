"""A server whose chat is looked at through its routes, and one person's part of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.server.conftest import LiveServer, serve, stopping
from tests.team.conftest import Team, team

__all__ = ["serve", "stopping", "team"]

Serve = Callable[..., LiveServer]
JSON = dict[str, Any]


def at_end(word: str) -> str:
    """A script's `match` for prompts whose last message ends with this word and little more."""
    return rf"{word}[^<]*<.im_end.>\s*<.im_start.>assistant\s*\Z"


class Person:
    """Someone's browser, without the browser."""

    def __init__(self, server: LiveServer, headers: dict[str, str] | None = None) -> None:
        self.server = server
        self.headers = headers or {}

    def call(self, method: str, path: str, body: Any = None, status: int | None = 200) -> Any:
        """One request; its JSON. `status` None takes any."""
        options: JSON = {"headers": self.headers}
        if body is not None:
            options["json"] = body
        answer = self.server.request(method, "/web" + path, **options)
        assert status is None or answer.status_code == status, answer.text
        return answer.json()

    def begin(self, **settings: Any) -> str:
        made = self.call("POST", "/conversations", {"settings": settings}, 201)
        return str(made["id"])

    def ask(self, conversation: str, content: str, parent: str | None = None) -> JSON:
        body = {"content": content, "parent": parent}
        found: JSON = self.call("POST", f"/conversations/{conversation}/messages", body)
        return found

    def load(self, conversation: str) -> JSON:
        found: JSON = self.call("GET", f"/conversations/{conversation}")
        return found

    def answer_to(self, asked: JSON, conversation: str, timeout: float = 20) -> JSON:
        """The answer, once it has ended."""
        return self.wait_for(
            conversation, asked["answer"]["id"], lambda m: m.get("state") != "running", timeout
        )

    def wait_for(
        self, conversation: str, message: str, holds: Callable[[JSON], bool], timeout: float = 20
    ) -> JSON:
        """A message, once something holds of it."""
        deadline = time.monotonic() + timeout
        while True:
            messages = self.load(conversation)["messages"]
            found: JSON = next(one for one in messages if one["id"] == message)
            if holds(found):
                return found
            assert time.monotonic() < deadline, found
            time.sleep(0.01)

    @contextmanager
    def events(self) -> Iterator[Iterator[JSON]]:
        """What an open page hears."""
        with self.server.stream("GET", "/web/events", headers=self.headers) as answer:
            assert answer.status_code == 200
            lines = answer.iter_lines()
            yield (
                msgspec.json.decode(line.removeprefix("data: "))
                for line in lines
                if line.startswith("data: ")
            )


@pytest.fixture
def people(serve: Serve, team: Team) -> Callable[..., tuple[Person, Person]]:
    """Alice and Bob on one server."""

    def start(*replies: JSON, **settings: Any) -> tuple[Person, Person]:
        server = serve(*replies, keys_file=team.path, **settings)
        return Person(server, team.as_("alice")), Person(server, team.as_("bob"))

    return start


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "conversations.sqlite"

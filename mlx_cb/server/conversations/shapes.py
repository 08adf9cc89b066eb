"""What a conversation is: messages in a tree, because an edit begins another branch.

The same shapes are stored, sent to pages and exported. Knows nothing about files or HTTP.
"""

from __future__ import annotations

import time
import unicodedata
import uuid
from typing import Any, Literal

import msgspec

from mlx_cb.errors import InvalidRequest, MlxCbError
from mlx_cb.sampling_params import SamplingParams

LONGEST_TITLE = 120
Role = Literal["user", "assistant"]
State = Literal["done", "running", "stopped", "interrupted", "failed"]
_SAMPLED = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty",
)  # fmt: skip


class NotHere(MlxCbError):
    """No such conversation or message in this account; another's look the same."""

    status = 404
    code = "not_found"


class Settings(msgspec.Struct, omit_defaults=True):
    """How a conversation is answered; None leaves a number to the model's makers.

    `thinking` asks a model that can do both for reasoning or for none.
    """

    system: str = ""
    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    thinking: bool | None = None

    def params(self) -> SamplingParams:
        """For the engine. Raises InvalidRequest naming the field."""
        named = {name: getattr(self, name) for name in _SAMPLED}
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
        return SamplingParams.asked(named, seed=self.seed, max_tokens=self.max_tokens)


class Figures(msgspec.Struct, omit_defaults=True):
    """What an answer took. Times in seconds; `seconds` runs from the first token to the last."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    first_token_s: float | None = None
    seconds: float | None = None
    finish: str | None = None


class Message(msgspec.Struct, omit_defaults=True):
    """One message; `parent` is the message it follows, None at the beginning.

    `request_id` explains an answer at `/status/requests/{id}`; `error` says why it failed. `seq`
    counts the pieces of an answer that is still being made.
    """

    id: str
    role: Role
    content: str
    created: float
    parent: str | None = None
    reasoning: str = ""
    state: State = "done"
    model: str | None = None
    request_id: str | None = None
    error: str | None = None
    figures: Figures | None = None
    seq: int | None = None


class Summary(msgspec.Struct, omit_defaults=True):
    """A line of the list; `found` is the text around what was searched for."""

    id: str
    title: str
    created: float
    updated: float
    found: str | None = None


class Conversation(msgspec.Struct):
    """A whole conversation; `leaf` is the last message of the branch that is shown."""

    id: str
    title: str
    created: float
    updated: float
    settings: Settings
    messages: list[Message]
    leaf: str | None = None

    def branch(self, end: str | None) -> list[Message]:
        """The messages from the first one to `end`."""
        known = {message.id: message for message in self.messages}
        found: list[Message] = []
        while end is not None and (message := known.pop(end, None)) is not None:
            found.append(message)
            end = message.parent
        return found[::-1]

    def summary(self) -> Summary:
        """Its line in the list."""
        return Summary(self.id, self.title, self.created, self.updated)

    def find(self, message_id: str | None) -> Message:
        """A message by its id. Raises NotHere."""
        for message in self.messages:
            if message.id == message_id:
                return message
        raise NotHere("this conversation has no such message")


def new_id() -> str:
    """Nobody can guess one."""
    return uuid.uuid4().hex


def new_conversation(settings: Settings, title: str = "") -> Conversation:
    """An empty one."""
    now = time.time()
    return Conversation(new_id(), title, now, now, settings, [])


def new_message(role: Role, content: str, parent: str | None, **more: Any) -> Message:
    """A message of this moment."""
    return Message(new_id(), role, content, time.time(), parent, **more)


def title_of(text: str) -> str:
    """A title made of the beginning of what was asked."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= 60 else line[:59].rstrip() + "…"


def folded(text: str) -> str:
    """For comparing: neither case nor full or half width counts."""
    return unicodedata.normalize("NFKC", text).casefold()

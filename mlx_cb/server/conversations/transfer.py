"""Conversations as files: JSON holds everything, Markdown the branch that is shown.

What comes in gets new ids, so that nothing is ever overwritten and no file can name another's
conversation. Knows nothing about HTTP or where conversations are kept.
"""

from __future__ import annotations

import re
import time
from typing import Literal

import msgspec

from mlx_cb.errors import InvalidRequest
from mlx_cb.server.body import decode_json
from mlx_cb.server.conversations.shapes import (
    LONGEST_TITLE,
    Conversation,
    Message,
    Settings,
    new_conversation,
    new_id,
    new_message,
    title_of,
)

FORMAT: Literal["mlx-cb conversations"] = "mlx-cb conversations"
_MARK = re.compile(r"<!-- mlx-cb: (system|user|reasoning|assistant) -->\r?")
_LIKE_A_MARK = re.compile(r"\\*<!-- mlx-cb: ")
_HEADINGS = {
    "system": "## System prompt",
    "user": "## Question",
    "reasoning": "## Reasoning",
    "assistant": "## Answer",
}


class Bundle(msgspec.Struct):
    """A file of conversations."""

    format: Literal["mlx-cb conversations"]
    version: Literal[1]
    conversations: list[Conversation]


def to_json(conversations: list[Conversation]) -> bytes:
    """All branches, settings and figures."""
    content = msgspec.json.encode(Bundle(FORMAT, 1, conversations))
    return msgspec.json.format(content, indent=1)


def from_json(content: bytes) -> list[Conversation]:
    """The conversations of a file. Raises InvalidRequest naming what is wrong."""
    bundle = decode_json(content, Bundle)
    return [_renewed(given, n) for n, given in enumerate(bundle.conversations)]


def _renewed(given: Conversation, number: int) -> Conversation:
    where = f"conversations[{number}]"
    ids: dict[str, str] = {}
    messages = []
    for n, message in enumerate(given.messages):
        if message.id in ids:
            raise InvalidRequest(f"{where}.messages[{n}].id is there twice", param=where)
        if message.parent is not None and message.parent not in ids:
            raise InvalidRequest(
                f"{where}.messages[{n}].parent is no message before it", param=where
            )
        ids[message.id] = new_id()
        messages.append(
            msgspec.structs.replace(
                message,
                id=ids[message.id],
                parent=None if message.parent is None else ids[message.parent],
                state="interrupted" if message.state == "running" else message.state,
                request_id=None,
                seq=None,
            )
        )
    given.settings.params()  # refuses what could not be sampled with
    last = messages[-1].id if messages else None
    leaf = ids.get(given.leaf or "", last)
    return msgspec.structs.replace(
        given, id=new_id(), title=given.title[:LONGEST_TITLE], messages=messages, leaf=leaf
    )


def to_markdown(conversation: Conversation) -> str:
    """The branch that is shown, readable anywhere; marks in comments let it come back exactly."""
    pieces = [f"# {' '.join(conversation.title.split()) or 'Conversation'}\n\n"]
    if conversation.settings.system:
        pieces.append(_section("system", conversation.settings.system))
    for message in conversation.branch(conversation.leaf):
        if message.reasoning:
            pieces.append(_section("reasoning", message.reasoning))
        pieces.append(_section(message.role, message.content))
    return "".join(pieces)


def _section(kind: str, content: str) -> str:
    lines = [("\\" + line if _LIKE_A_MARK.match(line) else line) for line in content.split("\n")]
    return f"<!-- mlx-cb: {kind} -->\n{_HEADINGS[kind]}\n\n" + "\n".join(lines) + "\n\n"


def from_markdown(text: str) -> Conversation:
    """A conversation that was exported as Markdown. Raises InvalidRequest."""
    lines = text.removesuffix("\n").split("\n")
    marks = [n for n, line in enumerate(lines) if _MARK.fullmatch(line)]
    if not marks:
        raise InvalidRequest("this Markdown was not exported here: it has no marks of messages")
    heading = next((line for line in lines[: marks[0]] if line.startswith("# ")), "")
    made = new_conversation(Settings(), heading[2:].strip()[:LONGEST_TITLE])
    reasoning = ""
    for start, end in zip(marks, [*marks[1:], len(lines)], strict=True):
        found = _MARK.fullmatch(lines[start])
        assert found is not None
        content = _content(lines[start + 1 : end])
        kind = found[1]
        if kind == "system":
            made.settings.system = content
        elif kind == "reasoning":
            reasoning = content
        else:
            message = _next_message(made, kind, content)
            message.reasoning, reasoning = (reasoning, "") if kind == "assistant" else ("", "")
    if not made.title and made.messages:
        made.title = title_of(made.messages[0].content)
    return made


def _next_message(made: Conversation, kind: str, content: str) -> Message:
    role: Literal["user", "assistant"] = "user" if kind == "user" else "assistant"
    message = new_message(role, content, made.leaf)
    message.created = time.time()
    made.messages.append(message)
    made.leaf = message.id
    return message


def _content(lines: list[str]) -> str:
    """A section's text: without its heading, the blank line after it and the one at its end."""
    if lines and lines[0].startswith("## "):
        lines = lines[1:]
        if lines and not lines[0].strip():
            lines = lines[1:]
    if lines and not lines[-1].strip():
        lines = lines[:-1]
    return "\n".join(line[1:] if _is_escaped(line) else line for line in lines)


def _is_escaped(line: str) -> bool:
    return line.startswith("\\") and _LIKE_A_MARK.match(line) is not None

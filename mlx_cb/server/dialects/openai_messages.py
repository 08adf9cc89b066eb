"""OpenAI chat messages and tools on the wire, and the form that chat templates take.

Owns what a message may look like and what it means: parts joined, `developer` as system, null
content as empty, tool arguments as objects. Knows nothing about endpoints.
"""

from __future__ import annotations

from typing import Any

import msgspec

from mlx_cb.errors import InvalidRequest
from mlx_cb.server.dialects.replayed_calls import WireToolCall, arguments_object
from mlx_cb.text.chat_template import Message

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})


class Part(msgspec.Struct):
    """One part of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None


class WireMessage(msgspec.Struct):
    """A message as clients send it."""

    role: str
    content: str | list[Part | str] | None = None
    name: str | None = None
    tool_calls: list[WireToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


def template_messages(messages: list[WireMessage]) -> list[Message]:
    """Messages as templates take them. Raises InvalidRequest naming the message at fault."""
    if not messages:
        raise InvalidRequest("messages must hold at least one message", param="messages")
    return [_template_message(message, n) for n, message in enumerate(messages)]


def _template_message(message: WireMessage, number: int) -> Message:
    where = f"messages[{number}]"
    role = _ROLES.get(message.role)
    if role is None:
        raise InvalidRequest(
            f"{where}.role is {message.role!r}; it must be one of {', '.join(_ROLES)}",
            param=f"{where}.role",
        )
    if role == "user" and message.content is None:
        raise InvalidRequest(f"{where}.content is missing", param=f"{where}.content")
    made: Message = {"role": role, "content": _joined(message.content, where)}
    if message.name is not None:
        made["name"] = message.name
    if message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    reasoning = message.reasoning_content or message.reasoning
    if role == "assistant" and reasoning:
        made["reasoning_content"] = reasoning
    if role == "assistant" and message.tool_calls:
        made["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    return made


def _joined(content: str | list[Part | str] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for number, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
        elif part.type in _TEXT_PARTS:
            texts.append(part.text or part.refusal or "")
        else:
            raise InvalidRequest(
                f"{where}.content[{number}] is of type {part.type!r}, but this model takes text "
                f"only",
                param=f"{where}.content[{number}]",
            )
    return "".join(texts)


def _template_call(call: WireToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": arguments_object(call.function.arguments)}
    made = {"type": "function", "function": function}
    return made if call.id is None else {**made, "id": call.id}

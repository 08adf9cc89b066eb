"""Anthropic's messages, blocks and tools on the wire, and the form that chat templates take.

Owns what a block may be and what it means to a text model. Knows nothing about endpoints.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from mlx_cb.errors import InvalidRequest
from mlx_cb.text.chat_template import Message

# Claude Code's first system block changes with every request of some versions; it says nothing
# to a model and would empty the prefix cache.
_BILLING = "x-anthropic-billing-header"


class Block(msgspec.Struct):
    """Any content block; which fields count depends on `type`."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    content: Any = None
    is_error: bool | None = None
    title: str | None = None
    source: Any = None
    tool_name: str | None = None


class WireMessage(msgspec.Struct):
    """A message as clients send it."""

    role: str
    content: str | list[Block]


class WireTool(msgspec.Struct):
    """A tool; those of the server's own (web search and so on) have no schema."""

    name: str = ""
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    defer_loading: bool | None = None


def template_tools(tools: list[WireTool]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """OpenAI function tools: all of them, and those that stand in the head of the prompt.

    A tool whose loading is deferred is shown where a `tool_reference` names it, so that the head
    stays the same when it is loaded. Server tools are left out: nobody here could run them.
    """
    known = [(tool, _function_tool(tool)) for tool in tools if tool.input_schema is not None]
    head = [made for tool, made in known if not tool.defer_loading]
    return [made for _, made in known], head


def _function_tool(tool: WireTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema
    return {"type": "function", "function": function}


def template_messages(
    system: str | list[Block] | None,
    messages: list[WireMessage],
    tools: list[dict[str, Any]],
) -> list[Message]:
    """Messages as templates take them. Raises InvalidRequest naming the block at fault."""
    made: list[Message] = []
    head = _texts(system or "", "system", "\n\n")
    if head:
        made.append({"role": "system", "content": head})
    named = {tool["function"]["name"]: tool for tool in tools}
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if message.role == "assistant":
            made.append(_assistant(message.content, where))
        elif message.role == "user":
            made += _user(message.content, where, named)
        elif message.role == "system":
            made.append({"role": "system", "content": _texts(message.content, where, "\n\n")})
        else:
            raise InvalidRequest(
                f"{where}.role is {message.role!r}; it must be user, assistant or system",
                param=f"{where}.role",
            )
    if not messages:
        raise InvalidRequest("messages must hold at least one message", param="messages")
    return made


def _texts(content: str | list[Block], where: str, joiner: str) -> str:
    if isinstance(content, str):
        return "" if content.startswith(_BILLING) else content
    texts = [_text(block, f"{where}[{n}]") for n, block in enumerate(content)]
    return joiner.join(text for text in texts if text and not text.startswith(_BILLING))


def _text(block: Block, where: str) -> str:
    """What a text model can read of a block."""
    match block.type:
        case "text":
            return block.text or ""
        case "document":
            source = block.source if isinstance(block.source, dict) else {}
            if source.get("type") in ("text", "content") and source.get("data"):
                return f"{block.title}\n{source['data']}" if block.title else str(source["data"])
        case "search_result":
            parts = block.content if isinstance(block.content, list) else []
            return "\n".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
    raise InvalidRequest(
        f"{where} is of type {block.type!r}, but this model takes text only", param=where
    )


def _assistant(content: str | list[Block], where: str) -> Message:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts, reasoning, calls = [], [], []
    for number, block in enumerate(content):
        if block.type == "thinking":
            reasoning.append(block.thinking or "")
        elif block.type == "tool_use":
            arguments = block.input if isinstance(block.input, dict) else {}
            function = {"name": block.name or "", "arguments": arguments}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif block.type == "text":
            texts.append(_text(block, f"{where}.content[{number}]"))
        # Anything else (redacted thinking, server tools) says nothing to this model.
    made: Message = {"role": "assistant", "content": "".join(texts)}
    if any(reasoning):
        made["reasoning_content"] = "\n".join(reasoning)
    if calls:
        made["tool_calls"] = calls
    return made


def _user(content: str | list[Block], where: str, tools: dict[str, Any]) -> list[Message]:
    """A user's turn: each tool result is a message of its own, texts in between stay in order."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    made: list[Message] = []
    for number, block in enumerate(content):
        place = f"{where}.content[{number}]"
        if block.type == "tool_result":
            result = _result(block, place, tools)
            made.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": result})
        elif made and made[-1]["role"] == "user":
            made[-1]["content"] += "\n" + _text(block, place)
        else:
            made.append({"role": "user", "content": _text(block, place)})
    return made or [{"role": "user", "content": ""}]


def _result(block: Block, where: str, tools: dict[str, Any]) -> str:
    if block.content is None or isinstance(block.content, str):
        return block.content or ""
    try:
        parts = msgspec.convert(block.content, list[Block])
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{where}.content: {error}", param=f"{where}.content") from error
    texts = []
    for number, part in enumerate(parts):
        if part.type == "tool_reference":
            tool = tools.get(part.tool_name or "", {"name": part.tool_name})
            texts.append(f"<tool>\n{json.dumps(tool, ensure_ascii=False)}\n</tool>")
        else:
            texts.append(_text(part, f"{where}.content[{number}]"))
    return "\n".join(texts)

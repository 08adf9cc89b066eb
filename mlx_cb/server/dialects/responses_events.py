"""OpenAI Responses: output items and the named events that announce them.

Owns the order of events and the numbers in them. Knows nothing about requests.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, field
from typing import Any

import msgspec

from mlx_cb.server.dialects.replayed_calls import arguments_object
from mlx_cb.server.dialects.responses_wire import Item, KnownTool
from mlx_cb.text.events import (
    EndReason,
    Finish,
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
)

encode = msgspec.json.Encoder().encode


def new_id(prefix: str) -> str:
    """An id that no other item has."""
    return f"{prefix}_{secrets.token_hex(12)}"


@dataclass(slots=True)
class ItemEvents:
    """Turns output events into Responses events; `output` holds the finished items."""

    tools: dict[str, KnownTool]
    output: list[Item] = field(default_factory=list)
    finish: EndReason = EndReason.STOP
    _open: Item | None = None
    _custom: str = ""
    _sequence: int = 0

    def frame(self, name: str, content: dict[str, Any]) -> bytes:
        """One event with the next sequence number."""
        body = {"type": name, "sequence_number": self._sequence, **content}
        self._sequence += 1
        return b"event: %s\ndata: %s\n\n" % (name.encode(), encode(body))

    def read(self, event: OutputEvent) -> bytes:
        """The frames of one event."""
        match event:
            case ReasoningDelta(text):
                return self._reasoning(text)
            case TextDelta(text):
                return self._text(text)
            case ToolCallStart(_, call_id, name):
                return self._call_start(call_id, name)
            case ToolCallDelta(_, arguments):
                return self._call_arguments(arguments)
            case Finish(reason):
                self.finish = reason
                return self.close()

    @property
    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self.output)}

    def _start(self, item: Item) -> bytes:
        closed = self.close()
        self._open = item
        added = {"output_index": len(self.output), "item": item}
        return closed + self.frame("response.output_item.added", added)

    def _reasoning(self, text: str) -> bytes:
        made = b""
        if self._open is None or self._open["type"] != "reasoning":
            made = self._start({"id": new_id("rs"), "type": "reasoning", "summary": []})
            part = {"type": "summary_text", "text": ""}
            place = {**self._place, "summary_index": 0, "part": part}
            made += self.frame("response.reasoning_summary_part.added", place)
            self._open["summary"] = [dict(part)]  # type: ignore[index]
        assert self._open is not None
        self._open["summary"][0]["text"] += text
        place = {**self._place, "summary_index": 0, "delta": text}
        return made + self.frame("response.reasoning_summary_text.delta", place)

    def _text(self, text: str) -> bytes:
        made = b""
        if self._open is None or self._open["type"] != "message":
            item = {"id": new_id("msg"), "type": "message", "role": "assistant"}
            made = self._start({**item, "status": "in_progress", "content": []})
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            place = {**self._place, "content_index": 0, "part": part}
            made += self.frame("response.content_part.added", place)
            self._open["content"] = [dict(part)]  # type: ignore[index]
        assert self._open is not None
        self._open["content"][0]["text"] += text
        place = {**self._place, "content_index": 0, "delta": text, "logprobs": []}
        return made + self.frame("response.output_text.delta", place)

    def _call_start(self, call_id: str, flat_name: str) -> bytes:
        tool = self.tools.get(flat_name)
        if tool is not None and tool.kind == "custom":
            item: Item = {"id": new_id("ctc"), "type": "custom_tool_call", "call_id": call_id}
            return self._start({**item, "name": tool.name, "input": "", "status": "in_progress"})
        item = {"id": new_id("fc"), "type": "function_call", "call_id": call_id}
        item["name"] = tool.name if tool is not None else flat_name
        if tool is not None and tool.namespace is not None:
            # Codex refuses a call of a namespace's tool that does not say so.
            item["namespace"] = tool.namespace
        return self._start({**item, "arguments": "", "status": "in_progress"})

    def _call_arguments(self, arguments: str) -> bytes:
        assert self._open is not None
        if self._open["type"] == "custom_tool_call":
            self._custom += arguments
            return b""
        self._open["arguments"] += arguments
        place = {**self._place, "delta": arguments}
        return self.frame("response.function_call_arguments.delta", place)

    def close(self) -> bytes:
        """End the open item, if there is one, with all of its `done` events."""
        item = self._open
        if item is None:
            return b""
        is_custom = item["type"] == "custom_tool_call"
        is_whole = _is_json(self._custom if is_custom else item.get("arguments", "{}"))
        made = self._custom_input(item) if is_custom else b""
        made += b"".join(self.frame(name, {**self._place, **more}) for name, more in _done(item))
        if "status" in item:
            item["status"] = "completed" if is_whole else "incomplete"
        made += self.frame(
            "response.output_item.done", {"output_index": len(self.output), "item": item}
        )
        self.output.append(item)
        self._open = None
        return made

    def _custom_input(self, item: Item) -> bytes:
        """A custom tool's free text: the model wrote it as an argument, which has to be whole."""
        arguments, self._custom = self._custom, ""
        given = arguments_object(arguments)
        text = given.get("input") if isinstance(given, dict) else None
        item["input"] = text if isinstance(text, str) else arguments
        place = {**self._place, "delta": item["input"]}
        return self.frame("response.custom_tool_call_input.delta", place)


def _is_json(arguments: str) -> bool:
    """False for a call that was cut off, or whose arguments stopped being JSON."""
    try:
        json.loads(arguments)
    except ValueError:
        return False
    return True


def _done(item: Item) -> list[tuple[str, dict[str, Any]]]:
    """The events that end an item's parts."""
    match item["type"]:
        case "reasoning":
            part = item["summary"][0]
            return [
                (
                    "response.reasoning_summary_text.done",
                    {"summary_index": 0, "text": part["text"]},
                ),
                ("response.reasoning_summary_part.done", {"summary_index": 0, "part": part}),
            ]
        case "message":
            part = item["content"][0]
            text = {"content_index": 0, "text": part["text"], "logprobs": []}
            return [
                ("response.output_text.done", text),
                ("response.content_part.done", {"content_index": 0, "part": part}),
            ]
        case "custom_tool_call":
            return [("response.custom_tool_call_input.done", {"input": item["input"]})]
    more = {"arguments": item["arguments"], "name": item["name"]}
    return [("response.function_call_arguments.done", more)]

"""OpenAI Responses: input items and tools on the wire, and the form that chat templates take.

Owns which items exist, how they fold into turns, and how tools of several kinds become function
tools and back. Unknown items and tools are skipped: agents invent new ones faster than servers.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Any

from mlx_cb.errors import InvalidRequest
from mlx_cb.server.dialects.replayed_calls import arguments_object
from mlx_cb.text.chat_template import Message

_log = logging.getLogger("mlx_cb.server")
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "refusal", "summary_text"})
_CALLS = frozenset({"function_call", "custom_tool_call", "local_shell_call"})
_OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output", "local_shell_call_output"})
_NO_NAMESPACE = "functions"
Item = dict[str, Any]


@dataclass(frozen=True, slots=True)
class KnownTool:
    """A tool as the client knows it; the model knows it by a flat name.

    `kind` is `function` or `custom` (free text in, answered as `custom_tool_call`).
    """

    kind: str
    name: str
    namespace: str | None
    function: dict[str, Any]

    @property
    def flat_name(self) -> str:
        """The name in the prompt."""
        return flat_name(self.name, self.namespace)


def flat_name(name: str, namespace: str | None) -> str:
    """`namespace__name`, or the bare name where there is no real namespace."""
    return name if namespace in (None, "", _NO_NAMESPACE) else f"{namespace}__{name}"


def known_tools(tools: list[Item], items: list[Item]) -> dict[str, KnownTool]:
    """All tools that can be called, by flat name: the request's, then those among the items."""
    given = list(tools)
    for item in items:
        if item.get("type") == "additional_tools":
            given += _objects(item.get("tools"))
    found: dict[str, KnownTool] = {}
    for tool in given:
        for known in _known(tool, None):
            found.setdefault(known.flat_name, known)
    return found


def _known(tool: Item, namespace: str | None) -> list[KnownTool]:
    kind, name = tool.get("type"), tool.get("name")
    if kind == "namespace":
        return [known for part in _objects(tool.get("tools")) for known in _known(part, name)]
    if kind not in ("function", "custom") or not isinstance(name, str) or not name:
        _log.debug("a tool of type %r is left out", kind)
        return []
    description = str(tool.get("description") or "")
    parameters = tool.get("parameters") or {"type": "object", "properties": {}}
    if kind == "custom":
        form = tool.get("format")
        grammar = form.get("definition") if isinstance(form, dict) else None
        if grammar:
            description += f"\n\nThe input has to follow this grammar:\n{grammar}"
        parameters = {
            "type": "object",
            "properties": {"input": {"type": "string"}},
            "required": ["input"],
        }
    function = {
        "name": flat_name(name, namespace),
        "description": description,
        "parameters": parameters,
    }
    return [KnownTool(kind, name, namespace, {"type": "function", "function": function})]


def template_messages(instructions: str | None, items: list[Item]) -> list[Message]:
    """Messages as templates take them. Raises InvalidRequest naming the item at fault."""
    folding = _Folding()
    if instructions:
        folding.made.append({"role": "system", "content": instructions})
    for number, item in enumerate(items):
        folding.add(item, f"input[{number}]")
    return folding.made


class _Folding:
    """Items to turns: reasoning, texts and calls up to the next result are one assistant turn."""

    def __init__(self) -> None:
        self.made: list[Message] = []
        self._reasoning: list[str] = []

    def add(self, item: Item, where: str) -> None:
        kind = _kind(item) or ("message" if "role" in item else "")
        if kind == "message":
            self._add_message(item, where)
        elif kind == "reasoning":
            self._reasoning.append(_reasoning_text(item))
        elif kind in _CALLS:
            self._turn().setdefault("tool_calls", []).append(_call(item))
        elif kind in _OUTPUTS:
            self._reasoning.clear()
            result = {"role": "tool", "tool_call_id": item.get("call_id"), "content": _output(item)}
            self.made.append(result)
        else:
            _log.debug("an input item of type %r is left out", kind)

    def _add_message(self, item: Item, where: str) -> None:
        role = _ROLES.get(str(item.get("role")))
        if role is None:
            raise InvalidRequest(f"{where}.role is {item.get('role')!r}", param=f"{where}.role")
        text = _content(item.get("content"), where)
        if role != "assistant":
            self._reasoning.clear()
            self.made.append({"role": role, "content": text})
            return
        turn = self._turn()
        turn["content"] = f"{turn['content']}\n\n{text}" if turn["content"] else text

    def _turn(self) -> Message:
        """The assistant turn that is open, or a new one."""
        if not self.made or self.made[-1]["role"] != "assistant":
            self.made.append({"role": "assistant", "content": ""})
        turn = self.made[-1]
        if self._reasoning:
            turn["reasoning_content"] = "\n".join(filter(None, self._reasoning))
            self._reasoning.clear()
        return turn


def _kind(item: Item) -> str:
    """What an item or a part is; "" when it does not say so in words."""
    kind = item.get("type")
    return kind if isinstance(kind, str) else ""


def _objects(value: Any) -> list[Item]:
    """The objects of a list; [] for anything else."""
    return [part for part in value if isinstance(part, dict)] if isinstance(value, list) else []


def _reasoning_text(item: Item) -> str:
    parts = _objects(item.get("content")) or _objects(item.get("summary"))
    return "\n".join(str(part.get("text") or "") for part in parts)


def _content(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise InvalidRequest(f"{where}.content must be a text or a list", param=f"{where}.content")
    texts = []
    for number, part in enumerate(content):
        kind = _kind(part) if isinstance(part, dict) else ""
        if kind not in _TEXT_PARTS:
            place = f"{where}.content[{number}]"
            raise InvalidRequest(
                f"{place} is of type {kind!r}, but this model takes text only", param=place
            )
        texts.append(str(part.get("text") or part.get("refusal") or ""))
    return "".join(texts)


def _output(item: Item) -> str:
    """A tool's result; an image in it is named, not refused: the agent cannot take it back."""
    output = item.get("output")
    if isinstance(output, str):
        return output
    if not isinstance(output, list):
        return "" if output is None else json.dumps(output, ensure_ascii=False)
    texts = [
        str(part.get("text") or "") if _kind(part) in _TEXT_PARTS else f"[{_kind(part)}]"
        for part in _objects(output)
    ]
    return "\n".join(texts)


def _call(item: Item) -> Item:
    arguments: Any
    if item["type"] == "custom_tool_call":
        arguments = {"input": item.get("input") or ""}
    elif item["type"] == "local_shell_call":
        arguments = item.get("action") or {}
    else:
        arguments = arguments_object(item.get("arguments"))
    name = item.get("name") or "local_shell"
    function = {"name": flat_name(name, item.get("namespace")), "arguments": arguments}
    return {"id": item.get("call_id"), "type": "function", "function": function}

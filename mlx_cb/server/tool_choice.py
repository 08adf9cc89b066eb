"""Whether the model may, must or must not call tools: the meaning of every dialect's field."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from mlx_cb.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What a request says about tools.

    Attributes:
        tools: OpenAI function tools that may be called; None for no tools.
        must_call: the answer has to be a call.
        name: of this tool, if `must_call`; None for any.
        most_calls: calls in one answer; None for no limit.
    """

    tools: list[dict[str, Any]] | None = None
    must_call: bool = False
    name: str | None = None
    most_calls: int | None = None


def choose_tools(
    tools: list[dict[str, Any]] | None,
    choice: str,
    name: str | None,
    *,
    most_calls: int | None,
    allowed: Collection[str | None] | None = None,
) -> ToolChoice:
    """Check a choice (`auto`, `none`, `required`, or `named` with a name) against the tools.

    With `allowed`, the tools of other names are as if they were not there.

    Raises InvalidRequest naming `tool_choice` or `tools`.
    """
    for number, tool in enumerate(tools or []):
        name_of = tool["function"].get("name") if isinstance(tool.get("function"), dict) else None
        if not name_of or not isinstance(name_of, str):
            where = f"tools[{number}]"
            raise InvalidRequest(f"{where} needs a function with a name", param=where)
        if not isinstance(tool["function"].get("parameters") or {}, dict):
            where = f"tools[{number}].function.parameters"
            raise InvalidRequest(f"{where} must be a JSON schema object", param=where)
    if allowed is not None:
        tools = [tool for tool in tools or [] if tool["function"]["name"] in allowed]
    if choice not in ("auto", "none", "required", "named"):
        raise InvalidRequest(f"tool_choice: {choice!r} is not known", param="tool_choice")
    if choice == "none" or (not tools and choice == "auto"):
        return ToolChoice()
    names = [tool["function"]["name"] for tool in tools or []]
    if not names:
        raise InvalidRequest("tool_choice asks for a call, but tools is empty", param="tool_choice")
    if choice == "named" and name not in names:
        raise InvalidRequest(
            f"tool_choice names {name!r}, which is not in tools", param="tool_choice"
        )
    forced = name if choice == "named" else names[0] if len(names) == 1 else None
    return ToolChoice(tools, choice in ("required", "named"), forced, most_calls)

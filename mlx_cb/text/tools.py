"""How a checkpoint writes tool calls: finds its syntax, turns call text into name and arguments.

Owns the choice of parser. Most parsers are mlx-lm's, loaded from its folder without importing
mlx-lm itself (which would import MLX and transformers into the HTTP process). Knows nothing about
where in the text a call stands: that is `sections`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from mlx_cb.errors import UnsupportedModel
from mlx_cb.text.call_streaming import streaming_of
from mlx_cb.text.lark_rules import properties_of
from mlx_cb.text.parsed_calls import ParsedCall
from mlx_cb.text.sections import Markers, ToolSyntax
from mlx_cb.text.tools_deepseek import DEEPSEEK_MARKERS, DEEPSEEK_TOKENS, parse_deepseek_calls

_PACKAGE = "mlx_cb_foreign_tool_parsers"

# Text in the chat template → mlx-lm's parser. The first that fits wins; order and texts follow
# `_infer_tool_parser` of mlx-lm 0.32.
_BY_TEMPLATE: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<|tool_call>", "<tool_call|>"), "gemma4"),
    (("<start_function_call>",), "function_gemma"),
    (("<longcat_tool_call>",), "longcat"),
    (("<arg_key>", "</arg_key>\\n<arg_value>"), "glm45"),
    (("<arg_key>", "</arg_key>\n<arg_value>"), "glm45"),
    (("<arg_key>",), "glm47"),
    (("<|tool_list_start|>",), "pythonic"),
    (("<|tool_call_start|>",), "pythonic"),
    (("<tool_call>\\n<function=",), "qwen3_coder"),
    (("<tool_call>\n<function=",), "qwen3_coder"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (('<function name="', '<param name="'), "minicpm5"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<atem:function_calls>",), "muse_spark"),
    (("<tool_call>",), "json_tools"),
)

# Forms that another form's parser reads as well.
_PARSERS = {"glm45": "glm47"}

# Control tokens inside a call that its parser reads.
_INNER: dict[str, tuple[str, ...]] = {
    "gemma4": ('<|"|>',),
    "function_gemma": ("<escape>",),
    "kimi_k2": ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    "kimi_k3": ("<|open|>", "<|sep|>", "<|close|>"),
    "mistral": ("[ARGS]", "[CALL_ID]"),
}


def find_tool_syntax(template: str, vocabulary_has: Callable[[str], bool]) -> str:
    """Name of the syntax this checkpoint uses; `json_tools` when nothing else fits."""
    if "<|channel|>" in template and "<|constrain|>" in template:
        return "harmony"
    if "<｜tool▁calls▁begin｜>" in template:
        return "deepseek_fenced" if "```json" in template else "deepseek"
    for texts, name in _BY_TEMPLATE:
        if all(text in template for text in texts):
            return name
    if vocabulary_has("<|open|>") and vocabulary_has("<|sep|>"):
        return "kimi_k3"
    if vocabulary_has("<|tool_call_start|>") and vocabulary_has("<|tool_call_end|>"):
        return "pythonic"
    if "<|python_tag|>" in template or ("<|eom_id|>" in template and "parameters" in template):
        return "llama3"
    return "json_tools"


def tool_syntax(name: str, tools: list[dict[str, Any]]) -> ToolSyntax:
    """The named syntax for a request's tools (some parsers read types from their schemas)."""
    streaming = streaming_of(name, tools)
    if name in ("deepseek", "deepseek_fenced"):
        return ToolSyntax(DEEPSEEK_MARKERS, parse_deepseek_calls, DEEPSEEK_TOKENS, "", streaming)
    if name == "llama3":
        markers = Markers("<|python_tag|>", "")
        return ToolSyntax(markers, lambda text: parse_llama3_calls(text, tools), (), "{", streaming)
    module = _foreign_parser(_PARSERS.get(name, name))

    known = [_with_plain_types(tool) for tool in tools]

    names = {tool["function"]["name"] for tool in tools if "function" in tool}

    def parse(text: str) -> list[ParsedCall]:
        if name == "longcat" and text.strip() in names:
            return [ParsedCall(text.strip(), "{}")]  # its parser knows no call without arguments
        return as_calls(module.parse_tool_call(text, known))

    markers = Markers(module.tool_call_start, module.tool_call_end)
    return ToolSyntax(markers, parse, _INNER.get(name, ()), streaming=streaming)


def _with_plain_types(tool: dict[str, Any]) -> dict[str, Any]:
    """The tool with references followed: parsers look for a `type` at every property."""
    function = tool.get("function") or {}
    parameters = function.get("parameters")
    if not isinstance(parameters, dict) or "properties" not in parameters:
        return tool
    properties = {name: schema for name, schema, _ in properties_of(parameters)}
    return {
        **tool,
        "function": {**function, "parameters": {**parameters, "properties": properties}},
    }


def as_calls(parsed: Any) -> list[ParsedCall]:
    """What a parser returned as calls. Raises ValueError if a name or the arguments are unfit."""
    calls = parsed if isinstance(parsed, list) else [parsed]
    return [_as_call(call) for call in calls]


def _as_call(call: Any) -> ParsedCall:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        raise ValueError("a tool call needs a name")
    arguments = call.get("arguments", call.get("parameters"))
    if arguments is None:
        arguments = {}
    if isinstance(arguments, str):
        arguments = json.loads(arguments) if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise ValueError("a tool call's arguments must be an object")
    return ParsedCall(call["name"], json.dumps(arguments, ensure_ascii=False), call.get("id"))


def parse_llama3_calls(text: str, tools: list[dict[str, Any]]) -> list[ParsedCall]:
    """Llama 3's `{"name": …, "parameters": {…}}`, several joined by `;` or nothing.

    Only names of `tools` count: a JSON answer that happens to have a name is not a call.
    """
    names = {tool["function"]["name"] for tool in tools if "function" in tool}
    decoder = json.JSONDecoder()
    calls: list[ParsedCall] = []
    position = 0
    while position < len(text):
        if text[position] in " \n\t\r;":
            position += 1
            continue
        value, position = decoder.raw_decode(text, position)
        call = _as_call(value)
        if call.name not in names:
            raise ValueError(f"no tool is named {call.name}")
        calls.append(call)
    return calls


def _foreign_parser(name: str) -> ModuleType:
    if _PACKAGE not in sys.modules:
        found = importlib.util.find_spec("mlx_lm")  # of a top-level package: imports nothing
        if found is None or found.origin is None:
            raise UnsupportedModel("mlx-lm is not installed, so its tool parsers are missing")
        folder = Path(found.origin).parent / "tool_parsers"
        spec = importlib.util.spec_from_file_location(
            _PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        assert spec.loader is not None
        package = importlib.util.module_from_spec(spec)
        sys.modules[_PACKAGE] = package
        spec.loader.exec_module(package)
    return importlib.import_module(f"{_PACKAGE}.{name}")

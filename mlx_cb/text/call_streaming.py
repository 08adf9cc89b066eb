"""Which forms of tool calls can be given on while they are written, and what marks their parts.

Forms that are not here (their arguments nest in a notation of their own) are given on when whole.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from mlx_cb.text.streamed_calls import CallStreaming, ElementArguments, JsonArguments

_BRACE = r"\s*(?=\{)"


def _json(head: str, tail: str) -> JsonArguments:
    return JsonArguments(re.compile(f"(?:{tail})?{head}{_BRACE}"), re.compile(tail))


_NAMED = r'\s*\{\s*"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:'
_DEEPSEEK_END = r"\s*(?:```)?\s*<｜tool▁call▁end｜>\s*"
_STREAMING: dict[str, CallStreaming] = {
    "json_tools": _json(_NAMED, r"\s*\}\s*"),
    "llama3": _json(_NAMED, r"\s*\}[\s;]*"),
    "mistral": _json(r"\s*(?P<name>[\w-]+)\s*\[ARGS\]", r"\s*"),
    "kimi_k2": _json(
        r"\s*<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[^\s<]+?):\d+)\s*"
        r"<\|tool_call_argument_begin\|>",
        r"\s*<\|tool_call_end\|>\s*",
    ),
    "deepseek": _json(
        r"\s*<｜tool▁call▁begin｜>\s*(?P<name>[^\s<]+)\s*<｜tool▁sep｜>", _DEEPSEEK_END
    ),
    "deepseek_fenced": _json(
        r"\s*<｜tool▁call▁begin｜>function<｜tool▁sep｜>\s*(?P<name>[^\s<]+)\s*```json",
        _DEEPSEEK_END,
    ),
    "qwen3_coder": ElementArguments("</parameter>", "</function>"),
    "glm47": ElementArguments("</arg_value>", ""),
    "glm45": ElementArguments("</arg_value>", ""),
    "longcat": ElementArguments("</longcat_arg_value>", ""),
    "minimax_m2": ElementArguments("</parameter>", "</invoke>"),
    "minicpm5": ElementArguments("</param>", ""),
    "muse_spark": ElementArguments("</atem:parameter>", "</atem:invoke>"),
    "kimi_k3": ElementArguments("<|close|>argument<|sep|>", "<|close|>call<|sep|>"),
}


def streaming_of(name: str, tools: list[dict[str, Any]]) -> CallStreaming | None:
    """How the named form's calls come in, None when only as a whole."""
    streaming = _STREAMING.get(name)
    if name == "llama3" and isinstance(streaming, JsonArguments):
        # It has no markers: a JSON answer that happens to have a name is not a call.
        names = frozenset(tool["function"]["name"] for tool in tools if "function" in tool)
        return replace(streaming, names=names)
    return streaming

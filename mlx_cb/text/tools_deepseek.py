"""The tool calls of DeepSeek V3, R1 and V3.1, between full-width control tokens."""

from __future__ import annotations

import json
import re

from mlx_cb.text.parsed_calls import ParsedCall
from mlx_cb.text.sections import Markers

DEEPSEEK_MARKERS = Markers("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
DEEPSEEK_TOKENS = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")

_CALL = re.compile(
    r"<｜tool▁call▁begin｜>(.*?)<｜tool▁sep｜>(.*?)(?:<｜tool▁call▁end｜>|\Z)", re.DOTALL
)
_FENCED = re.compile(r"\s*(?P<name>[^\n]+)\n```json\s*(?P<arguments>.*?)\s*```\s*\Z", re.DOTALL)


def parse_deepseek_calls(text: str) -> list[ParsedCall]:
    """All calls between the outer markers. Raises ValueError when there is none."""
    calls = [_parse(kind, rest) for kind, rest in _CALL.findall(text)]
    if not calls:
        raise ValueError("no tool call between the markers")
    return calls


def _parse(kind: str, rest: str) -> ParsedCall:
    # V3 and R1: `function<sep>name\n```json\n{…}\n```; V3.1: `name<sep>{…}`.
    fenced = _FENCED.match(rest)
    name, arguments = (
        (fenced["name"].strip(), fenced["arguments"]) if fenced else (kind.strip(), rest)
    )
    parsed = json.loads(arguments)
    if not isinstance(parsed, dict):
        raise ValueError("a tool call's arguments must be an object")
    return ParsedCall(name, json.dumps(parsed, ensure_ascii=False))

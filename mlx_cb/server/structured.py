"""Structured output: a request's schema, regular expression or grammar as llguidance's grammar.

Owns the check that a schema can be honoured, before anything runs, and the grammars of calls that
must be made. The engine masks what does not fit.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import msgspec

from mlx_cb.errors import InvalidRequest
from mlx_cb.sampling_params import SamplingParams
from mlx_cb.server.tool_choice import ToolChoice
from mlx_cb.text.call_forms import CallForm
from mlx_cb.text.lark_rules import JSON_OPTIONS

LARGEST_SCHEMA = 256 * 1024
DEEPEST_SCHEMA = 100


def schema_grammar(schema: Any, param: str) -> str:
    """A JSON schema's grammar. Raises InvalidRequest that names what is not supported."""
    from llguidance import LLMatcher

    if schema is True or schema == {}:
        schema = {"type": "object"}
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{param} must be a JSON schema object", param=param)
    if _depth(schema) > DEEPEST_SCHEMA or len(json.dumps(schema)) > LARGEST_SCHEMA:
        raise InvalidRequest(
            f"{param}: the schema is larger than {LARGEST_SCHEMA} bytes or nested deeper than "
            f"{DEEPEST_SCHEMA}",
            param=param,
        )
    return _checked(LLMatcher.grammar_from_json_schema(schema, defaults=JSON_OPTIONS), param)


def regex_grammar(pattern: str, param: str) -> str:
    """A regular expression's grammar. Raises InvalidRequest for what is not one."""
    from llguidance import LLMatcher

    return _checked(LLMatcher.grammar_from_regex(pattern), param)


def lark_grammar(grammar: str, param: str) -> str:
    """A Lark grammar, as llguidance reads it. Raises InvalidRequest for what is not one."""
    from llguidance import LLMatcher

    return _checked(LLMatcher.grammar_from_lark(grammar), param)


def choice_grammar(choices: list[str], param: str) -> str:
    """One of these texts."""
    if not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise InvalidRequest(f"{param} must be a list of texts", param=param)
    return lark_grammar("start: " + " | ".join(map(json.dumps, choices)), param)


def forced_call_grammar(form: CallForm, choice: ToolChoice, specials: Mapping[str, int]) -> str:
    """What follows the forced start of a call: the rest of it, for the named or for any tool."""
    name, tools = choice.name, choice.tools or []
    named = [tool for tool in tools if name is None or tool["function"]["name"] == name]
    return lark_grammar(form.grammar(named, specials, with_names=name is None), "tools")


def beside_calls(
    grammar: str, form: CallForm, choice: ToolChoice, specials: Mapping[str, int]
) -> str:
    """A schema's grammar that also lets the model call one tool instead of answering.

    Raises InvalidRequest where that cannot be written down.
    """
    parts = msgspec.json.decode(grammar)["grammars"]
    schema = parts[0].get("json_schema") if len(parts) == 1 else None
    if schema is None:
        raise InvalidRequest(
            "what an answer beside tools has to follow must be a JSON schema; or set tool_choice "
            "to none",
            param="tools",
        )
    calls = form.grammar(choice.tools or [], specials, start=form.start(None))
    answer = f"answer: %json {json.dumps(schema)}"
    return lark_grammar(f"{calls.replace('start: ', 'start: answer | ', 1)}\n{answer}", "tools")


def with_grammar(params: SamplingParams, grammar: str | None) -> SamplingParams:
    """The parameters with a grammar."""
    return params if grammar is None else dataclasses.replace(params, grammar=grammar)


def _checked(grammar: str, param: str) -> str:
    from llguidance import LLMatcher

    is_wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if is_wrong:
        reason = " ".join(" ".join(messages).split())[:300]
        raise InvalidRequest(f"{param} is not supported: {reason}", param=param)
    return grammar


def _depth(value: Any) -> int:
    """Nesting of objects and lists, without recursion."""
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [
            part
            for outer in level
            for part in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(part, (dict, list))
        ]
    return depth

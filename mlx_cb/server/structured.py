"""Structured output: a request's schema, regular expression or grammar as llguidance's grammar.

Owns the check that a schema can be honoured, before anything runs. The engine's part, masking
what does not fit, takes the grammar from `SamplingParams.grammar`.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from mlx_cb.errors import InvalidRequest
from mlx_cb.sampling_params import SamplingParams

LARGEST_SCHEMA = 256 * 1024
DEEPEST_SCHEMA = 100
# With free white space a model at high temperature writes blanks for ever.
_DEFAULTS: Any = {"whitespace_flexible": False}
_ENGINE_HAS_GRAMMARS = "grammar" in {field.name for field in dataclasses.fields(SamplingParams)}


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
    return _checked(LLMatcher.grammar_from_json_schema(schema, defaults=_DEFAULTS), param)


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


def with_grammar(params: SamplingParams, grammar: str | None, param: str) -> SamplingParams:
    """The parameters with a grammar.

    Raises InvalidRequest when the engine cannot follow one: prose is no answer to a schema.
    """
    if grammar is None:
        return params
    if not _ENGINE_HAS_GRAMMARS:
        raise InvalidRequest(f"{param}: this engine has no structured output", param=param)
    changes: dict[str, Any] = {"grammar": grammar}
    return dataclasses.replace(params, **changes)


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

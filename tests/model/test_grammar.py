"""Structured output inside the batch: constrained rows follow their grammar, others do not care."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from llguidance import LLMatcher

from mlx_cb import LLM, EngineConfig, SamplingParams
from mlx_cb.core.outputs import FinishReason

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
JSON = LLMatcher.grammar_from_json_schema(SCHEMA, defaults={"whitespace_flexible": False})


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(EngineConfig()) as engine:
        yield engine


def test_constrained_rows_follow_their_schema_and_plain_ones_are_not_touched(llm: LLM) -> None:
    plain = SamplingParams(temperature=0.0, max_tokens=12)
    alone = llm.submit("The sky is", plain).result().text
    hot = [
        SamplingParams(temperature=1.5, seed=seed, grammar=JSON, max_tokens=120)
        for seed in range(4)
    ]
    generations = [llm.submit("Describe a person as JSON:", params) for params in hot]
    beside = llm.submit("The sky is", plain)
    for generation in generations:
        output = generation.result()
        assert output.finish_reason is FinishReason.STOP
        value = json.loads(output.text)
        assert set(value) == {"name", "age", "tags"}
        assert 0 <= value["age"] <= 99
        assert set(value["tags"]) <= {"a", "b"}
    assert beside.result().text == alone
    assert len({generation.result().text for generation in generations}) > 1


def test_regular_expressions_and_penalties_go_together(llm: LLM) -> None:
    grammar = LLMatcher.grammar_from_regex(r"[0-9]{3}-[0-9]{4}")
    params = SamplingParams(
        temperature=1.0, seed=1, grammar=grammar, repetition_penalty=1.3, max_tokens=30
    )
    text = llm.submit("Call me at", params).result().text
    assert len(text) == 8
    assert text.replace("-", "").isdigit()


def test_a_broken_grammar_ends_its_own_request_only(llm: LLM) -> None:
    broken = SamplingParams(temperature=0.0, grammar="start: /(/ ;;", max_tokens=5)
    generation = llm.submit("x", broken)
    beside = llm.submit("The sky is", SamplingParams(temperature=0.0, max_tokens=5))
    assert generation.result().token_ids == []
    assert len(beside.result().token_ids) == 5

"""Random schemas on the demo model at temperature 1.5: every finished answer validates.

The engine runs in this process and its batch is kept full, so that all of it takes minutes; in
slices, so that each can be run alone. The grammars are those of the HTTP front.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest

from mlx_cb import LLM, EngineConfig, SamplingParams
from mlx_cb.config import SchedulerConfig
from mlx_cb.core.outputs import FinishReason
from mlx_cb.server.structured import schema_grammar

NUMBER, SLICES = 500, 5
PATTERNS = [r"^[A-Z]{2}-[0-9]{3}$", r"^(yes|no)$", r"^[a-f]{1,4}$", r"^\d{1,3}(\.\d)?$"]
FORMATS = ["date", "time", "date-time", "uuid", "ipv4"]
SIMPLE = [
    "string", "sized", "pattern", "format", "integer", "open integer", "number", "boolean", "enum",
    "const", "null", "nullable",
]  # fmt: skip
NESTED = ["object", "object", "open object", "array", "tuple", "anyOf", "reference", "list"]


def random_schema(rng: random.Random) -> dict[str, Any]:
    """A schema of the kinds that clients send, with definitions when it refers to some."""
    made = _object(rng, 0) if rng.random() < 0.6 else _schema(rng, 0)
    text = json.dumps(made)
    if "#/$defs/" in text:
        made = {**made, "$defs": {"Word": _simple(rng, "sized"), "List": _LIST}}
    return made


#: A list in the manner of Lisp: it refers to itself, and its end comes first and is likely.
_LIST = {
    "anyOf": [
        {"type": "null"},
        {
            "type": "object",
            "properties": {"head": {"type": "boolean"}, "tail": {"$ref": "#/$defs/List"}},
            "required": ["head", "tail"],
            "additionalProperties": False,
        },
    ]
}


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.choice(SIMPLE + (NESTED if depth < 2 else []))
    match kind:
        case "object":
            return _object(rng, depth)
        case "open object":
            inner = _simple(rng, "integer")
            return {"type": "object", "additionalProperties": inner, "maxProperties": 2}
        case "array":
            least = rng.randrange(0, 3)
            items = _schema(rng, depth + 1)
            return {"type": "array", "items": items, "minItems": least, "maxItems": least + 2}
        case "tuple":
            parts = [_schema(rng, depth + 1) for _ in range(2)]
            return {"type": "array", "prefixItems": parts, "items": False, "minItems": 2}
        case "anyOf":
            return {"anyOf": [_schema(rng, depth + 1) for _ in range(2)]}
        case "reference":
            return {"$ref": "#/$defs/Word"}
        case "list":
            return {"$ref": "#/$defs/List"}
    return _simple(rng, kind)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    known = ["name", "age", "city", "tags", "größe", "is ok", 'a "b"']
    names = rng.sample(known, rng.randrange(1, 5))
    return {
        "type": "object",
        "properties": {name: _schema(rng, depth + 1) for name in names},
        "required": rng.sample(names, rng.randrange(1, len(names) + 1)),
        "additionalProperties": False,
    }


def _simple(rng: random.Random, kind: str) -> dict[str, Any]:
    low = rng.randrange(-50, 50)
    simple: dict[str, dict[str, Any]] = {
        "string": {"type": "string", "maxLength": rng.randrange(1, 12)},
        "sized": {"type": "string", "minLength": 2, "maxLength": 2 + rng.randrange(6)},
        "pattern": {"type": "string", "pattern": rng.choice(PATTERNS)},
        "format": {"type": "string", "format": rng.choice(FORMATS)},
        "integer": {"type": "integer", "minimum": low, "maximum": low + rng.randrange(1, 900)},
        "open integer": {"type": "integer", "exclusiveMinimum": low},
        "number": {"type": "number", "minimum": low, "exclusiveMaximum": low + 1.5},
        "enum": {"enum": rng.sample(["red", "green", 7, None, True, "a b", 1.5, {"x": []}], 3)},
        "const": {"const": rng.choice(["x", 1, False, ["a", 2]])},
        "nullable": {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
    }
    return simple.get(kind, {"type": kind})


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(EngineConfig(scheduler=SchedulerConfig(max_num_seqs=48))) as engine:
        yield engine


@pytest.mark.slow
@pytest.mark.parametrize("part", range(SLICES))
def test_every_finished_answer_validates(
    llm: LLM, part: int, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(64 + part)
    schemas = [random_schema(rng) for _ in range(NUMBER // SLICES)]
    prompt = [{"role": "user", "content": "Fill in this form about Paris."}]
    params = [
        SamplingParams(
            temperature=1.5, max_tokens=100, seed=number, grammar=schema_grammar(schema, "schema")
        )
        for number, schema in enumerate(schemas)
    ]
    outputs = llm.generate([prompt] * len(schemas), params)
    finished, wrong = 0, []
    for schema, output in zip(schemas, outputs, strict=True):
        if output.finish_reason is FinishReason.STOP:
            finished += 1
            if not _validates(schema, output.text):
                wrong.append((schema, output.text))
    with capsys.disabled():
        print(f"\n{finished} of {len(schemas)} answers finished, {len(wrong)} of them not valid")
    assert not wrong
    # A number may have any number of digits, and at this temperature some have too many.
    assert finished >= 0.7 * len(schemas)


@pytest.mark.slow
def test_c064_blanks_never_fill_the_answer(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    """Five texts, and blanks that are as likely as can be between the parts of the JSON."""
    names = ["name", "city", "street", "job", "hobby"]
    text = {"type": "string", "maxLength": 20}
    schema = {
        "type": "object", "properties": dict.fromkeys(names, text), "required": names,
        "additionalProperties": False,
    }  # fmt: skip
    grammar = schema_grammar(schema, "schema")
    blanks = [llm._text.tokenizer.encode(blank) for blank in (" ", "\n", "  ", "\t", "\n\n")]
    biased = tuple((ids[0], 20.0) for ids in blanks if len(ids) == 1)
    assert len(biased) >= 3
    prompts = [[{"role": "user", "content": f"Describe person number {n}."}] for n in range(50)]
    params = [
        SamplingParams(
            temperature=float(n % 2), seed=n, max_tokens=400, grammar=grammar, logit_bias=biased
        )
        for n in range(50)
    ]
    outputs = llm.generate(prompts, params)
    ended = [output for output in outputs if output.finish_reason is FinishReason.STOP]
    for output in ended:
        assert _validates(schema, output.text)
        assert len(output.text) < 400
    with capsys.disabled():
        print(f"\n{len(ended)} of 50 ended by themselves")
    assert len(ended) >= 48
    assert all(
        output.finish_reason is FinishReason.LENGTH for output in outputs if output not in ended
    )


def _validates(schema: dict[str, Any], text: str) -> bool:
    try:
        jsonschema_rs.validate(schema, json.loads(text), validate_formats=True)
    except (ValueError, jsonschema_rs.ValidationError):
        return False
    return True

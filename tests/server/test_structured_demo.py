"""Random schemas on the demo model at temperature 1.5: every finished answer validates."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import jsonschema_rs
import pytest

from tests.e2e.server import Server

NUMBER = 500
AT_ONCE = 16


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema of the kinds that clients send."""
    kinds = ["string", "integer", "number", "boolean", "enum", "const", "null"]
    kind = rng.choice(kinds + (["object", "object", "array", "anyOf"] if depth < 3 else []))
    match kind:
        case "string":
            return {"type": "string", "maxLength": rng.randrange(1, 12)}
        case "integer":
            low = rng.randrange(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(1, 900)}
        case "enum":
            return {"enum": rng.sample(["red", "green", 7, None, True, "a b"], 3)}
        case "const":
            return {"const": rng.choice(["x", 1, False])}
        case "array":
            least = rng.randrange(0, 3)
            items = random_schema(rng, depth + 1)
            return {
                "type": "array", "items": items, "minItems": least, "maxItems": least + 2
            }  # fmt: skip
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth + 1) for _ in range(2)]}
        case "object":
            known = ["name", "age", "city", "tags", "größe", "is ok"]
            names = rng.sample(known, rng.randrange(1, 5))
            return {
                "type": "object",
                "properties": {name: random_schema(rng, depth + 1) for name in names},
                "required": rng.sample(names, rng.randrange(1, len(names) + 1)),
                "additionalProperties": False,
            }
    return {"type": kind}


@pytest.mark.slow
def test_every_finished_answer_validates(capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(64)
    schemas = [random_schema(rng) for _ in range(NUMBER)]
    server = Server("demo", "--max-queue-wait-s", "3600")  # a loaded machine refuses nobody here

    def ask(schema: dict[str, Any]) -> dict[str, Any]:
        body = {
            "messages": [{"role": "user", "content": "Fill in this form about Paris."}],
            "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
            "temperature": 1.5,
            "max_tokens": 150,
        }
        answer = httpx2.post(server.url + "/v1/chat/completions", json=body, timeout=300)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]

    try:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            choices = list(pool.map(ask, schemas))
    finally:
        server.stop()
    finished = 0
    for schema, choice in zip(schemas, choices, strict=True):
        if choice["finish_reason"] == "stop":
            finished += 1
            jsonschema_rs.validate(schema, json.loads(choice["message"]["content"]))
    with capsys.disabled():
        print(f"\n{finished} of {NUMBER} answers finished, all of them valid")
    # A number may have any number of digits, and at this temperature some have too many.
    assert finished >= 0.8 * NUMBER

"""Structured output: what reaches the engine, and what is refused by name: C058, C063, C065."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import llguidance
import pytest

Serve = Callable[..., Any]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "people": {"type": "integer"}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
GOOD, BAD = '{"city":"Paris","people":2}', '{"city":"Paris"}'
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {
        "type": "object", "properties": {"a": {"type": kind}}, "required": ["a"],
        "additionalProperties": False,
    }}}
    for name, kind in (("add", "integer"), ("say", "string"))
]  # fmt: skip
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
HELLO = [{"role": "user", "content": "hello"}]


def accepts(server: Any, answer: Any, text: str) -> bool:
    """Whether the grammar that the engine was given lets this text through, to its end."""
    assert answer.status_code == 200, answer.text
    grammar = server.engine.played[answer.headers["x-request-id"]].params.grammar
    assert grammar is not None
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, grammar)
    taken = matcher.try_consume_tokens(tokenizer.tokenize_str(text))
    assert not matcher.is_error(), matcher.get_error()
    return taken == len(tokenizer.tokenize_str(text)) and matcher.is_accepting()


REQUESTS = {
    "chat": ("/v1/chat/completions", {"messages": HELLO, "response_format": JSON_SCHEMA}),
    "guided": ("/v1/chat/completions", {"messages": HELLO, "guided_json": SCHEMA}),
    "completions": ("/v1/completions", {"prompt": "x", "response_format": JSON_SCHEMA}),
    "responses": (
        "/v1/responses",
        {"input": "x", "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
    ),
    "anthropic": (
        "/v1/messages",
        {"messages": HELLO, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    ),
    "ollama chat": ("/api/chat", {"model": "m", "messages": HELLO, "format": SCHEMA}),
    "ollama generate": ("/api/generate", {"model": "m", "prompt": "x", "format": SCHEMA}),
}


@pytest.mark.parametrize("name", sorted(REQUESTS))
def test_c063_a_schema_binds_in_every_dialect(serve: Serve, name: str) -> None:
    server = serve({"text": GOOD})
    path, body = REQUESTS[name]
    answer = server.post(path, body)
    assert accepts(server, answer, GOOD)
    assert not accepts(server, answer, BAD)
    assert not accepts(server, answer, "Paris is big.")
    assert not accepts(server, answer, GOOD.replace(":", ":" + " " * 50))  # C064


def test_json_object_regex_choice_and_grammar(serve: Serve) -> None:
    server = serve({"text": "x"})
    for fields, good, bad in (
        ({"response_format": {"type": "json_object"}}, '{"a":[1]}', "[1]"),
        ({"guided_regex": "[0-9]{3}"}, "123", "12a"),
        ({"guided_choice": ["yes", 'n"o']}, 'n"o', "maybe"),
        ({"guided_grammar": 'start: "a" "b"'}, "ab", "ba"),
    ):
        answer = server.chat(**fields)
        assert accepts(server, answer, good)
        assert not accepts(server, answer, bad)
    text = server.chat(response_format={"type": "text"})
    assert server.engine.played[text.headers["x-request-id"]].params.grammar is None
    ollama = server.post("/api/chat", {"model": "m", "messages": HELLO, "format": "json"})
    assert accepts(server, ollama, "{}")


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


BAD_SCHEMAS = [
    {"not": {}}, {"type": "banana"}, {"$ref": "#/nowhere"}, "text", 3, [],
    {"type": "string", "pattern": "(a)\\1"}, {"type": "array", "uniqueItems": True},
    {"type": "string", "format": "no-such-format"}, deep(200),
]  # fmt: skip


@pytest.mark.parametrize("schema", BAD_SCHEMAS, ids=lambda s: json.dumps(s)[:30])
@pytest.mark.parametrize("stream", [False, True])
def test_c065_a_bad_schema_is_refused_with_the_reason(
    serve: Serve, schema: Any, stream: bool
) -> None:
    server = serve({"text": "x"})
    started = time.monotonic()
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = server.chat(response_format=wanted, stream=stream)
    assert time.monotonic() - started < 1
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("response_format")
    assert not server.engine.played


def test_c065_other_wrong_formats(serve: Serve) -> None:
    server = serve({"text": "x"})
    for wanted in (
        {"type": "banana"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {}},
    ):
        answer = server.chat(response_format=wanted)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "response_format"
    many = {"type": "string", "enum": [f"value {n}" for n in range(2000)]}
    schema = {"type": "json_schema", "json_schema": {"schema": many}}
    assert accepts(server, server.chat(response_format=schema), '"value 1999"')


def test_c058_forced_calls_follow_the_tools_schema(serve: Serve) -> None:
    server = serve({"text": "x"})
    named = server.chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "add"}})
    assert accepts(server, named, '{"a":1}}')
    assert not accepts(server, named, '{"a":"x"}}')
    any_tool = server.chat(tools=TOOLS, tool_choice="required")
    assert accepts(server, any_tool, 'say", "arguments": {"a":"x"}}')
    assert accepts(server, any_tool, 'add", "arguments": {"a":1}}')
    assert not accepts(server, any_tool, 'sub", "arguments": {"a":1}}')
    assert not accepts(server, any_tool, 'add", "arguments": {"a":"x"}}')


def test_a_schema_beside_tools_lets_the_model_call_or_answer(serve: Serve) -> None:
    server = serve({"text": "x"})
    answer = server.chat(tools=TOOLS, response_format=JSON_SCHEMA)
    assert accepts(server, answer, GOOD)
    assert accepts(server, answer, '<tool_call>\n{"name": "add", "arguments": {"a":1}}')
    assert not accepts(server, answer, "I do not know.")


def test_a_call_without_its_end_marker_is_a_call_when_the_turn_ended(serve: Serve) -> None:
    server = serve({"tokens": ["<tool_call>", '{"name": "add", "arguments": {"a": 1}}']})
    choice = server.chat(tools=TOOLS).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    cut = server.chat(tools=TOOLS, max_tokens=2).json()["choices"][0]
    assert cut["finish_reason"] == "length"
    assert "<tool_call>" in cut["message"]["content"]


def test_reasoning_that_the_template_opened_is_closed_for_a_grammar(serve: Serve) -> None:
    template = "{{ messages[0].content }}{% if add_generation_prompt %}<think>\n{% endif %}"
    server = serve({"text": GOOD}, script={"chat_template": template})
    answer = server.chat(response_format=JSON_SCHEMA)
    assert answer.json()["choices"][0]["message"]["content"] == GOOD
    thinks = server.chat()
    assert thinks.json()["choices"][0]["message"]["reasoning_content"] == GOOD

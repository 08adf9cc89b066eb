"""A value of any kind in any place of a rich body is an answer or a 400, never a fault of ours."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

Serve = Callable[..., Any]
ODD: list[Any] = [None, 3, "x", [[]], {"type": []}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTION = {"name": "add", "description": "adds", "parameters": SCHEMA}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
CHAT = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "be"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "5"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {"type": "function", "function": {"name": "add"}},
    "stream_options": {"include_usage": True},
    "logit_bias": {"5": 1},
    "stop": ["END"],
    "chat_template_kwargs": {"x": 1},
}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
    {"type": "function", "function": {"name": "add"}}]}}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
FLAT = {"type": "function", **FUNCTION}
RESPONSES = {
    "model": "m",
    "instructions": "be",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}], "content": None},
        {
            "type": "function_call",
            "call_id": "c",
            "name": "add",
            "arguments": "{}",
            "namespace": "n",
        },
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "text", "text": "5"}]},
        {"type": "custom_tool_call", "call_id": "d", "name": "patch", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": "x"},
        {"type": "local_shell_call", "call_id": "e", "action": {"command": ["ls"]}},
        {"type": "additional_tools", "role": "developer", "tools": [FLAT]},
    ],
    "tools": [
        {"type": "namespace", "name": "n", "tools": [FLAT]},
        {"type": "custom", "name": "patch", "description": "d", "format": {"definition": "g"}},
        {"type": "web_search"},
    ],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [FLAT]},
    "reasoning": {"effort": "low"},
    "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
    "metadata": {"a": "b"},
}
MESSAGES = {
    "model": "m",
    "max_tokens": 9,
    "system": [{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi"}, {
            "type": "document", "title": "t", "source": {"type": "text", "data": "d"}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "tool_use", "id": "t", "name": "add", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [
            {"type": "tool_reference", "tool_name": "add"}, {"type": "search_result", "content": [
                {"type": "text", "text": "x"}]}]}]},
    ],
    "tools": [{"name": "add", "input_schema": SCHEMA, "defer_loading": False}],
    "tool_choice": {"type": "tool", "name": "add", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 5},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
    "stop_sequences": ["END"],
}  # fmt: skip
OLLAMA = {
    "model": "m",
    "stream": False,
    "messages": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [
            {"function": {"name": "add", "arguments": {"a": 1}}}]},
        {"role": "tool", "tool_name": "add", "content": "5"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "options": {"num_predict": 5, "stop": ["END"], "temperature": 1},
    "format": SCHEMA,
    "think": True,
    "keep_alive": "5m",
}  # fmt: skip
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "chat allowed": ("/v1/chat/completions", {**CHAT, "tool_choice": ALLOWED}),
    "chat format": (
        "/v1/chat/completions", {"messages": CHAT["messages"], "response_format": FORMAT}
    ),
    "completions": (
        "/v1/completions",
        {"prompt": ["x", "y"], "suffix": "", "logprobs": 1, "echo": True, "n": 2, "stop": ["a"]},
    ),
    "responses": ("/v1/responses", RESPONSES),
    "messages": ("/v1/messages", MESSAGES),
    "counting": ("/v1/messages/count_tokens", MESSAGES),
    "ollama": ("/api/chat", OLLAMA),
    "generate": ("/api/generate", {"model": "m", "prompt": "x", "system": "s", "stream": False,
                                   "options": {"seed": 1}, "format": "json", "raw": False}),
    "completion": ("/completion", {"prompt": "x", "stop": ["a"], "json_schema": SCHEMA, "n_cmpl": 1,
                                   "n_predict": 5, "grammar": "", "image_data": []}),
    "infill": ("/infill", {"input_prefix": "a", "input_suffix": "b", "prompt": "c",
                           "input_extra": [{"text": "t", "filename": "f"}]}),
    "tokenize": ("/tokenize", {"messages": CHAT["messages"], "tools": CHAT["tools"]}),
    "template": ("/apply-template", {"messages": CHAT["messages"], "tools": CHAT["tools"]}),
}  # fmt: skip


def changed(body: Any) -> Iterator[tuple[str, Any]]:
    """The body with each of its values, in turn, replaced by each odd one."""
    for path in _paths(body):
        for odd in ODD:
            made = copy.deepcopy(body)
            holder = made
            for step in path[:-1]:
                holder = holder[step]
            holder[path[-1]] = odd
            yield f"{path} = {json.dumps(odd)}", made


def _paths(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in items:
        yield (*before, key)
        if isinstance(part, (dict, list)):
            yield from _paths(part, (*before, key))


@pytest.fixture(scope="module")
def server(serve_all: Serve) -> Any:
    tokens = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]
    return serve_all({"text": "x"}, {"match": "^never$", "tokens": tokens})


@pytest.mark.parametrize("name", sorted(BODIES))
def test_any_value_in_any_place(server: Any, name: str) -> None:
    path, body = BODIES[name]
    assert server.post(path, body).status_code == 200, server.post(path, body).text
    for what, made in changed(body):
        answer = server.post(path, made)
        assert answer.status_code in (200, 400), (what, answer.text)
        if answer.status_code == 400:
            error = answer.json()["error"]
            assert error if isinstance(error, str) else error["message"], what

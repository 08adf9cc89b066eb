"""A tool call that is cut off or is no JSON: never made, never lost, and the end says so (C056).

Not streamed it is the answer's text. Streamed, what was given on of its arguments is a beginning
that no client can parse as a whole, the rest is text, and the end is not "tool calls".
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest

Serve = Callable[..., Any]
SCHEMA = {"type": "object"}
SAY: list[Any] = [{"role": "user", "content": "go"}]
BROKEN = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": oops}}\n</tool_call>'
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": SAY, "tools": [TOOL]}),
    "responses": (
        "/v1/responses",
        {"input": "go", "tools": [{"type": "function", "name": "add", "parameters": SCHEMA}]},
    ),
    "messages": ("/v1/messages", {"messages": SAY, "tools": [{"name": "add", "input_schema": {}}]}),
    "ollama": ("/api/chat", {"model": "m", "messages": SAY, "tools": [TOOL]}),
}
LIMIT = {"chat": "max_tokens", "responses": "max_output_tokens", "messages": "max_tokens"}


def ask(server: Any, dialect: str, **fields: Any) -> Any:
    path, body = BODIES[dialect]
    answer = server.post(path, {**body, **fields})
    assert answer.status_code == 200, answer.text
    return answer


def data(answer: Any) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {")]


def streamed(server: Any, dialect: str, **fields: Any) -> tuple[str, str, str]:
    """Arguments, text and end of a streamed answer."""
    made = data(ask(server, dialect, stream=True, **fields))
    if dialect == "chat":
        choices = [chunk["choices"][0] for chunk in made]
        calls = [c for choice in choices for c in choice["delta"].get("tool_calls", [])]
        arguments = "".join(call["function"]["arguments"] for call in calls)
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        return arguments, text, choices[-1]["finish_reason"]
    if dialect == "messages":
        deltas = [event["delta"] for event in made if event["type"] == "content_block_delta"]
        arguments = "".join(delta.get("partial_json", "") for delta in deltas)
        text = "".join(delta.get("text", "") for delta in deltas)
        return arguments, text, made[-2]["delta"]["stop_reason"]
    (call,) = [item for item in made[-1]["response"]["output"] if item["type"] == "function_call"]
    assert call["status"] == "incomplete"
    texts = [e["delta"] for e in made if e["type"] == "response.output_text.delta"]
    return call["arguments"], "".join(texts), made[-1]["type"]


@pytest.mark.parametrize(
    ("dialect", "end"),
    [("chat", "stop"), ("messages", "end_turn"), ("responses", "response.completed")],
)
def test_a_streamed_call_that_is_no_json(serve: Serve, dialect: str, end: str) -> None:
    arguments, text, reason = streamed(serve({"text": BROKEN}), dialect)
    assert arguments == '{"a": 1, "b": '
    assert text.startswith("oops}}")
    assert reason == end


@pytest.mark.parametrize(
    ("dialect", "end"),
    [("chat", "length"), ("messages", "max_tokens"), ("responses", "response.incomplete")],
)
def test_a_streamed_call_that_is_cut_off(serve: Serve, dialect: str, end: str) -> None:
    arguments = {"text": "a b c d e f g h"}
    server = serve({"tool_calls": [{"name": "add", "arguments": arguments}]})
    for limit in range(6, 13):
        given, text, reason = streamed(server, dialect, **{LIMIT[dialect]: limit})
        assert json.dumps(arguments).startswith(given)
        assert reason == end
        assert not text.strip()


@pytest.mark.parametrize(
    ("dialect", "end"),
    [("chat", "stop"), ("messages", "end_turn"), ("responses", "completed"), ("ollama", "stop")],
)
def test_a_whole_answer_gives_it_as_text(serve: Serve, dialect: str, end: str) -> None:
    server = serve({"text": BROKEN})
    made = ask(server, dialect, stream=False).json()
    match dialect:
        case "chat":
            (choice,) = made["choices"]
            text, reason = choice["message"]["content"], choice["finish_reason"]
            assert "tool_calls" not in choice["message"]
        case "messages":
            (block,) = made["content"]
            text, reason = block["text"], made["stop_reason"]
        case "responses":
            (item,) = made["output"]
            text, reason = item["content"][0]["text"], made["status"]
        case _:
            text, reason = made["message"]["content"], made["done_reason"]
            assert "tool_calls" not in made["message"]
    assert (text, reason) == (BROKEN, end)


def test_ollama_streams_no_part_of_a_call(serve: Serve) -> None:
    lines = ask(serve({"text": BROKEN}), "ollama").text.splitlines()
    messages = [json.loads(line)["message"] for line in lines]
    assert not any("tool_calls" in message for message in messages)
    assert "".join(message["content"] for message in messages) == BROKEN


def test_released_clients_read_it_to_the_end(serve: Serve) -> None:
    """The SDKs' own accumulators take the beginning of a call, and show the end that says so."""
    server = serve({"text": BROKEN})
    with openai.OpenAI(base_url=server.url + "/v1", api_key="x") as api:
        chunks = list(
            api.chat.completions.create(model="m", messages=SAY, tools=[TOOL], stream=True)
        )
        assert chunks[-1].choices[0].finish_reason == "stop"
        tool: Any = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}
        with api.responses.stream(model="m", input="go", tools=[tool]) as stream:
            for _ in stream:
                pass
            assert stream.get_final_response().output[0].status == "incomplete"
    tools: Any = [{"name": "add", "input_schema": SCHEMA}]
    with (
        anthropic.Anthropic(base_url=server.url, api_key="x") as client,
        client.messages.stream(model="m", max_tokens=99, messages=SAY, tools=tools) as stream,
    ):
        message = stream.get_final_message()
    assert message.stop_reason == "end_turn"
    assert [block.type for block in message.content] == ["tool_use", "text"]

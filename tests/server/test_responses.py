"""OpenAI Responses with the released client and on the wire, and what Codex needs of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

Serve = Callable[..., Any]
Connect = Callable[..., openai.OpenAI]
ADD: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
FULL = {
    "reasoning": "let me see",
    "text": "Adding.",
    "tool_calls": [{"name": "add", "arguments": {"a": 1}}],
    "cached_tokens": 3,
}


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Released clients that are closed at the end of the test."""
    clients: list[openai.OpenAI] = []

    def start(server: Any, **options: Any) -> openai.OpenAI:
        clients.append(openai.OpenAI(base_url=server.url + "/v1", api_key="x", **options))
        return clients[-1]

    yield start
    for client in clients:
        client.close()


def ask(server: Any, given: Any = "hello", **fields: Any) -> Any:
    return server.post("/v1/responses", {"model": "m", "input": given, **fields})


def prompt_of(server: Any, given: Any, **fields: Any) -> str:
    answer = ask(server, given, **fields)
    assert answer.status_code == 200, answer.text
    ids = server.prompts[answer.headers["x-request-id"]]
    return server.front.text.tokenizer.decode(ids, skip_special_tokens=False)


def events(text: str) -> list[dict[str, Any]]:
    made = []
    for event in text.strip().split("\n\n"):
        name, data = event.split("\n")
        content = json.loads(data.removeprefix("data: "))
        assert name == f"event: {content['type']}"
        made.append(content)
    return made


def test_golden_bytes(serve: Serve) -> None:
    answer = ask(serve(FULL), tools=[ADD], stream=True)
    text = re.sub(r"(resp|msg|fc|rs|call)_[0-9a-f]+", r"\1_ID", answer.text)
    text = re.sub(r'"created_at":\d+', '"created_at":0', text)
    assert text == (Path(__file__).parent / "golden" / "responses.txt").read_text("utf-8")


def test_events_are_numbered_and_end_with_the_response(serve: Serve) -> None:
    server = serve(FULL)
    made = events(ask(server, tools=[ADD], stream=True).text)
    assert [event["sequence_number"] for event in made] == list(range(len(made)))
    assert [event["type"] for event in made[:2]] == ["response.created", "response.in_progress"]
    assert made[-1]["type"] == "response.completed"
    ids = {event["response"]["id"] for event in made if "response" in event}
    assert len(ids) == 1
    done = [event["item"] for event in made if event["type"] == "response.output_item.done"]
    assert done == made[-1]["response"]["output"]
    assert [item["type"] for item in done] == ["reasoning", "message", "function_call"]
    usage = made[-1]["response"]["usage"]
    assert usage["input_tokens_details"] == {"cached_tokens": 3, "cache_write_tokens": 0}
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert "[DONE]" not in made


def test_the_released_client(serve: Serve, connect: Connect) -> None:
    api = connect(serve(FULL))
    whole = api.responses.create(model="m", input="hello", tools=[ADD])
    with api.responses.stream(model="m", input="hello", tools=[ADD]) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_response()
    for response in (whole, streamed):
        assert response.output_text == "Adding."
        assert response.status == "completed"
        assert response.output[-1].type == "function_call"
        assert response.output[-1].arguments == '{"a": 1}'
    assert whole.id != streamed.id


def test_a_round_trip_by_items_and_by_previous_response(serve: Serve, connect: Connect) -> None:
    server = serve(
        {"turn": 0, **FULL},
        {"turn": 1, "match": "let me see.*Adding.*<tool_response>\n5", "text": "It is 5."},
    )
    api = connect(server)
    first = api.responses.create(model="m", input="2+3?", tools=[ADD])
    result: Any = {
        "type": "function_call_output",
        "call_id": first.output[-1].call_id,  # type: ignore[union-attr]
        "output": "5",
    }
    items: Any = [{"role": "user", "content": "2+3?"}, *first.output, result]
    again = api.responses.create(model="m", input=items, tools=[ADD], store=False)
    assert again.output_text == "It is 5."
    short = api.responses.create(
        model="m", input=[result], tools=[ADD], previous_response_id=first.id
    )
    assert short.output_text == "It is 5."
    with pytest.raises(openai.BadRequestError) as caught:
        api.responses.create(model="m", input="x", previous_response_id=again.id)
    assert caught.value.code == "previous_response_not_found"


def test_turns_only_append_to_the_prompt(serve: Serve) -> None:
    server = serve(FULL)
    start = [{"role": "developer", "content": "be"}, {"role": "user", "content": "go"}]
    first = prompt_of(server, start, tools=[ADD])
    output = ask(server, start, tools=[ADD]).json()["output"]
    result = {"type": "function_call_output", "call_id": output[-1]["call_id"], "output": "1"}
    second = prompt_of(server, [*start, *output, result], tools=[ADD])
    assert second.startswith(first)
    assert second[len(first) :].startswith("<think>\nlet me see\n</think>\n\nAdding.\n<tool_call>")


NAMESPACE = {
    "type": "namespace",
    "name": "multi_agent_v1",
    "tools": [{"type": "function", "name": "close_agent", "parameters": {"type": "object"}}],
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "edits",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"},
}


@pytest.mark.parametrize("stream", [False, True])
def test_codex_tools_of_every_kind_come_back_in_their_kind(serve: Serve, stream: bool) -> None:
    calls = [
        {"name": "multi_agent_v1__close_agent", "arguments": {"id": 1}},
        {"name": "apply_patch", "arguments": {"input": "*** Begin"}},
    ]
    server = serve({"match": "start: /x/", "tool_calls": calls})
    tools = [ADD, NAMESPACE, PATCH, {"type": "web_search", "external_web_access": False}]
    answer = ask(server, tools=tools, stream=stream)
    output = events(answer.text)[-1]["response"]["output"] if stream else answer.json()["output"]
    function, custom = output
    assert function["type"] == "function_call"
    assert (function["name"], function["namespace"]) == ("close_agent", "multi_agent_v1")
    assert custom["type"] == "custom_tool_call"
    assert (custom["name"], custom["input"]) == ("apply_patch", "*** Begin")
    lite = [
        {"type": "additional_tools", "role": "developer", "tools": [NAMESPACE, PATCH]},
        {"role": "user", "content": "go"},
    ]
    assert ask(server, lite).json()["output"][0]["namespace"] == "multi_agent_v1"


def test_calls_of_every_kind_can_be_replayed(serve: Serve) -> None:
    server = serve({"text": "ok"})
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
        {
            "type": "function_call",
            "call_id": "1",
            "name": "close_agent",
            "namespace": "multi_agent_v1",
            "arguments": "{}",
        },
        {"type": "function_call", "call_id": "2", "name": "x", "arguments": '{"cmd": "echo hi'},
        {"type": "custom_tool_call", "call_id": "3", "name": "apply_patch", "input": "*** P"},
        {"type": "function_call_output", "call_id": "1", "output": "one"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_image"}]},
        {"type": "custom_tool_call_output", "call_id": "3", "output": "three"},
        {"type": "web_search_call", "id": "ws"},
        {"type": "agent_message", "whatever": 1},
        {"type": "item_reference", "id": "x"},
    ]
    prompt = prompt_of(server, items)
    parts = (
        "go",
        "multi_agent_v1__close_agent",
        "echo hi",
        "*** P",
        "one",
        "[input_image]",
        "three",
    )
    places = [prompt.index(part) for part in parts]
    assert places == sorted(places)
    assert prompt.count("<|im_start|>assistant") == 2


def test_limits_and_failures(serve: Serve) -> None:
    server = serve(
        {"match": "breaks", "tokens": ["a", "b"], "finish": "error"},
        {"match": "busy", "refuse": 429},
        {"text": "one two three"},
        script={"max_model_len": 200},
    )
    cut = ask(server, max_output_tokens=2).json()
    assert cut["status"] == "incomplete"
    assert cut["incomplete_details"] == {"reason": "max_output_tokens"}
    last = events(ask(server, max_output_tokens=2, stream=True).text)[-1]
    assert last["type"] == "response.incomplete"
    failed = events(ask(server, "breaks", stream=True).text)[-1]
    assert failed["type"] == "response.failed"
    assert failed["response"]["error"]["code"] == "rate_limit_exceeded"
    assert re.search(r"try again in [\d.]+s", failed["response"]["error"]["message"])
    for stream in (False, True):
        long = ask(server, "x" * 300, stream=stream)
        assert long.status_code == 400
        assert long.json()["error"]["code"] == "context_length_exceeded"
        busy = ask(server, "busy", stream=stream)
        assert (busy.status_code, busy.headers["retry-after"]) == (429, "1")


def test_the_load_probe_of_codex(serve: Serve) -> None:
    answer = ask(serve({"text": "x"}), "", max_output_tokens=1)
    assert answer.status_code == 200
    assert answer.json()["object"] == "response"


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "banana", "content": "x"}]}, "banana"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
        ({"temperature": 1000}, "temperature"),
        ({"tool_choice": {"type": "function", "name": "nope"}, "tools": [ADD]}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "text.format"),
    ],
)
def test_bad_requests_name_the_field(serve: Serve, fields: dict[str, Any], word: str) -> None:
    answer = serve({"text": "x"}).post("/v1/responses", {"input": "x", **fields})
    assert answer.status_code == 400
    assert word in answer.json()["error"]["message"]


def test_keep_alives_are_events(serve: Serve) -> None:
    server = serve({"text": "late", "prefill_s": 0.8}, keep_alive_s=0.25)
    kinds = [event["type"] for event in events(ask(server, stream=True).text)]
    assert kinds.count("keepalive") >= 2

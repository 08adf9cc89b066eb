"""What holds for the stream of every API: headers, official types, failures: C045, C048 to C052."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anthropic.types
import ollama
import openai.types
import pydantic
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent

Serve = Callable[..., Any]
SAY = [{"role": "user", "content": "go"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
FLAT = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
FIM = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]
NAMED = {"model": "m", "stream": True}
SSE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**NAMED, "messages": SAY, "tools": [TOOL]},
    "/api/v0/chat/completions": {**NAMED, "messages": SAY, "tools": [TOOL]},
    "/v1/completions": {**NAMED, "prompt": "x"},
    "/api/v0/completions": {**NAMED, "prompt": "x"},
    "/v1/fim/completions": {**NAMED, "prompt": "x", "suffix": "y"},
    "/v1/responses": {**NAMED, "input": "x", "tools": [FLAT]},
    "/v1/messages": {
        **NAMED, "max_tokens": 99, "messages": SAY, "tools": [{"name": "add", "input_schema": {}}],
    },
    "/completion": {**NAMED, "prompt": "x"},
    "/infill": {**NAMED, "input_prefix": "x", "input_suffix": "y"},
}  # fmt: skip
NDJSON = {
    "/api/chat": {"model": "m", "messages": SAY, "tools": [TOOL]},
    "/api/generate": {"model": "m", "prompt": "x"},
}
BODIES = SSE | NDJSON
EVERY = pytest.mark.parametrize("path", sorted(BODIES))
FULL = {
    "reasoning": "hm", "text": "Adding “é👍”.",
    "tool_calls": [{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {}}],
}  # fmt: skip


@pytest.fixture(scope="module")
def server(serve_all: Serve) -> Any:
    """Fails in the middle for `breaks`; its vocabulary has fill-in-the-middle tokens."""
    return serve_all(
        {"match": "breaks", "tokens": ["one ", "two "], "finish": "error"},
        {"match": "^never$", "tokens": FIM},
        FULL,
    )


def breaking(path: str) -> dict[str, Any]:
    text = json.dumps(BODIES[path]).replace('"go"', '"breaks"').replace('"x"', '"breaks"')
    return json.loads(text)


def data(answer: Any) -> list[dict[str, Any]]:
    lines = answer.text.split("\n")
    if answer.headers["content-type"] == "application/x-ndjson":
        return [json.loads(line) for line in lines if line]
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


@EVERY
def test_c049_headers_that_proxies_respect(server: Any, path: str) -> None:
    answer = server.post(path, BODIES[path], headers={"accept-encoding": "gzip, br, zstd"})
    assert answer.status_code == 200, answer.text
    kind = "text/event-stream" if path in SSE else "application/x-ndjson"
    assert answer.headers["content-type"].startswith(kind)
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert "content-length" not in answer.headers
    assert "content-encoding" not in answer.headers
    assert "\r" not in answer.text


STREAM_TYPES: dict[str, Any] = {
    "/v1/chat/completions": ChatCompletionChunk,
    "/api/v0/chat/completions": ChatCompletionChunk,
    "/v1/completions": openai.types.Completion,
    "/api/v0/completions": openai.types.Completion,
    "/v1/fim/completions": openai.types.Completion,
    "/v1/responses": ResponseStreamEvent,
    "/v1/messages": anthropic.types.RawMessageStreamEvent,
    "/api/chat": ollama.ChatResponse,
    "/api/generate": ollama.GenerateResponse,
}
WHOLE_TYPES: dict[str, Any] = {
    "/v1/chat/completions": ChatCompletion,
    "/v1/completions": openai.types.Completion,
    "/v1/responses": openai.types.responses.Response,
    "/v1/messages": anthropic.types.Message,
    "/api/chat": ollama.ChatResponse,
    "/api/generate": ollama.GenerateResponse,
}


@pytest.mark.parametrize("path", sorted(STREAM_TYPES))
def test_c052_every_event_is_of_the_official_type(server: Any, path: str) -> None:
    made = data(server.post(path, BODIES[path]))
    assert len(made) > 3
    kind: Any = pydantic.TypeAdapter(STREAM_TYPES[path])
    ids = set()
    for event in made:
        if event.get("type") != "ping":  # the SDK drops these before it looks at types
            kind.validate_python(_ended(event) if "text_completion" in str(event) else event)
        ids |= {event[key] for key in ("id", "model") if key in event}
    assert all(ids)
    if path.endswith("completions"):
        assert all(event["object"] and event["created"] and event["model"] for event in made)
        assert all("index" in event["choices"][0] for event in made)


def _ended(event: dict[str, Any]) -> dict[str, Any]:
    """A completion's chunk as if it were the last: its type is that of whole answers, too."""
    choices = [{**c, "finish_reason": c["finish_reason"] or "stop"} for c in event["choices"]]
    return {**event, "choices": choices}


@pytest.mark.parametrize("path", sorted(WHOLE_TYPES))
def test_whole_answers_are_of_the_official_type(server: Any, path: str) -> None:
    answer = server.post(path, {**BODIES[path], "stream": False})
    assert answer.headers["content-type"] == "application/json"
    assert int(answer.headers["content-length"]) == len(answer.content)
    pydantic.TypeAdapter(WHOLE_TYPES[path]).validate_python(answer.json())


@EVERY
def test_c048_a_failure_in_mid_stream_in_each_apis_own_form(server: Any, path: str) -> None:
    answer = server.post(path, breaking(path))
    assert answer.status_code == 200
    *before, last = data(answer)
    assert "one" in json.dumps(before)
    assert "[DONE]" not in answer.text
    if path in NDJSON:
        assert set(last) == {"error"}
        assert isinstance(last["error"], str)
        assert not any(line["done"] for line in before)
    elif path == "/v1/messages":
        assert answer.text.rstrip().split("\n")[-2] == "event: error"
        assert (last["type"], set(last["error"])) == ("error", {"type", "message"})
        assert "message_stop" not in answer.text
    elif path == "/v1/responses":
        assert last["type"] == "response.failed"
        assert last["response"]["status"] == "failed"
        assert set(last["response"]["error"]) == {"code", "message"}
    else:
        assert set(last["error"]) == {"message", "type", "param", "code"}
        assert '"finish_reason":"stop"' not in answer.text
        assert '"stop":true' not in answer.text
    refused = server.post(path, {**breaking(path), "stream": False})
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("options", [None, {}, {"include_usage": True}])
def test_c045_stream_options_of_a_whole_answer_mean_nothing(
    server: Any, path: str, options: Any
) -> None:
    answer = server.post(path, {**BODIES[path], "stream": False, "stream_options": options})
    assert answer.status_code == 200
    assert answer.json()["usage"]["total_tokens"] > 0


def test_c050_ids_are_unique_and_the_role_comes_once(server: Any) -> None:
    path = "/v1/chat/completions"
    ids = set()
    for _ in range(50):
        made = data(server.post(path, BODIES[path]))
        assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in made}) == 1
        roles = [c["delta"]["role"] for e in made for c in e["choices"] if "role" in c["delta"]]
        assert roles == ["assistant"]
        ids.add(made[0]["id"])
    assert len(ids) == 50

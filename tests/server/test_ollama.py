"""Ollama's API with the released client and on the wire: C018, C034, C114, C115."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import ollama
import pytest

Serve = Callable[..., Any]
Connect = Callable[[Any], ollama.Client]
HELLO = [{"role": "user", "content": "hello"}]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
FULL = {
    "reasoning": "let me see",
    "text": "Adding.",
    "tool_calls": [{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {}}],
}


@pytest.fixture
def connect() -> Iterator[Callable[[Any], ollama.Client]]:
    """Clients that are closed at the end of the test."""
    clients: list[ollama.Client] = []

    def start(server: Any) -> ollama.Client:
        clients.append(ollama.Client(host=server.url))
        return clients[-1]

    yield start
    for client in clients:
        client.close()


def lines(text: str) -> list[dict[str, Any]]:
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def chat(server: Any, **fields: Any) -> Any:
    return server.post("/api/chat", {"model": "scripted:latest", "messages": HELLO, **fields})


def test_streaming_is_the_default_and_ndjson(serve: Serve) -> None:
    answer = chat(serve({"tokens": ["a", "b"]}))
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.headers["cache-control"] == "no-cache"
    made = lines(answer.text)
    assert [line["message"]["content"] for line in made] == ["a", "b", ""]
    assert [line["done"] for line in made] == [False, False, True]
    assert all(line["model"] == "scripted:latest" for line in made)
    assert made[-1]["done_reason"] == "stop"
    assert made[-1]["eval_count"] == 2
    assert made[-1]["prompt_eval_count"] > 5
    for key in ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration"):
        assert isinstance(made[-1][key], int)
    for line in made:
        datetime.fromisoformat(line["created_at"])


def test_the_released_client(serve: Serve, connect: Connect) -> None:
    server = serve(FULL)
    api = connect(server)
    whole = api.chat("scripted", messages=HELLO, tools=TOOLS)
    assert whole.message.content == "Adding."
    assert whole.message.thinking == "let me see"
    calls = [(c.function.name, dict(c.function.arguments)) for c in whole.message.tool_calls or []]
    assert calls == [("add", {"a": 1}), ("add", {})]
    assert whole.done_reason == "stop"
    parts = list(api.chat("scripted", messages=HELLO, tools=TOOLS, stream=True))
    assert "".join(part.message.content or "" for part in parts) == "Adding."
    assert "".join(part.message.thinking or "" for part in parts) == "let me see"
    assert sum(len(part.message.tool_calls or []) for part in parts) == 2
    assert parts[-1].done
    assert [model.model for model in api.list().models] == ["scripted:latest"]
    assert api.show("scripted").capabilities == ["completion", "tools", "thinking"]
    assert api.ps().models[0].context_length == 262144
    assert api.pull("scripted").status == "success"


def test_generate(serve: Serve, connect: Connect) -> None:
    server = serve({"match": "^raw$", "text": "as it is"}, {"match": "system\nS", "text": "both"})
    api = connect(server)
    assert api.generate("scripted", "raw", raw=True).response == "as it is"
    answer = api.generate("scripted", "hi", system="S")
    assert (answer.response, answer.done, answer.done_reason) == ("both", True, "stop")
    parts = list(api.generate("scripted", "hi", system="S", stream=True))
    assert "".join(part.response for part in parts) == "both"
    assert api.generate("scripted", "").done_reason == "load"
    assert api.generate("scripted", "", keep_alive=0).done_reason == "unload"
    assert api.chat("scripted", messages=[]).done_reason == "load"
    assert len(server.engine.played) == 3


def test_options_reach_the_engine(serve: Serve) -> None:
    server = serve({"text": "x"})
    options = {
        "num_ctx": 999999, "num_predict": 7, "temperature": 0.5, "top_k": 3, "top_p": 0.5,
        "min_p": 0.1, "seed": 5, "stop": ["END"], "repeat_penalty": 1.2, "presence_penalty": 1,
        "frequency_penalty": -1, "mirostat": 2,
    }  # fmt: skip
    answer = chat(server, options=options)
    params = server.engine.played[answer.headers["x-request-id"]].params
    assert (params.max_tokens, params.temperature, params.top_k) == (7, 0.5, 3)
    assert (params.top_p, params.min_p, params.seed, params.stop) == (0.5, 0.1, 5, ("END",))
    assert params.repetition_penalty == 1.2
    assert (params.presence_penalty, params.frequency_penalty) == (1, -1)
    unlimited = chat(server, options={"num_predict": -1, "seed": -1})
    params = server.engine.played[unlimited.headers["x-request-id"]].params
    assert params.seed is None
    assert params.max_tokens > 1000


@pytest.mark.parametrize("stream", [False, True])
def test_c018_c034_stops_and_limits(serve: Serve, stream: bool) -> None:
    server = serve({"tokens": ["al", "pha be", "ta gam", "ma omega"]})
    for options, text, reason in (
        ({"stop": ["beta gamma"]}, "alpha ", "stop"),
        ({"num_predict": 2}, "alpha be", "length"),
        ({"num_predict": 4}, "alpha beta gamma omega", "length"),
        ({"num_predict": 5}, "alpha beta gamma omega", "stop"),
    ):
        made = lines(chat(server, options=options, stream=stream).text.rstrip() + "\n")
        assert "".join(line["message"]["content"] for line in made) == text
        assert made[-1]["done_reason"] == reason


def test_a_round_trip_of_tools_without_ids(serve: Serve, connect: Connect) -> None:
    server = serve({"turn": 0, **FULL}, {"turn": 2, "match": "one.*two", "text": "done"})
    api = connect(server)
    first = api.chat("scripted", messages=HELLO, tools=TOOLS)
    messages: list[Any] = [
        *HELLO,
        first.message,
        {"role": "tool", "tool_name": "add", "content": "one"},
        {"role": "tool", "tool_name": "add", "content": "two"},
    ]
    assert api.chat("scripted", messages=messages, tools=TOOLS).message.content == "done"


def test_thinking_on_and_off_reaches_the_template(serve: Serve) -> None:
    template = "{{ enable_thinking }}/{{ reasoning_effort }}"
    server = serve(
        {"match": "^True/high$", "text": "high"}, {"match": "^False/", "text": "off"},
        {"match": "^True/", "text": "on"}, {"text": "unset"}, script={"chat_template": template},
    )  # fmt: skip
    for think, text in ((True, "on"), (False, "off"), ("high", "high"), (None, "unset")):
        assert chat(server, think=think, stream=False).json()["message"]["content"] == text


def test_c114_what_editors_look_for(serve: Serve) -> None:
    server = serve({"text": "x"})
    assert re.fullmatch(r"\d+\.\d+\.\d+", server.get("/api/version").json()["version"])
    (model,) = server.get("/api/tags").json()["models"]
    assert model["name"] == model["model"] == "scripted:latest"
    assert re.fullmatch(r"[0-9a-f]{64}", model["digest"])
    datetime.fromisoformat(model["modified_at"])
    for key in ("format", "family", "families", "parameter_size", "quantization_level"):
        assert key in model["details"]
    assert isinstance(model["size"], int)
    for body in ({"model": "scripted:latest"}, {"name": "scripted"}):
        shown = server.post("/api/show", body).json()
        assert shown["model_info"]["general.architecture"] == "scripted"
        assert shown["model_info"]["scripted.context_length"] == 262144
        assert "tools" in shown["capabilities"]
    for path in ("/api/version", "/api/tags"):
        assert server.request("HEAD", path).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/api/chat", b"{", 400),
        ("/api/chat", b"{}", 400),
        ("/api/chat", b'{"model":"m","messages":[{"role":"banana","content":"x"}]}', 400),
        ("/api/chat", b'{"model":"m","messages":[{"role":"user","images":["AA"]}]}', 400),
        ("/api/chat", b'{"model":"m","messages":[{"role":"user"}],"options":{"top_p":9}}', 400),
        ("/api/generate", b'{"model":"m","prompt":"a","suffix":"b"}', 400),
        ("/api/pull", b'{"model":"llama9"}', 404),
        ("/api/embed", b'{"model":"m","input":"a"}', 400),
    ],
)
def test_c115_errors_are_a_string(serve: Serve, path: str, body: bytes, status: int) -> None:
    answer = serve({"text": "x"}).post(path, content=body)
    assert answer.status_code == status
    assert isinstance(answer.json()["error"], str)


def test_a_failure_in_mid_stream_is_a_line(serve: Serve, connect: Connect) -> None:
    server = serve({"tokens": ["a", "b"], "finish": "error"})
    made = lines(chat(server).text)
    assert isinstance(made[-1]["error"], str)
    with pytest.raises(ollama.ResponseError, match="ends in an error"):
        list(connect(server).chat("scripted", messages=HELLO, stream=True))


def test_empty_lines_of_text_while_nothing_comes(serve: Serve, connect: Connect) -> None:
    server = serve({"text": "late", "prefill_s": 0.8}, keep_alive_s=0.25)
    started = time.monotonic()
    parts = list(connect(server).chat("scripted", messages=HELLO, stream=True))
    assert time.monotonic() - started > 0.7
    assert "".join(part.message.content or "" for part in parts) == "late"
    assert len(parts) > 3

"""The streaming protocol: C045 to C052, golden bytes, errors, keep-alive, closing."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

Serve = Callable[..., Any]
GOLDEN = Path(__file__).parent / "golden"
CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "go"}], "stream": True}


def events(text: str) -> list[str]:
    assert text.endswith("\n\n")
    return text[:-2].split("\n\n")


def data(text: str) -> list[dict[str, Any]]:
    return [json.loads(e[6:]) for e in events(text) if e.startswith("data: {")]


def normal(text: str) -> str:
    """A stream without what differs between two runs."""
    text = re.sub(r"(chatcmpl|cmpl)-[0-9a-f]{32}", r"\1-ID", text)
    text = re.sub(r"call_[0-9a-f]{24}", "call_ID", text)
    text = re.sub(r'"created":\d+', '"created":0', text)
    text = re.sub(r'"created_at":"[^"]*"', '"created_at":"T"', text)
    return re.sub(r'("\w+_(?:duration|ms|per_second)"):[\d.e+-]+', r"\1:0", text)


TOOLS = [{"type": "function", "function": {"name": "get_weather"}}]
FULL = {
    "reasoning": "look it up",
    "text": "I see ďábel 👍.",
    "tool_calls": [{"name": "get_weather", "arguments": {"city": "Paris"}}],
}
GOLDEN_STREAMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "chat": (CHAT, {"tokens": ["Hel", "lo\n", "“x”"]}, BODY),
    "chat_usage": (CHAT, {"text": "Hi"}, {**BODY, "stream_options": {"include_usage": True}}),
    "chat_tools": (CHAT, FULL, {**BODY, "tools": TOOLS}),
    "chat_logprobs": (CHAT, {"tokens": ["a"]}, {**BODY, "logprobs": True, "top_logprobs": 1}),
    "completion": (
        "/v1/completions",
        {"tokens": ["a", "b"]},
        {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}},
    ),
    "lm_studio_chat": ("/api/v0/chat/completions", FULL, {**BODY, "tools": TOOLS}),
    "lm_studio_completion": (
        "/api/v0/completions", {"tokens": ["a", "b"]}, {"prompt": "x", "stream": True}
    ),
    "ollama_chat": (
        "/api/chat", FULL, {"model": "scripted", "messages": BODY["messages"], "tools": TOOLS}
    ),
    "ollama_generate": (
        "/api/generate", {"reasoning": "hm", "text": "a b“"},
        {"model": "scripted", "prompt": "x"},
    ),
    "llamacpp_completion": (
        "/completion", {"tokens": ["a", "b"]}, {"prompt": "x", "n_predict": 9, "stream": True}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(GOLDEN_STREAMS))
def test_golden_bytes(serve: Serve, name: str) -> None:
    path, reply, body = GOLDEN_STREAMS[name]
    answer = serve(reply).post(path, body)
    assert "\r" not in answer.text
    assert normal(answer.text) == (GOLDEN / f"{name}.txt").read_text("utf-8")


@pytest.mark.parametrize(
    ("options", "is_wanted"),
    [
        ({}, False),
        ({"stream_options": None}, False),
        ({"stream_options": {}}, False),
        ({"stream_options": {"include_usage": False}}, False),
        ({"stream_options": {"include_usage": True}}, True),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_c045_usage_only_when_asked(
    serve: Serve, path: str, options: dict[str, Any], is_wanted: bool
) -> None:
    body = {**BODY, "prompt": "go", **options}
    answer = serve({"text": "one two"}).post(path, body)
    made = data(answer.text)
    with_usage = [chunk for chunk in made if chunk.get("usage")]
    assert len(with_usage) == is_wanted
    if is_wanted:
        assert made[-1]["choices"] == []
        assert made[-1]["usage"]["total_tokens"] > 0
    assert all(chunk["choices"] for chunk in made if not chunk.get("usage"))


ENDINGS = {
    "eos": ({"text": "a b"}, {}, "stop"),
    "stop string": ({"text": "a b"}, {"stop": "b"}, "stop"),
    "held back": ({"text": "a b"}, {"stop": " bc"}, "stop"),
    "length": ({"text": "a b c"}, {"max_tokens": 2}, "length"),
    "no token": ({"tokens": []}, {}, "stop"),
    "tool call": ({"tool_calls": [{"name": "f"}]}, {"tools": TOOLS}, "tool_calls"),
}


@pytest.mark.parametrize("name", sorted(ENDINGS))
def test_c046_one_finish_reason_then_done(serve: Serve, name: str) -> None:
    reply, fields, reason = ENDINGS[name]
    answer = serve(reply).post(CHAT, {**BODY, **fields})
    choices = [chunk["choices"][0] for chunk in data(answer.text)]
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons[-1] == reason
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    assert choices[-1]["delta"] == {}
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert events(answer.text)[-1] == "data: [DONE]"


def test_c016_streamed_text_equals_the_whole_text(serve: Serve) -> None:
    server = serve({"tokens": ["Sky", " is", " red", "?\n"], "repeat": False})
    for fields in ({"stop": ["\n"]}, {"stop": ["?\n\n"]}, {"stop": ["?\nX"], "max_tokens": 4}):
        streamed = server.post(CHAT, {**BODY, **fields})
        text = "".join(c["choices"][0]["delta"].get("content", "") for c in data(streamed.text))
        whole = server.post(CHAT, {**BODY, **fields, "stream": False}).json()
        assert text == whole["choices"][0]["message"]["content"]
        assert text.startswith("Sky is red?")


def test_c047_headers_at_once_and_comments_in_silence(serve: Serve) -> None:
    server = serve({"text": "late", "prefill_s": 1.5}, keep_alive_s=0.3)
    started = time.monotonic()
    with httpx2.stream("POST", server.url + CHAT, json=BODY, timeout=10) as answer:
        assert time.monotonic() - started < 1.0
        text = "".join(answer.iter_text())
    comments = [event for event in events(text) if event.startswith(":")]
    assert 2 <= len(comments) <= 6
    assert text.index(": keep-alive") < text.index('"content":"late"')
    whole = server.chat()
    assert ": keep-alive" not in whole.text


def test_c048_a_failure_before_the_first_token_is_a_status(serve: Serve) -> None:
    server = serve({"tokens": [], "finish": "error"})
    for stream in (False, True):
        answer = server.chat(stream=stream)
        assert answer.status_code == 503
        assert answer.json()["error"]["message"]
        assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_c048_a_failure_in_mid_stream_is_an_error_event(serve: Serve, path: str) -> None:
    server = serve({"tokens": ["a", "b"], "finish": "error"})
    answer = server.post(path, {**BODY, "prompt": "x"})
    last = data(answer.text)[-1]
    assert set(last["error"]) == {"message", "type", "param", "code"}
    assert 'finish_reason":"stop' not in answer.text
    assert "[DONE]" not in answer.text
    assert server.post(path, {**BODY, "prompt": "x", "stream": False}).status_code == 503


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_c049_headers_that_proxies_respect(serve: Serve, path: str) -> None:
    answer = serve({"text": "a"}).post(path, {**BODY, "prompt": "x"})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert "content-length" not in answer.headers
    assert "content-encoding" not in answer.headers


def test_c050_c052_every_chunk_has_the_same_id_and_all_keys(serve: Serve) -> None:
    server = serve({"text": "a b c"})
    answer = server.post(CHAT, BODY)
    made = data(answer.text)
    assert {chunk["id"] for chunk in made} == {"chatcmpl-" + answer.headers["x-request-id"]}
    for chunk in made:
        assert chunk["object"] == "chat.completion.chunk"
        assert chunk["model"] == "scripted"
        assert chunk["created"] > 0
        assert chunk["choices"][0]["index"] == 0
    assert server.post(CHAT, BODY).headers["x-request-id"] != answer.headers["x-request-id"]


def test_c051_the_connection_is_free_after_the_last_token(serve: Serve) -> None:
    server = serve({"text": "a"})
    with httpx2.Client(timeout=5) as client:
        for _ in range(3):
            answer = client.post(server.url + CHAT, json=BODY)
            assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(("status", "reply"), [(429, {"refuse": 429}), (503, {"refuse": 503})])
@pytest.mark.parametrize("stream", [False, True])
def test_a_busy_engine_is_a_status_with_retry_after(
    serve: Serve, status: int, reply: dict[str, Any], stream: bool
) -> None:
    answer = serve({**reply, "retry_after": 2.2}).chat(stream=stream)
    assert answer.status_code == status
    assert answer.headers["retry-after"] == "3"


def test_closing_ends_open_streams_with_an_error(serve: Serve) -> None:
    server = serve({"tokens": ["x"], "repeat": True, "delay_s": 0.05})
    with httpx2.stream("POST", server.url + CHAT, json=BODY, timeout=10) as answer:
        lines = answer.iter_lines()
        next(lines)
        started = time.monotonic()
        server.begin_stop(0.3)
        rest = "\n".join(lines)
    assert "shutting down" in rest
    assert time.monotonic() - started < 2
    assert server.has_stopped(5)


@pytest.mark.parametrize(
    ("key", "present", "absent"),
    [
        ("reasoning_content", {"reasoning_content"}, {"reasoning"}),
        ("reasoning", {"reasoning"}, {"reasoning_content"}),
        ("both", {"reasoning", "reasoning_content"}, set()),
        ("inline", set(), {"reasoning", "reasoning_content"}),
    ],
)
def test_reasoning_stands_under_the_key_that_was_chosen(
    serve: Serve, key: str, present: set[str], absent: set[str]
) -> None:
    server = serve({"reasoning": "look it up", "text": "Yes, so."}, reasoning_key=key)
    whole = server.chat().json()["choices"][0]["message"]
    deltas = [c["choices"][0]["delta"] for c in data(server.chat(stream=True).text)]
    streamed = {name: "".join(d.get(name) or "" for d in deltas) for name in (*present, "content")}
    for found in (whole, streamed):
        assert {found[name] for name in present} <= {"look it up"}
        is_inline = key == "inline"
        assert found["content"] == ("<think>\nlook it up\n</think>\n\n" * is_inline) + "Yes, so."
    assert not any(name in delta for delta in [whole, *deltas] for name in absent)

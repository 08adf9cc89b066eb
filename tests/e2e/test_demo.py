"""The product as a user starts it: `mlx-cb serve demo`, the official client, many at once."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import openai
import psutil
import pytest

from tests.e2e.server import Server

NEAR_TIE = 1e-4
WORDS = ["river", "stone", "window", "garden", "letter", "market", "bridge", "winter", "candle"]


@pytest.fixture(scope="module")
def demo() -> Iterator[Server]:
    server = Server("demo")
    yield server
    server.stop()


def chat(demo: Server, prompt: str, max_tokens: int, **fields: Any) -> list[tuple[str, list[Any]]]:
    """Streamed (token text, top alternatives) of a greedy chat."""
    stream = demo.client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        max_tokens=max_tokens,
        stream=True,
        logprobs=True,
        top_logprobs=2,
        **fields,
    )
    entries = []
    for chunk in stream:
        if chunk.choices and chunk.choices[0].logprobs:
            entries += [(e.token, e.top_logprobs) for e in chunk.choices[0].logprobs.content or []]
    return entries


def near_ties(got: list[tuple[str, list[Any]]], wanted: list[tuple[str, list[Any]]]) -> int:
    """Assert equal tokens, up to one place where two candidates are within NEAR_TIE."""
    for (token, _), (other, top) in zip(got, wanted, strict=False):
        if token != other:
            gap = top[0].logprob - top[1].logprob
            assert gap <= NEAR_TIE, f"{token!r} instead of {other!r}, {gap} apart"
            return 1
    assert len(got) == len(wanted)
    return 0


def test_sixteen_streams_equal_their_solo_runs(
    demo: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """Acceptance a, C001: different prompts of about 10 to 600 tokens, all at once."""
    rng = random.Random(0)
    prompts = [
        f"Repeat the marker ZEBRA-{index:02}. "
        + " ".join(rng.choices(WORDS, k=round(4 * 1.36**index)))
        for index in range(16)
    ]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda prompt: chat(demo, prompt, 16), prompts))
    alone = [chat(demo, prompt, 16) for prompt in prompts]
    ties = sum(near_ties(a, b) for a, b in zip(together, alone, strict=True))
    with capsys.disabled():
        print(f"\n16 streams equal their solo runs; near-ties: {ties}")
    assert ties <= 2
    for index, entries in enumerate(together):
        text = "".join(token for token, _ in entries)
        assert not set(re.findall(r"ZEBRA-\d\d", text)) - {f"ZEBRA-{index:02}"}
    steps = demo.get("/status/steps?last=500")
    steps = steps["steps"] if isinstance(steps, dict) else steps
    assert any(step["rows_decode"] and step["rows_prefill"] for step in steps)


def test_status_names_what_serves(demo: Server) -> None:
    status = demo.get("/status")
    info = status["model_info"]
    assert info["blas"].startswith("openblas") or sys.platform == "darwin"
    assert info["attention"] in {"reference", "metal"}
    assert status["blocks"]["used"] == 0
    response = demo.client.chat.completions.with_raw_response.create(
        model="demo", messages=[{"role": "user", "content": "hi"}], max_tokens=3
    )
    story = demo.get(f"/status/requests/{response.headers['x-request-id']}")
    assert story["finish_reason"] in {"length", "stop"}
    stages = [event["what"] for event in story["events"]]
    assert stages[:4] == ["queued", "admitted", "chunk", "first token"]


USAGE_OF: dict[str, tuple[dict[str, Any], str, str]] = {
    "/v1/chat/completions": (
        {"max_tokens": 3, "stream_options": {"include_usage": True}},
        "prompt_tokens", "prompt_tokens_details",
    ),
    "/v1/responses": ({"max_output_tokens": 3}, "input_tokens", "input_tokens_details"),
    "/v1/messages": ({"max_tokens": 3}, "input_tokens", "cache_read_input_tokens"),
}  # fmt: skip


def used(demo: Server, path: str, text: str, *, stream: bool) -> tuple[int, int]:
    """Tokens of the whole prompt, and how many of them were cached, as this route tells them."""
    fields, prompt_key, cached_key = USAGE_OF[path]
    key = "input" if path == "/v1/responses" else "messages"
    body = {**fields, key: [{"role": "user", "content": text}], "stream": stream}
    answer = httpx2.post(demo.url + path, json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    made = [answer.json()] if not stream else [
        json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {")
    ]  # fmt: skip
    told = [event.get("usage") or event.get("response", {}).get("usage") for event in made]
    usage = next(one for one in reversed(told) if one)
    cached = usage[cached_key]
    if isinstance(cached, dict):
        return usage[prompt_key], cached["cached_tokens"]
    return usage[prompt_key] + cached, cached  # Anthropic's input_tokens are without the cached


def test_c120_usage_tells_what_was_cached(demo: Server) -> None:
    text = "Add these: " + " ".join(str(number) for number in range(100, 260))
    size, cached = used(demo, "/v1/chat/completions", text, stream=False)
    assert size > 500
    assert cached < 64  # no more than the template's own beginning
    for path in USAGE_OF:
        for stream in (False, True):
            prompt, cached = used(demo, path, text, stream=stream)
            assert prompt == size
            assert size - 64 < cached < size
    other = "Multiply " + text
    body = {"messages": [{"role": "user", "content": other}], "stream": True, "ignore_eos": True}
    with httpx2.stream("POST", demo.url + "/v1/chat/completions", json=body, timeout=120) as answer:
        next(line for line in answer.iter_lines() if '"content":"' in line and "role" not in line)
    prompt, cached = used(demo, "/v1/messages", other, stream=True)
    assert prompt - 64 < cached < prompt


def test_worker_killed_under_streams_three_times(demo: Server) -> None:
    """Acceptance h over HTTP: an error in every stream within a second, then service again."""

    def stream(index: int) -> tuple[float, str]:
        try:
            for _ in demo.client.chat.completions.create(
                model="demo",
                messages=[{"role": "user", "content": f"Tell story {index}."}],
                max_tokens=400,
                stream=True,
                extra_body={"ignore_eos": True},
            ):
                pass
        except openai.APIError as error:
            return time.monotonic(), str(error)
        return time.monotonic(), "ended as if nothing had happened"

    for _ in range(3):
        with ThreadPoolExecutor(8) as pool:
            streams = [pool.submit(stream, index) for index in range(8)]
            while demo.get("/status")["requests"]["decoding"] < 8:
                time.sleep(0.1)
            os.kill(demo.get("/status")["worker_pid"], signal.SIGKILL)
            killed = time.monotonic()
            for future in streams:
                ended, message = future.result(30)
                assert ended - killed < 1.0
                assert "engine" in message
        assert httpx2.get(demo.url + "/health").status_code == 503
        deadline = time.monotonic() + 60
        while httpx2.get(demo.url + "/health").status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        answer = demo.client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "hi"}], max_tokens=2
        )
        assert answer.usage is not None


@pytest.mark.parametrize("with_signal", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_open_streams(with_signal: int) -> None:
    server = Server("demo")
    worker = server.get("/status")["worker_pid"]
    body = {
        "messages": [{"role": "user", "content": "Tell a story."}],
        "stream": True,
        "max_tokens": 2000,
        "ignore_eos": True,
    }
    with (
        httpx2.Client(timeout=30) as client,
        client.stream("POST", server.url + "/v1/chat/completions", json=body) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        assert server.stop(with_signal) < 5
        rest = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "error" in rest[-1]
    assert server.process.returncode == (130 if with_signal == signal.SIGINT else 0)
    assert not psutil.pid_exists(worker)
    assert "Traceback" not in "".join(server.lines)

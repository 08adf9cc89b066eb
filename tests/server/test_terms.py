"""Class, time and caps of a request, in every dialect: headers, refusals by name, clean ends.

Overload kinds of reference/cases.md that the front answers for: C094.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from mlx_cb.errors import Overloaded
from tests.server.conftest import LiveServer

Serve = Callable[..., LiveServer]
MESSAGES = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 50}

#: Path, body, and where the answer says why it ended.
DIALECTS: dict[str, tuple[dict[str, Any], Callable[[dict[str, Any]], Any], Any]] = {
    "/v1/chat/completions": (MESSAGES, lambda a: a["choices"][0]["finish_reason"], "length"),
    "/v1/completions": (
        {"prompt": "hello", "max_tokens": 50}, lambda a: a["choices"][0]["finish_reason"], "length",
    ),
    "/v1/responses": (
        {"input": "hello", "max_output_tokens": 50},
        lambda a: a["incomplete_details"]["reason"], "max_output_tokens",
    ),
    "/v1/messages": (MESSAGES, lambda a: a["stop_reason"], "max_tokens"),
    "/api/chat": (
        {"model": "m", "messages": MESSAGES["messages"], "stream": False},
        lambda a: a["done_reason"], "length",
    ),
    "/api/generate": (
        {"model": "m", "prompt": "hello", "stream": False}, lambda a: a["done_reason"], "length",
    ),
    "/completion": ({"prompt": "hello", "n_predict": 50}, lambda a: a["stop_type"], "limit"),
}  # fmt: skip


def error_text(answer: httpx2.Response) -> str:
    """The sentence, wherever the dialect has it."""
    error = answer.json()["error"]
    return str(error if isinstance(error, str) else error["message"])


@pytest.mark.parametrize("path", DIALECTS)
def test_a_request_whose_time_is_over_ends_with_what_it_has(serve: Serve, path: str) -> None:
    body, reason, wanted = DIALECTS[path]
    server = serve({"tokens": ["x "], "repeat": True, "delay_s": 0.05})
    began = time.monotonic()
    answer = server.post(path, body, headers={"x-request-timeout": "0.6"})
    assert answer.status_code == 200
    assert reason(answer.json()) == wanted
    assert "x x" in answer.text
    assert time.monotonic() - began < 2.4, "fifty tokens take longer"
    (played,) = server.engine.played.values()
    assert played.finish_reason == "deadline"


@pytest.mark.parametrize("path", DIALECTS)
def test_a_request_whose_time_is_over_before_its_first_token(serve: Serve, path: str) -> None:
    server = serve({"text": "x", "prefill_s": 30.0}, request_timeout_s=0.2)
    answer = server.post(path, DIALECTS[path][0])
    assert answer.status_code == 408
    assert "0.2 s" in error_text(answer)
    assert "another try goes on from there" in error_text(answer)


def test_streams_end_cleanly_too(serve: Serve) -> None:
    server = serve({"tokens": ["x "], "repeat": True, "delay_s": 0.05})
    answer = server.post(
        "/v1/chat/completions", MESSAGES | {"stream": True}, headers={"x-request-timeout": "0.5"}
    )
    assert '"finish_reason":"length"' in answer.text
    assert answer.text.rstrip().endswith("[DONE]")


@pytest.mark.parametrize("value", ["", "0", "-1", "soon", "nan", "inf", "1e9"])
def test_bad_times_are_named(serve: Serve, value: str) -> None:
    server = serve({"text": "a"})
    answer = server.post("/v1/chat/completions", MESSAGES, headers={"x-request-timeout": value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-request-timeout"


@pytest.mark.parametrize("path", DIALECTS)
def test_the_class_reaches_the_engine(serve: Serve, path: str) -> None:
    server = serve({"text": "a"})
    for value, rank in (("batch", 1), ("Interactive", 0)):
        answer = server.post(path, DIALECTS[path][0], headers={"x-request-class": value})
        assert answer.status_code == 200
        assert list(server.engine.played.values())[-1].standing.rank == rank
    wrong = server.post(path, DIALECTS[path][0], headers={"x-request-class": "vip"})
    assert wrong.status_code == 400
    assert "x-request-class" in error_text(wrong)


@pytest.mark.parametrize("path", DIALECTS)
def test_a_prompt_above_the_cap_is_refused_and_the_cap_named(serve: Serve, path: str) -> None:
    server = serve({"text": "a"}, max_input_tokens=1)
    answer = server.post(path, DIALECTS[path][0])
    assert answer.status_code == 400
    assert "--max-input-tokens of this server" in error_text(answer)
    assert not server.engine.played


def test_an_answer_above_the_cap_is_refused_and_one_without_a_wish_is_cut(serve: Serve) -> None:
    server = serve({"text": "a b c d e f"}, max_output_tokens=3)
    answer = server.chat(max_tokens=4)
    assert answer.status_code == 400
    assert "--max-output-tokens of this server" in error_text(answer)
    cut = server.chat().json()
    assert cut["choices"][0]["finish_reason"] == "length"
    assert cut["usage"]["completion_tokens"] == 3
    assert server.chat(max_tokens=2).status_code == 200


def test_what_can_never_fit_is_a_400_at_once(serve: Serve) -> None:
    server = serve({"text": "a"}, script={"max_model_len": 40})
    answer = server.chat("word " * 100)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert not server.engine.played


@pytest.mark.parametrize("path", DIALECTS)
def test_c094_a_users_queue_has_an_end(serve: Serve, path: str) -> None:
    """Beyond it 429 with Retry-After, in the dialect's words, and nothing of it starts."""
    server = serve({"text": "a"}, max_queued_per_user=2)
    server.post("/admin/users/local/pause")
    codes: list[int] = []

    def ask() -> None:
        with httpx2.Client(timeout=60) as client:
            codes.append(client.post(server.url + path, json=DIALECTS[path][0]).status_code)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 20
    while len(server.engine.played) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for _ in range(2):
        refused = server.post(path, DIALECTS[path][0])
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert int(refused.headers["retry-after-ms"]) >= 1
        assert "--max-queued-per-user of this server" in error_text(refused)
    assert len(server.engine.played) == 2
    server.post("/admin/users/local/resume")
    for thread in threads:
        thread.join()
    assert codes == [200, 200]
    server.wait_until_idle(20)
    assert server.post(path, DIALECTS[path][0]).status_code == 200


@pytest.mark.parametrize("path", DIALECTS)
def test_an_overloaded_engine_is_a_429_before_anything_is_encoded(
    serve: Serve, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve({"text": "a"})

    def full(user: str, standing: Any) -> None:
        raise Overloaded("about 90 s of work is waiting", retry_after=12.3)

    monkeypatch.setattr(server.engine, "check_admission", full)
    monkeypatch.setattr(server.front, "encode", None)
    answer = server.post(path, DIALECTS[path][0])
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "13"
    assert answer.headers["retry-after-ms"] == "12300"
    assert "90 s of work" in error_text(answer)

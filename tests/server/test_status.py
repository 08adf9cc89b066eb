"""Health, status, metrics, listings, bad bodies: C066, C067, C075 to C080."""

from __future__ import annotations

import gzip
import json
import logging
import time
import zlib
from collections.abc import Callable
from typing import Any

import brotli
import pytest

from mlx_cb.server.compression import zstd

Serve = Callable[..., Any]
CHAT = "/v1/chat/completions"


def test_health_follows_the_engine(serve: Serve) -> None:
    server = serve({"text": "a"})
    assert server.get("/health").json() == {"status": "ok"}
    server.engine._is_ready = False  # as when the worker has died
    answer = server.get("/health")
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    refused = server.chat()
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert server.get("/v1/models").status_code == 200
    server.engine._is_ready = True
    assert server.get("/health").status_code == 200


def test_every_response_has_an_id_that_explains_it(serve: Serve) -> None:
    server = serve({"text": "one two"})
    answer = server.chat()
    known = server.get(f"/status/requests/{answer.headers['x-request-id']}").json()
    assert known["num_tokens"] == 2
    assert known["finish_reason"] == "stop"
    for path in ("/health", "/status", "/metrics", "/nowhere", "/v1/models"):
        assert len(server.get(path).headers["x-request-id"]) == 32
    assert server.get("/status/requests/unknown").status_code == 404


def test_status_and_steps(serve: Serve) -> None:
    server = serve({"text": "a"})
    status = server.get("/status").json()
    assert status["ready"] is True
    assert status["model"] == "scripted"
    assert server.get("/status/steps?last=5").json() == {"steps": []}
    for last in ("0", "-1", "x", "99999"):
        answer = server.get(f"/status/steps?last={last}")
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "last"


def test_metrics_count_what_happened(serve: Serve) -> None:
    server = serve({"text": "one two three", "cached_tokens": 4})
    server.chat()
    server.chat(max_tokens=1)
    server.chat(temperature=-1)
    text = server.get("/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["mlx_cb:generation_tokens_total"]) == 4
    assert float(values["mlx_cb:prefix_cache_hits_total"]) == 8
    assert float(values['mlx_cb:request_success_total{finished_reason="stop"}']) == 1
    assert float(values['mlx_cb:request_success_total{finished_reason="length"}']) == 1
    assert float(values['mlx_cb:request_refused_total{code="invalid_value"}']) == 1
    assert float(values["mlx_cb:time_to_first_token_seconds_count"]) == 2
    assert float(values["mlx_cb:num_requests_running"]) == 0


def test_usage_shows_cached_tokens(serve: Serve) -> None:
    usage = serve({"text": "a", "cached_tokens": 7}).chat().json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 7}


@pytest.mark.parametrize("path", ["/v1/models", "/models"])
def test_c067_the_listing(serve: Serve, path: str) -> None:
    server = serve({"text": "a"}, script={"model": "org/x"}, aliases=(("gpt-4o", "org/x"),))
    listing = server.get(path + "?").json()
    assert listing["object"] == "list"
    assert [model["id"] for model in listing["data"]] == ["org/x", "gpt-4o"]
    for key in ("created", "owned_by", "display_name", "created_at", "max_model_len", "meta"):
        assert key in listing["data"][0]
    assert server.get(path + "/org/x").json()["id"] == "org/x"
    assert server.get(path + "/org/y").status_code == 404


def test_codex_gets_its_catalogue_only_when_it_asks(serve: Serve) -> None:
    server = serve({"text": "a"})
    assert "models" not in server.get("/v1/models").json()
    (entry,) = server.get("/v1/models?client_version=0.171.0").json()["models"]
    assert (entry["slug"], entry["context_window"]) == ("scripted", 262144)
    assert entry["supported_reasoning_levels"] == entry["experimental_supported_tools"] == []


def wait_for(condition: Callable[[], bool]) -> None:
    """A line is logged after its answer was sent, so the client may be the first to be done."""
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.parametrize("log_prompts", [False, True])
def test_c123_what_people_write_is_logged_only_on_request(
    serve: Serve, caplog: pytest.LogCaptureFixture, log_prompts: bool
) -> None:
    server = serve({"text": "the answer"}, log_prompts=log_prompts)
    with caplog.at_level(logging.DEBUG, logger="mlx_cb"):
        server.chat("my secret")
        server.chat("my secret", temperature=-1)
        server.post(CHAT, {"messages": [{"role": "user", "content": [{"type": "my secret"}]}]})
        server.chat("my secret", stream=True)
        wait_for(lambda: caplog.text.count("prompt_tokens=") >= 2)
    assert ("my secret" in caplog.text) == log_prompts
    assert ("the answer" in caplog.text) == log_prompts
    assert "prompt_tokens=" in caplog.text


def test_log_lines_as_json(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    server = serve({"text": "one two"}, log_format="json")
    with caplog.at_level(logging.INFO, logger="mlx_cb.access"):
        answer = server.chat()
        server.get("/health")
        wait_for(lambda: bool(caplog.records))
    (line,) = [json.loads(record.getMessage()) for record in caplog.records]
    assert line["request_id"] == answer.headers["x-request-id"]
    assert (line["status"], line["completion_tokens"], line["path"]) == (200, 2, CHAT)


def test_c066_names_of_the_loaded_model(serve: Serve) -> None:
    aliases = (("gpt-4o", "org/x"),)
    server = serve({"text": "a"}, script={"model": "org/x"}, aliases=aliases, strict_model=True)
    for name in ("org/x", "x", "gpt-4o", None):
        assert server.chat(model=name).status_code == 200
    assert server.chat(model="gpt-4o").json()["model"] == "gpt-4o"
    answer = server.chat(model="other")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    lenient = serve({"text": "a"}, script={"model": "org/x"})
    assert lenient.chat(model="other").json()["model"] == "org/x"


BAD_BODIES = {
    "empty": b"",
    "cut": b'{"messages": [{"role": "user", "content": "a"}',
    "word": b"hello",
    "utf-8": b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
    "lone surrogate": b'{"messages": [{"role": "user", "content": "\\ud83d"}]}',
    "not an object": b"[1, 2]",
    "number": b"7",
    "null": b"null",
    "deep": b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "trailing": b'{"messages": []} {}',
}


@pytest.mark.parametrize("name", sorted(BAD_BODIES))
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_c075_c076_c077_bad_bodies_are_a_400_in_json(serve: Serve, name: str, path: str) -> None:
    server = serve({"text": "a"})
    answer = server.post(path, content=BAD_BODIES[name])
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert server.chat().status_code == 200


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b'{"prompt": "a", "prompt": "b"}', "prompt"),
        (b'{"prompt": "a", "stream_options": {"x": 1, "y": 2, "x": 3}}', "x"),
    ],
)
def test_a_key_given_twice_is_refused_by_name(serve: Serve, body: bytes, name: str) -> None:
    answer = serve({"text": "a"}).post("/v1/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name


def test_c079_size_of_the_body(serve: Serve) -> None:
    server = serve({"text": "a"}, max_body_bytes=3_000_000)
    body = {"prompt": "x", "metadata": {"k": "y" * 2_000_000}}
    assert server.post("/v1/completions", body).status_code == 200
    body["metadata"]["k"] *= 2
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 413
    assert "3000000" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [
        ("gzip", gzip.compress),
        ("deflate", zlib.compress),
        ("br", brotli.compress),
        ("zstd", zstd.compress),
        ("identity", bytes),
    ],
)
def test_c078_compressed_bodies_are_read(
    serve: Serve, encoding: str, pack: Callable[[bytes], bytes]
) -> None:
    server = serve({"text": "a"}, max_body_bytes=10_000)
    headers = {"content-encoding": encoding}
    body = b'{"messages": [{"role": "user", "content": "a"}]}'
    assert server.post(CHAT, content=pack(body), headers=headers).status_code == 200
    huge = pack(b'{"prompt": "' + b"x" * 100_000 + b'"}')
    assert server.post(CHAT, content=huge, headers=headers).status_code == 413
    if encoding != "identity":
        for broken in (body, pack(body)[:-4]):
            answer = server.post(CHAT, content=broken, headers=headers)
            assert answer.status_code == 400
            assert encoding in answer.json()["error"]["message"]


@pytest.mark.parametrize("encoding", ["compress", "rot13"])
def test_c078_other_encodings_are_a_415_that_says_which(serve: Serve, encoding: str) -> None:
    server = serve({"text": "a"})
    answer = server.post(CHAT, content=b"(/\xb5/", headers={"content-encoding": encoding})
    assert answer.status_code == 415
    assert answer.headers["accept-encoding"] == "gzip, deflate, br, zstd"
    assert "compressed" in answer.json()["error"]["message"]


def test_c080_fields_of_others_are_ignored(serve: Serve) -> None:
    server = serve({"text": "a"})
    fields = {
        "user": "u", "store": True, "metadata": {"a": 1}, "service_tier": "x",
        "prompt_cache_key": "k", "cache_prompt": True, "id_slot": -1, "samplers": ["a"],
        "parallel_tool_calls": True, "tools": [], "modalities": ["text"], "whatever": [{}],
    }  # fmt: skip
    assert server.chat(**fields).status_code == 200


def test_unknown_paths_and_methods_are_json(serve: Serve) -> None:
    server = serve({"text": "a"})
    assert server.get("/v1/nope").status_code == 404
    assert server.get("/v1/nope").json()["error"]["code"] == "not_found"
    answer = server.get(CHAT)
    assert answer.status_code == 405
    assert answer.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize("path", ["/chat/completions", "/completions"])
def test_paths_without_v1(serve: Serve, path: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "prompt": "a"}
    assert serve({"text": "a"}).post(path, body).status_code == 200

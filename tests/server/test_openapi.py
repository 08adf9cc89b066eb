"""The API's own description, and a fuzzer that believes it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

Serve = Callable[..., Any]


def test_the_document_has_every_path_and_its_fields(serve: Serve) -> None:
    server = serve({"text": "a"})
    document = server.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    for path in (
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat",
        "/v1/messages/count_tokens", "/api/generate", "/tokenize", "/infill",
    ):  # fmt: skip
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        name = body["schema"]["$ref"].rsplit("/", 1)[1]
        assert document["components"]["schemas"][name]["properties"]
    for path in ("/v1/models", "/v1/models/{name}", "/health", "/status/requests/{request_id}"):
        assert "get" in document["paths"][path]
    schemas = document["components"]["schemas"]
    for path, kind in (
        ("/v1/chat/completions", "ChatCompletion"), ("/v1/messages", "Message"),
        ("/api/chat", "OllamaChat"), ("/v1/embeddings", "EmbeddingList"),
    ):  # fmt: skip
        answers = document["paths"][path]["post"]["responses"]
        found = answers["200"]["content"]["application/json"]["schema"]["$ref"]
        assert found.endswith(kind)
        assert schemas[found.rsplit("/", 1)[1]]["required"]
    refused = document["paths"]["/api/chat"]["post"]["responses"]["400"]["content"]
    assert refused["application/json"]["schema"]["$ref"].endswith("OllamaError")
    page = server.get("/docs")
    assert "/v1/chat/completions" in page.text
    assert "max_completion_tokens" in page.text


@pytest.mark.slow
def test_two_thousand_fuzzed_requests_find_no_failure(serve: Serve, tmp_path: Path) -> None:
    server = serve({"text": "x y"}, script={"max_model_len": 2048})
    checks = (
        "not_a_server_error,status_code_conformance,content_type_conformance,"
        "response_schema_conformance"
    )
    command = [
        str(Path(sys.executable).with_name("schemathesis")), "run", server.url + "/openapi.json",
        "-n", "20", "--checks", checks, "--request-timeout", "10", "--workers", "1",
        "--phases", "coverage,fuzzing", "--seed", "1", "--continue-on-failure",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
    made = re.search(r"([\d,]+) generated", done.stdout)
    assert made is not None, done.stdout[-3000:]
    assert int(made[1].replace(",", "")) >= 2000
    assert server.chat().status_code == 200


REPLY = {
    "reasoning": "hm", "text": "I call.", "tool_calls": [{"name": "add", "arguments": {"a": 1}}],
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
SAY = [{"role": "user", "content": "hello"}]
ANSWERS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": SAY, "tools": TOOLS, "logprobs": True},
    "/v1/completions": {"prompt": "a", "logprobs": 1, "n": 2},
    "/v1/responses": {"input": "a", "tools": [{"type": "function", "name": "add"}]},
    "/v1/messages": {"messages": SAY, "tools": [{"name": "add", "input_schema": {}}]},
    "/v1/messages/count_tokens": {"messages": SAY},
    "/api/chat": {"model": "m", "messages": SAY, "tools": TOOLS, "stream": False},
    "/api/generate": {"model": "m", "prompt": "a", "stream": False},
    "/api/show": {"model": "m"},
    "/completion": {"prompt": "a"},
    "/tokenize": {"content": "a", "with_pieces": True},
    "/detokenize": {"tokens": [65]},
    "/apply-template": {"messages": SAY},
    "/v1/models": {},
    "/api/tags": {},
    "/api/ps": {},
}
REFUSED = {"messages": 3, "prompt": [[]], "input": 3, "model": 3, "content": 3, "tokens": 3}


def test_answers_and_errors_are_what_the_document_says(serve: Serve) -> None:
    server = serve(REPLY)
    document = server.get("/openapi.json").json()

    def check(path: str, answer: Any) -> None:
        (operation,) = document["paths"][path].values()
        content = operation["responses"][str(answer.status_code)]["content"]
        schema = {**content["application/json"]["schema"], "components": document["components"]}
        jsonschema_rs.validate(schema, answer.json())

    for path, body in ANSWERS.items():
        answer = server.post(path, body) if body else server.get(path)
        assert answer.status_code == 200, (path, answer.text)
        check(path, answer)
        if body:
            refused = server.post(path, REFUSED)
            assert refused.status_code == 400, path
            check(path, refused)

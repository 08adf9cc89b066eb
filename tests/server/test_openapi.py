"""The API's own description, and a fuzzer that believes it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    page = server.get("/docs")
    assert "/v1/chat/completions" in page.text
    assert "max_completion_tokens" in page.text


@pytest.mark.slow
def test_two_thousand_fuzzed_requests_find_no_failure(serve: Serve, tmp_path: Path) -> None:
    server = serve({"text": "x y"}, script={"max_model_len": 2048})
    checks = "not_a_server_error,status_code_conformance,content_type_conformance"
    command = [
        str(Path(sys.executable).with_name("schemathesis")), "run", server.url + "/openapi.json",
        "-n", "20", "--checks", checks, "--request-timeout", "10", "--workers", "1",
        "--phases", "coverage,fuzzing", "--seed", "1",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert server.chat().status_code == 200

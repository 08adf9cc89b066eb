"""Errors of every status in the words of the API that was asked, the router's own too: C115."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mlx_cb.server.front import Front

Serve = Callable[..., Any]
SAY = [{"role": "user", "content": "hello"}]
#: One path of each family that takes a body, with a good one, and an unknown path beside it.
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "openai": ("/v1/chat/completions", {"messages": SAY}, "/v1/nope"),
    "responses": ("/v1/responses", {"input": "x"}, "/v1/responses/nope"),
    "anthropic": ("/v1/messages", {"messages": SAY}, "/v1/messages/nope"),
    "counting": ("/v1/messages/count_tokens", {"messages": SAY}, "/v1/messages/batches"),
    "ollama": ("/api/chat", {"model": "m", "messages": SAY}, "/api/push"),
    "ollama's models": ("/api/show", {"model": "m"}, "/api/create"),
    "llama.cpp": ("/tokenize", {"content": "x"}, "/slots"),
    "lm studio": ("/api/v0/chat/completions", {"messages": SAY}, "/api/v0/nope"),
}


def check(name: str, answer: Any, status: int) -> str:
    """The message of an error, after a look at its shape."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    body = answer.json()
    assert "detail" not in body
    if name.startswith("ollama"):
        assert set(body) == {"error"}
        return str(body["error"])
    if name in ("anthropic", "counting"):
        assert (body["type"], set(body["error"])) == ("error", {"type", "message"})
        assert body["request_id"] == answer.headers["x-request-id"]
        is_ours = body["error"]["type"] == "api_error"
        assert is_ours == (status == 500)
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}
    return str(body["error"]["message"])


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_c115_every_status(serve: Serve, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, body, unknown = FAMILIES[name]
    server = serve({"text": "x"}, max_body_bytes=5000, strict_model=True)
    assert unknown in check(name, server.post(unknown, body), 404)
    assert unknown in check(name, server.get(unknown), 404)
    assert path in check(name, server.request("PUT", path, json=body), 405)
    check(name, server.get(path), 405)
    check(name, server.post(path, content=b"{"), 400)
    assert "5000" in check(name, server.post(path, {**body, "x": "y" * 5000}), 413)
    encoding = {"content-encoding": "rot13"}
    assert "rot13" in check(name, server.post(path, content=b"x", headers=encoding), 415)
    if name not in ("llama.cpp", "counting"):
        assert "stranger" in check(name, server.post(path, {**body, "model": "stranger"}), 404)

    def broken(self: Front) -> Any:
        raise RuntimeError("a fault of our own")

    monkeypatch.setattr(Front, "served_name", property(broken))
    monkeypatch.setattr(Front, "text", property(broken))
    failed = server.post(path, {**body, "model": None} if "model" not in body else body)
    message = check(name, failed, 500)
    assert "a fault" not in message
    assert failed.headers["x-request-id"] in message

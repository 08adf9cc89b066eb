"""Which pages and names may reach the server: C068, C070, C073."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Serve = Callable[..., Any]
CHAT = "/v1/chat/completions"
ASKED = "authorization,content-type,x-api-key,anthropic-version,x-stainless-os,x-unknown"
LOCAL = [
    "http://localhost:3000", "https://127.0.0.1", "http://[::1]:8000", "app://obsidian.md",
    "vscode-webview://abc", "tauri://localhost", "chrome-extension://abcdef",
]  # fmt: skip
FOREIGN = ["https://evil.example", "http://localhost.evil.example", "null", "http://localhost:x"]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("localhost:8080", 200), ("127.0.0.1:9", 200), ("[::1]:8080", 200),
        ("[::1]", 200), ("mac.local:8080", 200), ("LOCALHOST", 200), ("evil.example", 403),
        ("evil.example:8080", 403), ("localhost.evil.example", 403), ("", 403),
    ],
)  # fmt: skip
def test_c070_foreign_names_are_refused_on_loopback(serve: Serve, host: str, status: int) -> None:
    server = serve({"text": "a"})
    assert server.get("/v1/models", headers={"host": host}).status_code == status
    answer = server.post(
        CHAT, {"messages": [{"role": "user", "content": "a"}]}, headers={"host": host}
    )
    assert answer.status_code == status
    assert bool(server.engine.played) == (status == 200)


def test_c070_a_server_for_the_network_takes_every_name_but_wants_a_key(serve: Serve) -> None:
    server = serve({"text": "a"}, host="0.0.0.0")
    for path, status in (("/health", 200), ("/v1/models", 401)):
        assert server.get(path, headers={"host": "mac.example"}).status_code == status


@pytest.mark.parametrize(
    ("bound", "host", "status"),
    [
        ("127.0.0.1", "mac.example", 200), ("127.0.0.1", "evil.example", 403),
        ("127.0.0.1", "192.0.2.7", 403), ("0.0.0.0", "mac.example:1", 200),
        ("0.0.0.0", "192.0.2.7:1", 200), ("0.0.0.0", "evil.example", 403),
        ("0.0.0.0", "mac.local", 200),
    ],
)  # fmt: skip
def test_c070_names_that_the_operator_allows(
    serve: Serve, bound: str, host: str, status: int
) -> None:
    server = serve({"text": "a"}, host=bound, allowed_hosts=("mac.example",))
    assert server.get("/health", headers={"host": host}).status_code == status


def test_a_configured_site_may_read_and_no_other(serve: Serve) -> None:
    server = serve({"text": "a"}, allowed_origins=("https://a.example",))
    for origin, is_allowed in (("https://a.example", True), ("https://b.example", False)):
        answer = server.get("/v1/models", headers={"origin": origin})
        assert ("access-control-allow-origin" in answer.headers) == is_allowed


@pytest.mark.parametrize("origin", [*FOREIGN, "https://127.0.0.1.evil.example"])
@pytest.mark.parametrize("path", [CHAT, "/api/chat", "/v1/messages"])
def test_another_sites_post_is_refused_before_any_work(
    serve: Serve, origin: str, path: str
) -> None:
    server = serve({"text": "a"})
    body = b'{"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 5}'
    headers = {"origin": origin, "content-type": "text/plain"}  # needs no preflight
    assert server.post(path, content=body, headers=headers).status_code == 403
    assert not server.engine.played
    headers["origin"] = server.url
    assert server.post(path, content=body, headers=headers).status_code == 200


@pytest.mark.parametrize("origin", LOCAL)
@pytest.mark.parametrize("path", [CHAT, "/v1/models"])
def test_c068_c073_preflights_of_local_pages(serve: Serve, origin: str, path: str) -> None:
    server = serve({"text": "a"})
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": ASKED,
        "access-control-request-private-network": "true",
    }
    answer = server.request("OPTIONS", path, headers=headers)
    assert answer.status_code == 204
    assert answer.headers["access-control-allow-origin"] == origin
    assert answer.headers["access-control-allow-headers"] == ASKED
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-private-network"] == "true"
    assert answer.headers["vary"] == "Origin"
    assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize("origin", FOREIGN)
def test_c073_other_pages_may_not_read(serve: Serve, origin: str) -> None:
    server = serve({"text": "a"})
    headers = {"origin": origin, "access-control-request-method": "POST"}
    for answer in (
        server.request("OPTIONS", CHAT, headers=headers),
        server.get("/v1/models", headers={"origin": origin}),
    ):
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("stream", [False, True])
def test_local_pages_may_read_answers_and_errors(serve: Serve, stream: bool) -> None:
    server = serve({"text": "a"})
    headers = {"origin": LOCAL[0]}
    for body in ({"messages": [{"role": "user", "content": "a"}], "stream": stream}, {}):
        answer = server.post(CHAT, body, headers=headers)
        assert answer.headers["access-control-allow-origin"] == LOCAL[0]
        assert "x-request-id" in answer.headers["access-control-expose-headers"]

"""Who may talk to the server: which Host names, which web pages.

A server on loopback without keys trusts every program of this machine, but not every web page in
its browser: a page elsewhere is kept out by its `Origin`, and one that points its own name at
127.0.0.1 (DNS rebinding) by its `Host`. Keys are checked here too once there are any.
"""

from __future__ import annotations

import re
import socket

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_cb.errors import Forbidden
from mlx_cb.server.dialects.openai_wire import encode, error_object
from mlx_cb.server.streaming import Whole, send_whole

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_LOCAL_ENDINGS = (".localhost", ".local", ".internal")
# Pages of this machine, and the frames in which desktop programs show theirs.
_LOCAL_ORIGIN = re.compile(
    r"(https?://(localhost|127\.0\.0\.1|\[::1\]|[a-z0-9-]+\.localhost)(:\d+)?"
    r"|(app|file|tauri|vscode-webview|vscode-file|chrome-extension|moz-extension)://.*)\Z"
)
_METHODS = b"GET, POST, DELETE, OPTIONS"
_EXPOSED = b"x-request-id, retry-after"


class Guard:
    """ASGI middleware: checks Host and Origin, answers preflights."""

    def __init__(self, app: ASGIApp, bound_host: str) -> None:
        self._app = app
        self._is_loopback = bound_host in _LOOPBACK
        self._own_name = socket.gethostname().lower()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        host = _without_port(headers.get(b"host", b"").decode("latin-1"))
        if self._is_loopback and not self._is_own(host):
            error = Forbidden(f"the Host {host!r} is not this machine; use localhost")
            await send_whole(send, Whole(encode(error_object(error)), error.status))
            return
        origin = headers.get(b"origin")
        if origin is None:
            await self._app(scope, receive, send)
            return
        is_allowed = _LOCAL_ORIGIN.match(origin.decode("latin-1")) is not None
        if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
            await _answer_preflight(send, headers, origin if is_allowed else None)
            return
        await self._app(scope, receive, _allowing(send, origin) if is_allowed else send)

    def _is_own(self, host: str) -> bool:
        name = host.lower()
        return name in _LOOPBACK or name == self._own_name or name.endswith(_LOCAL_ENDINGS)


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if ":" in host else host


def _allowing(send: Send, origin: bytes) -> Send:
    """Let the page of this origin read the answer."""
    allowed = [
        (b"access-control-allow-origin", origin),
        (b"access-control-expose-headers", _EXPOSED),
        (b"vary", b"Origin"),
    ]

    async def send_allowed(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *allowed]
        await send(message)

    return send_allowed


async def _answer_preflight(send: Send, headers: dict[bytes, bytes], origin: bytes | None) -> None:
    answer: list[tuple[bytes, bytes]] = [(b"vary", b"Origin")]
    if origin is not None:
        answer += [
            (b"access-control-allow-origin", origin),
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-max-age", b"600"),
        ]
        if asked := headers.get(b"access-control-request-headers"):
            answer.append((b"access-control-allow-headers", asked))
        if headers.get(b"access-control-request-private-network") == b"true":
            answer.append((b"access-control-allow-private-network", b"true"))
    await send({"type": "http.response.start", "status": 204, "headers": answer})
    await send({"type": "http.response.body", "body": b""})

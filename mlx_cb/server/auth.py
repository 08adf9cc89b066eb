"""Which Host names and which web pages may talk to the server. Knows nothing about keys' holders.

A server on loopback without keys trusts every program of this machine, but not every web page in
its browser: a page elsewhere is kept out by its `Origin`, and one that points its own name at
127.0.0.1 (DNS rebinding) by its `Host`. A foreign page's POST is refused before any work unless it
carries a key in a header, which no page can send without our leave: so what a browser adds by
itself (Basic, cookies) is worth nothing to another site.
"""

from __future__ import annotations

import ipaddress
import re
import socket

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_cb.config import ServerConfig
from mlx_cb.errors import Forbidden
from mlx_cb.server import dialects
from mlx_cb.server.streaming import send_whole

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_LOCAL_ENDINGS = (".localhost", ".local", ".internal")
# Pages of this machine, and the frames in which desktop programs show theirs.
_LOCAL_ORIGIN = re.compile(
    r"(https?://(localhost|127\.0\.0\.1|\[::1\]|[a-z0-9-]+\.localhost)(:\d+)?"
    r"|(app|file|tauri|vscode-webview|vscode-file|chrome-extension|moz-extension)://.*)\Z"
)
_METHODS = b"GET, POST, DELETE, OPTIONS"
_EXPOSED = b"x-request-id, retry-after"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Guard:
    """ASGI middleware: checks Host and Origin, answers preflights."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._is_loopback = is_loopback(config.host)
        self._hosts = frozenset(name.lower() for name in config.allowed_hosts)
        self._origins = frozenset(config.allowed_origins)
        self._own_name = socket.gethostname().lower()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        host = _without_port(headers.get(b"host", b"").decode("latin-1"))
        if not self._takes(host):
            error = Forbidden(f"the Host {host!r} is not this machine; use localhost")
            await _refuse(scope, send, error)
            return
        given = headers.get(b"origin")
        if given is None:
            await self._app(scope, receive, send)
            return
        origin = given.decode("latin-1")
        is_allowed = _LOCAL_ORIGIN.match(origin) is not None or origin in self._origins
        if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
            await _answer_preflight(send, headers, given if is_allowed else None)
            return
        if not (is_allowed or scope["method"] in _SAFE or _may_act(origin, headers)):
            error = Forbidden("a page of another site may not use this server")
            await _refuse(scope, send, error)
            return
        await self._app(scope, receive, _allowing(send, given) if is_allowed else send)

    def _takes(self, host: str) -> bool:
        """Off loopback the key keeps strangers out, so names are checked only if some are set."""
        name = host.lower()
        if name in self._hosts or not (self._is_loopback or self._hosts):
            return True
        if name in _LOOPBACK or name == self._own_name or name.endswith(_LOCAL_ENDINGS):
            return True
        return not self._is_loopback and _is_address(name)


def _is_address(name: str) -> bool:
    """An address is no name that someone else could point here."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _may_act(origin: str, headers: dict[bytes, bytes]) -> bool:
    """Our own page, or a program with a key in a header that no foreign page can set."""
    if origin.partition("://")[2].encode("latin-1") == headers.get(b"host", b"").lower():
        return True
    has_bearer = headers.get(b"authorization", b"").lower().startswith(b"bearer ")
    return has_bearer or b"x-api-key" in headers


async def _refuse(scope: Scope, send: Send, error: Forbidden) -> None:
    scope["state"]["user"] = "-"
    request_id = scope["state"]["request_id"]
    await send_whole(send, dialects.error_answer(scope["path"], error, request_id))


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

"""Outermost layer of the app: gives every request its id, writes one log line per request.

The id is the engine's request id too, so `/status/requests/{x-request-id}` explains an answer.
Never logs prompts or answers.
"""

from __future__ import annotations

import logging
import time
import uuid
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_log = logging.getLogger("mlx_cb.access")
_QUIET = frozenset({"/health", "/metrics", "/admin/state"})  # asked every few seconds by probes


class AccessLog:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, log_format: str) -> None:
        self._app = app
        self._as_json = log_format == "json"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        state = scope.setdefault("state", {})
        request_id = state["request_id"] = uuid.uuid4().hex
        header = (b"x-request-id", request_id.encode())
        status = 499  # nginx's number for a client that left before the status line

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], header]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if _log.isEnabledFor(logging.INFO) and not _is_quiet(scope, status):
                self._write(scope, status, time.monotonic() - started)

    def _write(self, scope: Scope, status: int, seconds: float) -> None:
        line: dict[str, Any] = {
            "request_id": scope["state"]["request_id"],
            "user": scope["state"].get("user", "-"),
            "client": (scope.get("client") or ("-",))[0],
            "method": scope["method"],
            "path": scope.get("raw_path", b"").decode("latin-1"),
            "status": status,
            "seconds": round(seconds, 4),
        }
        generation = scope["state"].get("generation")
        if generation is not None:
            usage, first = generation.usage, generation.first_token_s
            line |= {
                "prompt_tokens": usage.prompt_tokens,
                "cached_tokens": usage.cached_tokens,
                "completion_tokens": usage.completion_tokens,
                "first_token_s": None if first is None else round(first, 4),
            }
        if self._as_json:
            _log.info("%s", msgspec.json.encode(line).decode())
        else:
            _log.info("%s", " ".join(f"{key}={value}" for key, value in line.items()))


def _is_quiet(scope: Scope, status: int) -> bool:
    is_probe = scope["path"] in _QUIET and status in (200, 503)
    return is_probe or (scope["method"] == "HEAD" and status < 400)

"""Headers on every answer that keep browsers from misunderstanding or framing it.

An answer's own value of a header stands: pages bring their own content security policy.
"""

from __future__ import annotations

import base64
import hashlib
import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_DEFAULTS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"cache-control", b"no-store"),
)
_INLINE = re.compile(r"<(style|script)[^>]*>(.*?)</\1>", re.DOTALL)


class SafeHeaders:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = list(message["headers"])
                names = {name.lower() for name, _ in given}
                message["headers"] = given + [one for one in _DEFAULTS if one[0] not in names]
            await send(message)

        await self._app(scope, receive, send_safely)


def inline_policy(document: str) -> str:
    """A content security policy for one document that carries all its styles and scripts itself.

    They are named by their hashes, so that nothing else runs; it may ask its own server only.
    """
    hashes: dict[str, list[str]] = {"style": [], "script": []}
    for kind, text in _INLINE.findall(document):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    sources = [f"{kind}-src {' '.join(found)}" for kind, found in hashes.items() if found]
    rest = "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'"
    return "; ".join(["default-src 'none'", *sources, rest, "frame-ancestors 'none'"])

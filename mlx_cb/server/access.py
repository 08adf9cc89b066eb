"""Who calls, and whether he may: finds the key in the headers, checks the route's right.

Owns the table of rights. Puts the `User` into the request's state as `account` and his name as
`user`, which becomes the engine's user: fairness and the prefix cache's salt go by it. A key is
never logged, nor any part of one.
"""

from __future__ import annotations

import base64
import binascii
import logging

from starlette.types import ASGIApp, Receive, Scope, Send

from mlx_cb.errors import Forbidden, MlxCbError, Overloaded, Unauthorized
from mlx_cb.server import dialects
from mlx_cb.server.answering import error_headers
from mlx_cb.server.keys import Keys, digest
from mlx_cb.server.rate import Attempts
from mlx_cb.server.streaming import Whole, send_whole
from mlx_cb.server.users import LOCAL, Right, User

_log = logging.getLogger("mlx_cb.server")

# Every other path, known or not, is for those who may use the model.
_RIGHTS = {
    "/": Right.PUBLIC,  # the empty page, or only that a server is here
    "/health": Right.PUBLIC,
    "/metrics": Right.ADMIN,
    "/status": Right.ANYONE_KNOWN,
    "/usage": Right.ANYONE_KNOWN,
    "/openapi.json": Right.ANYONE_KNOWN,
    "/docs": Right.ANYONE_KNOWN,
}
_RIGHTS_BELOW = (
    ("/static/", Right.PUBLIC),  # the pages' files, the same for everyone
    ("/status/", Right.ANYONE_KNOWN),
    ("/admin", Right.ADMIN),
)


def right_of(path: str) -> Right:
    """What a path asks of its caller."""
    if (right := _RIGHTS.get(path)) is not None:
        return right
    for start, right in _RIGHTS_BELOW:
        if path.startswith(start):
            return right
    return Right.INFERENCE


def presented_keys(headers: dict[bytes, bytes]) -> list[bytes]:
    """Keys in the headers, in the order in which they are tried; an empty one is none.

    `Authorization: Bearer KEY`, `x-api-key: KEY`, and Basic with the key as password (or as user
    name without a password), which is what browsers and `curl -u` can send.
    """
    found = []
    scheme, _, value = headers.get(b"authorization", b"").strip().partition(b" ")
    if scheme.lower() == b"bearer":
        found.append(value.strip())
    elif scheme.lower() == b"basic":
        try:
            name, _, password = base64.b64decode(value.strip(), validate=True).partition(b":")
            found.append(password or name)
        except binascii.Error:
            found.append(value.strip())  # counts as a wrong key
    found.append(headers.get(b"x-api-key", b"").strip())
    return [key for key in found if key]


class KeyCheck:
    """ASGI middleware. Without `keys` everyone is the one local user."""

    def __init__(self, app: ASGIApp, keys: Keys | None, always: bool) -> None:
        """`always`: a key is needed even while the file has none (off loopback)."""
        self._app = app
        self._keys = keys
        self._always = always
        self._attempts = Attempts()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        right = right_of(scope["path"])
        state = scope["state"]
        state["user"] = "-"
        try:
            user = self._who(scope, right)
            if user is not None:
                user.check(right)
        except MlxCbError as error:
            await _refuse(scope, send, error)
            return
        if user is not None:
            state["user"], state["account"] = user.name, user
        await self._app(scope, receive, send)

    def _who(self, scope: Scope, right: Right) -> User | None:
        """The caller; None for a stranger on a public path. Raises Unauthorized, Overloaded."""
        if not self._always and (self._keys is None or not self._keys.ever_had_any):
            return LOCAL
        if right is Right.PUBLIC:
            return None
        presented = presented_keys(dict(scope["headers"]))
        if not presented:
            raise Unauthorized(
                "this server needs a key: send it as Authorization: Bearer KEY or x-api-key: KEY"
            )
        address = (scope.get("client") or ("-",))[0]
        for key in presented:
            if (user := self._try(address, key)) is not None:
                return user
        raise Unauthorized("this key is not known here, or has expired; ask who runs the server")

    def _try(self, address: str, key: bytes) -> User | None:
        """Whom the key stands for. Raises Overloaded while this address guesses too much."""
        hashed = digest(key)
        if wait := self._attempts.wait(address, hashed):
            raise Overloaded("too many wrong keys came from this address", retry_after=wait)
        user = self._keys.find(key) if self._keys is not None else None
        if user is None:
            self._attempts.failed(address, hashed)
            _log.warning("a wrong key came from %s", address)
            return None
        self._attempts.passed(address, hashed)
        return user


async def _refuse(scope: Scope, send: Send, error: MlxCbError) -> None:
    made = dialects.error_answer(scope["path"], error, scope["state"]["request_id"])
    headers = error_headers(error)
    if not isinstance(error, (Forbidden, Overloaded)):
        headers = (*headers, (b"www-authenticate", _challenge(scope)))
    await send_whole(send, Whole(made.body, made.status, made.media_type, headers))


def _challenge(scope: Scope) -> bytes:
    """Basic makes a browser ask the person, which is right for pages and wrong for scripts."""
    headers = dict(scope["headers"])
    is_page = headers.get(b"sec-fetch-mode") == b"navigate"
    return b'Basic realm="mlx-cb"' if is_page else b'Bearer realm="mlx-cb"'

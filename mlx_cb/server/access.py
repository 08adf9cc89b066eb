"""Who calls, and whether he may: finds key or cookie in the headers, checks the route's right.

Owns the table of rights. What a browser adds by itself (a cookie, Basic) counts only for requests
of our own pages. Puts the `User` into the request's state as `account` and his name as
`user`, which becomes the engine's user: fairness and the prefix cache's salt go by it. A key is
never logged, nor any part of one.
"""

from __future__ import annotations

import base64
import binascii

from starlette.types import ASGIApp, Receive, Scope, Send

from mlx_cb.errors import Forbidden, MlxCbError, Unauthorized
from mlx_cb.server import dialects
from mlx_cb.server.answering import error_headers
from mlx_cb.server.cookies import check_body_type, cookie_of, is_foreign, is_own_page
from mlx_cb.server.doors import Doors
from mlx_cb.server.one_document import OneDocument
from mlx_cb.server.streaming import Whole, send_whole
from mlx_cb.server.users import LOCAL, Right, User

SIGN_IN_PAGE = "sign_in/sign-in.html"
_HTML = b"text/html; charset=utf-8"

# Every other path, known or not, is for those who may use the model.
_RIGHTS = {
    "/": Right.PUBLIC,  # the empty page, or only that a server is here
    "/health": Right.PUBLIC,
    "/metrics": Right.ADMIN,
    "/status": Right.ANYONE_KNOWN,
    "/usage": Right.ANYONE_KNOWN,
    "/openapi.json": Right.ANYONE_KNOWN,
    "/docs": Right.ANYONE_KNOWN,
    "/sign-in": Right.PUBLIC,  # whoever comes here has yet to say who he is
    "/sign-out": Right.ANYONE_KNOWN,
    "/account": Right.ANYONE_KNOWN,
    "/account/key": Right.ANYONE_KNOWN,
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
    """ASGI middleware. Without `doors` everyone is the one local user."""

    def __init__(self, app: ASGIApp, doors: Doors | None, always: bool) -> None:
        """`always`: a key is needed even while the file has none (off loopback)."""
        self._app = app
        self._doors = doors
        self._always = always
        self._page = OneDocument(SIGN_IN_PAGE)

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
            await _refuse(scope, send, error, self._page)
            return
        if user is not None:
            state["user"], state["account"] = user.name, user
        await self._app(scope, receive, send)

    def _who(self, scope: Scope, right: Right) -> User | None:
        """The caller; None for a stranger on a public path.

        Raises Unauthorized, Overloaded, and Forbidden for what a cookie cannot ask.
        """
        doors = self._doors
        if not self._always and (doors is None or not doors.keys.ever_had_any):
            return LOCAL
        if right is Right.PUBLIC:
            return None
        headers = dict(scope["headers"])
        if is_foreign(headers) and headers.get(b"authorization", b"")[:5].lower() == b"basic":
            del headers[b"authorization"]
        presented = presented_keys(headers)
        address = address_of(scope)
        for key in presented:
            record = doors.record_of_key(address, key) if doors is not None else None
            if record is not None:
                return record.user()
        if presented:
            raise Unauthorized(
                "this key is not known here, or has expired; ask who runs the server"
            )
        if doors is not None and (user := _signed_in(doors, scope, headers)) is not None:
            return user
        raise Unauthorized(
            "this server needs a key: send it as Authorization: Bearer KEY or x-api-key: KEY"
        )


def _signed_in(doors: Doors, scope: Scope, headers: dict[bytes, bytes]) -> User | None:
    """Whose browser this is; None without a cookie that counts. Raises Forbidden."""
    token = cookie_of(headers, scope["scheme"] == "https")
    if token is None or not is_own_page(scope["method"], headers):
        return None
    user = doors.sign_ins.user_of(token)
    if user is not None:
        check_body_type(scope["method"], headers)
    return user


def address_of(scope: Scope) -> str:
    """Where a request comes from."""
    return str((scope.get("client") or ("-",))[0])


async def _refuse(scope: Scope, send: Send, error: MlxCbError, page: OneDocument) -> None:
    """The error in the words of the path's dialect; to a person at a browser a page that helps."""
    headers = error_headers(error)
    if isinstance(error, Unauthorized):
        # Not Basic: browsers would ask for a name and password before they show the page.
        headers = (*headers, (b"www-authenticate", b'Bearer realm="mlx-cb"'))
    if isinstance(error, Unauthorized | Forbidden) and _opens_a_page(scope):
        headers = (*headers, (b"content-security-policy", page.policy.encode()))
        await send_whole(send, Whole(page.text.encode(), error.status, _HTML, headers))
        return
    made = dialects.error_answer(scope["path"], error, scope["state"]["request_id"])
    await send_whole(send, Whole(made.body, made.status, made.media_type, headers))


def _opens_a_page(scope: Scope) -> bool:
    """Whether a person opens an address in a browser, rather than a program asking."""
    headers = dict(scope["headers"])
    if scope["method"] != "GET":
        return False
    if (mode := headers.get(b"sec-fetch-mode")) is not None:
        return bool(mode == b"navigate")
    # Browsers say the mode by TLS and on loopback only. No program asks for XHTML.
    return b"application/xhtml+xml" in headers.get(b"accept", b"")

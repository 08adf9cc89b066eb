"""`/sign-in`, `/sign-out` and `/account`: how a person's browser comes in, and out again.

Takes a key, or a link's secret, and gives a cookie. Knows neither how sign-ins are kept nor what
the pages look like.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from mlx_cb.errors import Forbidden, InvalidRequest, Unauthorized
from mlx_cb.server import keys
from mlx_cb.server.access import SIGN_IN_PAGE, address_of
from mlx_cb.server.body import ClientGone, decode_json, read_body
from mlx_cb.server.cookies import cookie_of, is_foreign, set_cookie
from mlx_cb.server.doors import Doors
from mlx_cb.server.front import Front
from mlx_cb.server.keys import digest
from mlx_cb.server.links import Entered, LinkError, NeedsName, Waits
from mlx_cb.server.one_document import OneDocument
from mlx_cb.server.sign_ins import HOLDS_S
from mlx_cb.server.users import User

_LARGEST_BODY = 4096
_log = logging.getLogger("mlx_cb.server")
Body = TypeVar("Body", bound=msgspec.Struct)


class SignInBody(msgspec.Struct, forbid_unknown_fields=True):
    """One of: a key; a link's secret, with a name if it asks for one; a wish's secret."""

    key: str | None = None
    link: str | None = None
    name: str | None = None
    asking: str | None = None


class SignOutBody(msgspec.Struct, forbid_unknown_fields=True):
    """`everywhere` ends the sign-ins of this person's other browsers too."""

    everywhere: bool = False


class NewKeyBody(msgspec.Struct, forbid_unknown_fields=True):
    """Says that the asker knows what it does: the key before ends, and other browsers' sign-ins."""

    ends_the_old_one: bool


def routes(front: Front) -> list[BaseRoute]:
    """The routes of people's browsers."""
    return [*_coming_and_going(front), *_account_routes(front)]


def _coming_and_going(front: Front) -> list[BaseRoute]:
    document = OneDocument(SIGN_IN_PAGE)

    async def page(request: Request) -> Response:
        """The page on which a person says who he is."""
        return document.answer(request)

    async def sign_in(request: Request) -> Response:
        """Give a browser its cookie for a key or a link."""
        body = await _read(request, SignInBody)
        if sum(given is not None for given in (body.key, body.link, body.asking)) != 1:
            raise InvalidRequest("give exactly one of key, link and asking", param="key")
        doors = _doors(front)
        if body.key is not None:
            return await _by_key(request, doors, body.key)
        if body.asking is not None:
            entered = await asyncio.to_thread(doors.links.ask_again, body.asking)
            return _waiting() if entered is None else _come_in(request, entered)
        assert body.link is not None
        return await _by_link(request, doors, body.link, body.name)

    async def sign_out(request: Request) -> Response:
        """Take the cookie back, and what it stands for."""
        body = await _read(request, SignOutBody)
        token = cookie_of(dict(request.scope["headers"]), _is_secure(request))
        if front.doors is not None and body.everywhere:
            out = front.doors.sign_ins.sign_out_everywhere
            await asyncio.to_thread(out, _account(request).name)
        elif front.doors is not None and token is not None:
            await asyncio.to_thread(front.doors.sign_ins.sign_out, token)
        return Response(status_code=204, headers={"set-cookie": _no_cookie(request)})

    return [
        Route("/sign-in", page),
        Route("/sign-in", sign_in, methods=["POST"]),
        Route("/sign-out", sign_out, methods=["POST"]),
    ]


def _account_routes(front: Front) -> list[BaseRoute]:
    async def account(request: Request) -> Response:
        """Who one is here, and what one may."""
        user, doors = _account(request), front.doors
        shown = {
            "user": user.name,
            "admin": user.is_admin,
            "may_infer": user.may_infer,
            "has_key": doors is not None and doors.keys.record_of(user.name) is not None,
            "daily_tokens": user.daily_tokens,
            "max_running": user.max_running,
        }
        return JSONResponse(shown)

    async def new_key(request: Request) -> Response:
        """A new key for this person's programs, shown this once; the old one ends."""
        body = await _read(request, NewKeyBody)
        doors, user = _doors(front), _account(request)
        if not body.ends_the_old_one:
            raise InvalidRequest("a new key always ends the old one", param="ends_the_old_one")
        if doors.keys.record_of(user.name) is None:
            raise InvalidRequest("whoever needs no key here has none to be made anew")
        made = await asyncio.to_thread(keys.rotate, doors.keys.path, user.name)
        record = doors.keys.record_of(user.name)
        assert record is not None
        # All sign-ins by the old key ended with it; this browser comes in by the new one.
        token = await asyncio.to_thread(doors.sign_ins.sign_in, record)
        answer = JSONResponse({"key": made})
        return _with_cookie(request, answer, token)

    return [
        Route("/account", account),
        Route("/account/key", new_key, methods=["POST"]),
    ]


async def _by_key(request: Request, doors: Doors, key: str) -> Response:
    record = doors.record_of_key(address_of(request.scope), key.strip().encode())
    if record is None:
        raise Unauthorized("this key is not known here, or has expired; ask who runs the server")
    token = await asyncio.to_thread(doors.sign_ins.sign_in, record)
    return _come_in(request, Entered(record.name, token))


async def _by_link(request: Request, doors: Doors, link: str, name: str | None) -> Response:
    address, hashed = address_of(request.scope), digest(link.encode())
    doors.check_guesses(address, hashed)
    try:
        opened = await asyncio.to_thread(doors.links.open, link, name, address)
    except LinkError:
        doors.wrong(address, hashed, "link")
        raise
    match opened:
        case NeedsName():
            return JSONResponse({"needs": "name"})
        case Waits(secret, code):
            _log.warning(
                "%s at %s asks to be let in; if the number there is %s: mlx-cb keys confirm %s",
                name, address, code, code,
            )  # fmt: skip
            return JSONResponse({"asking": secret, "code": code}, 202)
        case Entered():
            return _come_in(request, opened)


def _waiting() -> Response:
    return JSONResponse({"waiting": True}, 202)


def _come_in(request: Request, entered: Entered) -> Response:
    return _with_cookie(request, JSONResponse({"user": entered.user}), entered.token)


def _with_cookie(request: Request, answer: Response, token: str) -> Response:
    answer.headers["set-cookie"] = set_cookie(token, _is_secure(request), HOLDS_S)
    answer.headers["cache-control"] = "no-store"
    return answer


def _no_cookie(request: Request) -> str:
    return set_cookie("", _is_secure(request), 0)


def _is_secure(request: Request) -> bool:
    return bool(request.scope["scheme"] == "https")


def _account(request: Request) -> User:
    user: User = request.state.account
    return user


def _doors(front: Front) -> Doors:
    if front.doors is None:
        raise InvalidRequest("this server has no keys: everyone on this machine is one user")
    return front.doors


async def _read(request: Request, kind: type[Body]) -> Body:
    """The body. Raises Forbidden for what another site's page could send."""
    if is_foreign(dict(request.scope["headers"])):
        raise Forbidden("only this server's own pages may ask this")
    try:
        body = await read_body(request.scope, request.receive, _LARGEST_BODY)
    except ClientGone as gone:
        raise InvalidRequest("the client went away") from gone
    return decode_json(body, kind)

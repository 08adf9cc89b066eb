"""`/admin` and what its page asks: the state of everything, and letting people in.

What can be done to users, requests and the server has routes of its own. Only admins come here.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from mlx_cb.errors import InvalidRequest
from mlx_cb.server import keys
from mlx_cb.server.body import decode_json, read_body
from mlx_cb.server.doors import Doors
from mlx_cb.server.front import Front
from mlx_cb.server.links import NobodyWaits, address_of
from mlx_cb.server.one_document import OneDocument
from mlx_cb.server.operator_state import OperatorState

_LARGEST_BODY = 4096
_log = logging.getLogger("mlx_cb.server")


class LinkBody(msgspec.Struct, forbid_unknown_fields=True):
    """Whom a link is for; without a name for whoever opens it, once confirmed."""

    name: str | None


def routes(front: Front) -> list[BaseRoute]:
    """The page and its data."""
    watched = OperatorState(front)
    document = OneDocument("admin/admin.html")

    async def page(request: Request) -> Response:
        """The operator's page: everything it needs in one document."""
        return document.answer(request)

    async def state(request: Request) -> Response:
        """All that the page shows, without what it has: `?after=STEP&line=NUMBER&people=1`."""
        given = request.query_params
        content = await watched.now(_number(given, "after"), _number(given, "line"))
        if given.get("people"):
            content["people"] = await watched.people()
        return Response(msgspec.json.encode(content), media_type="application/json")

    async def link(request: Request) -> Response:
        """A link that lets somebody in, with its picture for a phone's camera."""
        body = await read_body(request.scope, request.receive, _LARGEST_BODY)
        name = decode_json(body, LinkBody).name
        doors = _doors(front)
        made = await asyncio.to_thread(_make_link, doors, name)
        _log.info("%s made a link for %s", request.state.account.name, name or "anybody")
        base = doors.sign_ins.url or str(request.base_url).rstrip("/")
        address = address_of(base, made)
        return JSONResponse({"url": address, "picture": await asyncio.to_thread(_qr, address)})

    async def asking(request: Request) -> Response:
        """Let in, or not, who waits with this number."""
        code, verb = request.path_params["code"], request.path_params["verb"]
        if front.doors is None:
            raise NobodyWaits("this server has no keys, so nobody asks to be let in")
        links = front.doors.links
        decide = {"confirm": links.confirm, "refuse": links.refuse}.get(verb)
        if decide is None:
            raise NobodyWaits(f"{verb!r} is neither confirm nor refuse")
        name = await asyncio.to_thread(decide, code)
        _log.info("%s: %s %s", request.state.account.name, verb, name)
        return JSONResponse({"name": name})

    return [
        Route("/admin", page),
        Route("/admin/state", state),
        Route("/admin/links", link, methods=["POST"]),
        Route("/admin/asking/{code}/{verb}", asking, methods=["POST"]),
    ]


def _number(given: Any, name: str) -> int:
    text = given.get(name, "0")
    if not (text.isascii() and text.isdecimal()) or len(text) > 15:
        raise InvalidRequest(f"{name} must be a whole number", param=name)
    return int(text)


def _make_link(doors: Doors, name: str | None) -> str:
    if name is not None and doors.keys.record_of(name) is None:
        keys.add_hidden(doors.keys.path, name)
    return doors.links.make(name)


def _qr(address: str) -> str:
    import segno

    picture: str = segno.make(address, error="l").svg_data_uri(scale=4, border=2)
    return picture


def _doors(front: Front) -> Doors:
    if front.doors is None or not front.doors.keys.ever_had_any:
        raise InvalidRequest("this server has no keys: everyone on this machine is one user")
    return front.doors

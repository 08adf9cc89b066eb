"""What an operator can do to a running server: `/admin/control`, and to users and requests.

`GET /admin/control` shows the control loop: signs, rules, what is in force and why, what was done
before. POSTs need no body and answer with the same: freeze, unfreeze, drain and resume the server;
pause, resume or cancel a user or a request. Knows nothing about how any of it is carried out.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from mlx_cb.engine.interface import Order, Verb
from mlx_cb.errors import MlxCbError
from mlx_cb.server.dialects.openai_wire import error_object
from mlx_cb.server.front import Front

_log = logging.getLogger("mlx_cb.control")

_SERVER_VERBS = {"freeze": Verb.FREEZE, "unfreeze": Verb.UNFREEZE}
_USER_VERBS = {
    "pause": Verb.PAUSE_USER,
    "resume": Verb.RESUME_USER,
    "cancel": Verb.CANCEL_USER,
}
_REQUEST_VERBS = {
    "pause": Verb.PAUSE_REQUEST,
    "resume": Verb.RESUME_REQUEST,
    "cancel": Verb.CANCEL_REQUEST,
}


class _NotFound(MlxCbError):
    status = 404
    code = "not_found"


def control_state(front: Front, status: dict[str, Any]) -> dict[str, Any]:
    """The control's state as `/status` and `/admin/control` show it."""
    return {
        **(status.get("control") or {}),
        "draining": front.is_draining,
        "engine_restarts": status.get("engine_restarts", []),
    }


def routes(front: Front) -> list[BaseRoute]:
    """The operator's routes of one server."""

    async def state() -> Response:
        shown = control_state(front, await front.engine.status())
        return Response(msgspec.json.encode(shown), media_type="application/json")

    async def show(request: Request) -> Response:
        """The control loop: signs, rules, what is in force and why, what was done before."""
        return await state()

    async def on_server(request: Request) -> Response:
        """Freeze or unfreeze the control loop; drain the server (finish, take nothing), resume."""
        verb, by = request.path_params["verb"], request.state.account.name
        if verb in ("drain", "resume"):
            front.is_draining = verb == "drain"
            _log.warning("control: %s by %s", verb, by)
        elif verb in _SERVER_VERBS:
            await front.engine.order(Order(_SERVER_VERBS[verb], by=by))
        else:
            return _unknown(f"{verb!r} is none of freeze, unfreeze, drain, resume")
        return await state()

    async def on_user(request: Request) -> Response:
        """Pause a user (nothing of his goes on), resume him, or cancel all his requests."""
        verb, name = request.path_params["verb"], request.path_params["name"]
        if verb not in _USER_VERBS:
            return _unknown(f"{verb!r} is none of {', '.join(_USER_VERBS)}")
        await front.engine.order(Order(_USER_VERBS[verb], name, request.state.account.name))
        return await state()

    async def on_request(request: Request) -> Response:
        """Pause, resume or cancel one request, all its choices included."""
        verb, own_id = request.path_params["verb"], request.path_params["request_id"]
        if verb not in _REQUEST_VERBS:
            return _unknown(f"{verb!r} is none of {', '.join(_REQUEST_VERBS)}")
        if not await _is_here(front, own_id):
            return _unknown("no request of this id is being answered")
        await front.engine.order(Order(_REQUEST_VERBS[verb], own_id, request.state.account.name))
        return await state()

    post = ["POST"]
    return [
        Route("/admin/control", show),
        Route("/admin/control/{verb}", on_server, methods=post),
        Route("/admin/users/{name}/{verb}", on_user, methods=post),
        Route("/admin/requests/{request_id}/{verb}", on_request, methods=post),
    ]


async def _is_here(front: Front, request_id: str) -> bool:
    known = await front.engine.explain(request_id)
    return known is not None and known.get("finish_reason") is None


def _unknown(message: str) -> Response:
    error = _NotFound(message)
    body = msgspec.json.encode(error_object(error))
    return Response(body, error.status, media_type="application/json")

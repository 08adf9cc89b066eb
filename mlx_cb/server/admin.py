"""What operators and probes read: `/health`, `/status`, the step journal, `/metrics`.

An admin sees everything, a user what `views` leaves of it.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from mlx_cb.server.control_routes import control_state
from mlx_cb.server.front import Front
from mlx_cb.server.users import User
from mlx_cb.server.views import status_for, steps_for, story_for

MOST_STEPS = 4096


def _json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    body = msgspec.json.encode(content)
    return Response(body, status, headers=headers, media_type="application/json")


def routes(front: Front) -> list[BaseRoute]:
    """The status routes of one server."""

    async def health(request: Request) -> Response:
        if front.is_ready:
            return _json({"status": "ok"})
        status = "loading or restarting"
        if front.is_closing or front.is_draining:
            status = "closing" if front.is_closing else "draining"
        return _json({"status": status}, 503, {"retry-after": "1"})

    async def status(request: Request) -> Response:
        user: User = request.state.account
        whole = await front.engine.status()
        engine = status_for(user, whole | {"control": control_state(front, whole)})
        if not user.is_admin:
            return _json({"model": front.served_name, **engine})
        answers = {"open": len(front.open_answers), "closing": front.is_closing}
        settings = msgspec.to_builtins(front.config, enc_hook=str)
        about = {"model": front.served_name, "answers": answers, "settings": settings}
        return _json({**about, **engine})

    async def steps(request: Request) -> Response:
        wanted = request.query_params.get("last", "100")
        if not wanted.isdecimal() or not 1 <= int(wanted) <= MOST_STEPS:
            return _error(f"last must be a number from 1 to {MOST_STEPS}", 400, "last")
        found = await front.engine.steps(int(wanted))
        return _json({"steps": steps_for(request.state.account, front.owners, found)})

    async def one_request(request: Request) -> Response:
        known = await front.engine.explain(request.path_params["request_id"])
        # Another's request is answered as one that never was.
        shown = None if known is None else story_for(request.state.account, known)
        if shown is None:
            return _error("no request of this id is known, or it was forgotten", 404, None)
        return _json(shown)

    async def metrics(request: Request) -> Response:
        engine = await front.engine.status()
        body = front.metrics.exposition(len(front.open_answers), engine)
        return Response(body, media_type="text/plain; version=0.0.4; charset=utf-8")

    return [
        Route("/health", health),
        Route("/status", status),
        Route("/status/steps", steps),
        Route("/status/requests/{request_id}", one_request),
        Route("/metrics", metrics),
    ]


def _error(message: str, status: int, param: str | None) -> Response:
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": None}
    return _json({"error": error}, status)

"""Puts the server together: routes of the dialects, status pages, errors of the router itself."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from mlx_cb.errors import MlxCbError
from mlx_cb.server import (
    admin,
    control_routes,
    dialects,
    openapi,
    operator_routes,
    pages,
    sign_in_routes,
    usage_routes,
)
from mlx_cb.server.access import KeyCheck
from mlx_cb.server.access_log import AccessLog
from mlx_cb.server.answering import error_headers, internal_error
from mlx_cb.server.auth import Guard, is_loopback
from mlx_cb.server.conversations import routes as conversations
from mlx_cb.server.front import Front
from mlx_cb.server.safe_headers import SafeHeaders


class UnknownPath(MlxCbError):
    """Nothing is served here."""

    status = 404
    code = "not_found"


class WrongMethod(MlxCbError):
    """The path is served, but not with this method."""

    status = 405
    code = "method_not_allowed"


def all_routes(front: Front) -> list[BaseRoute]:
    """Every route of the server; the API's description tells of all but itself."""
    described = [
        *pages.routes(pages.WebFiles()),
        *dialects.routes(front),
        *admin.routes(front),
        *usage_routes.routes(front),
        *sign_in_routes.routes(front),
        *operator_routes.routes(front),
        *conversations.routes(front),
        *control_routes.routes(front),
    ]
    return [*described, *openapi.routes(described, dialects.error_type)]


def create_app(front: Front) -> ASGIApp:
    """The ASGI application of one server."""
    app = Starlette(
        routes=all_routes(front),
        exception_handlers={
            HTTPException: _router_error,
            MlxCbError: _own_error,
            Exception: _failure,
        },
    )
    config = front.config
    checked = KeyCheck(app, front.doors, always=not is_loopback(config.host))
    return AccessLog(SafeHeaders(Guard(checked, config)), config.log_format)


async def _router_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods."""
    assert isinstance(error, HTTPException)
    kind = {404: UnknownPath, 405: WrongMethod}.get(error.status_code, MlxCbError)
    made = kind(f"{request.method} {request.url.path}: {error.detail}")
    return _told(request, made, error.status_code, dict(error.headers or {}))


async def _own_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, MlxCbError)
    headers = {name.decode(): value.decode() for name, value in error_headers(error)}
    return _told(request, error, error.status, headers)


async def _failure(request: Request, error: Exception) -> Response:
    """A fault of our own; uvicorn logs it."""
    return _told(request, internal_error(request.scope["state"]["request_id"]), 500, {})


def _told(request: Request, error: MlxCbError, status: int, headers: dict[str, str]) -> Response:
    """An error in the words of the API that the path belongs to."""
    answer = dialects.error_answer(request.url.path, error, request.scope["state"]["request_id"])
    return Response(answer.body, status, headers, media_type=answer.media_type.decode())

"""Puts the server together: routes of the dialects, status pages, errors of the router itself."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
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
from mlx_cb.server.auth import Guard, is_loopback
from mlx_cb.server.conversations import routes as conversations
from mlx_cb.server.dialects.openai_wire import error_object
from mlx_cb.server.front import Front
from mlx_cb.server.safe_headers import SafeHeaders


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
        exception_handlers={HTTPException: _router_error, MlxCbError: _own_error},
    )
    config = front.config
    checked = KeyCheck(app, front.doors, always=not is_loopback(config.host))
    return AccessLog(SafeHeaders(Guard(checked, config)), config.log_format)


async def _router_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, as JSON like every other error."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    message = f"{request.method} {request.url.path}: {error.detail}"
    content = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return JSONResponse({"error": content}, error.status_code, error.headers)


async def _own_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, MlxCbError)
    return JSONResponse(error_object(error), error.status)

"""`/usage`: what one took, as JSON or CSV; an admin sees everyone.

Knows nothing about how usage is kept.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, fields
from datetime import timedelta
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from mlx_cb.errors import Forbidden, InvalidRequest
from mlx_cb.server.front import Front
from mlx_cb.server.usage import Taken, next_day
from mlx_cb.server.users import User

_MOST_DAYS = 3660


def routes(front: Front) -> list[BaseRoute]:
    """The one route."""

    async def usage(request: Request) -> Response:
        """Tokens and seconds by day and user; `?days=30`, `?user=NAME`, `?format=csv`."""
        user: User = request.state.account
        whose = _whose(user, request.query_params.get("user"))
        days = _days(request.query_params.get("days", "30"))
        form = request.query_params.get("format", "json")
        if form not in ("json", "csv"):
            raise InvalidRequest(f"format: {form!r} is neither json nor csv", param="format")
        now = front.accounts.usage.clock()
        first = (now.date() - timedelta(days=days - 1)).isoformat()
        await front.machine_time.look()
        found = await front.accounts.usage.since(first, whose)
        if form == "csv":
            name = f'attachment; filename="usage-{now.date().isoformat()}.csv"'
            headers = {"content-disposition": name}
            return Response(_csv(found), media_type="text/csv; charset=utf-8", headers=headers)
        today: dict[str, Any] = {
            "user": user.name,
            "tokens": await front.accounts.tokens_today(user.name),
            "limit": user.daily_tokens,
            "resets_at": next_day(now).isoformat(timespec="seconds"),
        }
        return JSONResponse({"today": today, "days": [asdict(taken) for taken in found]})

    return [Route("/usage", usage)]


def _whose(user: User, asked: str | None) -> str | None:
    """Whose usage to show; None for everybody's. Raises Forbidden."""
    if user.is_admin:
        return asked
    if asked not in (None, user.name):
        raise Forbidden("only an admin sees what others use")
    return user.name


def _days(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or not 1 <= int(text) <= _MOST_DAYS:
        raise InvalidRequest(f"days must be a number from 1 to {_MOST_DAYS}", param="days")
    return int(text)


def _csv(found: Sequence[Taken]) -> str:
    text = io.StringIO()
    writer = csv.writer(text)
    columns = [field.name for field in fields(Taken)]
    writer.writerow(columns)
    writer.writerows([getattr(taken, column) for column in columns] for taken in found)
    return text.getvalue()

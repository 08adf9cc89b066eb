"""What of the engine's state one user may see: his own requests, and nothing to guess others by.

Counts and times of the whole machine (blocks, cache hits, step numbers, batch sizes) tell what
others do, so only an admin gets them. Knows the shapes of status, journal and stories; no HTTP.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from mlx_cb.server.users import User

_MOST_IDS = 20_000
_ID = re.compile(r"\b[0-9a-f]{32}(-\d+)?\b")


class Owners:
    """Whose request is whose; the oldest are forgotten and then belong to nobody."""

    def __init__(self) -> None:
        self._names: OrderedDict[str, str] = OrderedDict()

    def note(self, request_ids: Iterable[str], user: str) -> None:
        """These requests are this user's."""
        for request_id in request_ids:
            self._names[request_id] = user
        while len(self._names) > _MOST_IDS:
            self._names.popitem(last=False)

    def of(self, request_id: str) -> str | None:
        """The user's name; None for an unknown id."""
        return self._names.get(request_id)


def status_for(user: User, status: dict[str, Any]) -> dict[str, Any]:
    """The engine's status; for a user his own counts only."""
    if user.is_admin:
        return status
    own = status.get("users", {}).get(user.name, {"waiting": 0, "running": 0})
    return {"ready": status.get("ready", False), "user": user.name, "requests": own}


def story_for(user: User, story: dict[str, Any]) -> dict[str, Any] | None:
    """A request's life; None when it is not this user's."""
    if not user.may_see(story.get("user")):
        return None
    if user.is_admin:
        return story
    shown = {key: value for key, value in story.items() if key != "step"}
    if "waiting_for" in shown:
        shown["waiting_for"] = _without_others(str(shown["waiting_for"]))
    if "events" in shown:
        shown["events"] = [
            {
                "time": event["time"],
                "what": event["what"],
                "detail": _without_others(event["detail"]),
            }
            for event in shown["events"]
        ]
    return shown


def steps_for(user: User, owners: Owners, steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The journal; for a user the steps that he took part in, reduced to his own part."""
    if user.is_admin:
        return steps
    shown = (_own_part(user.name, owners, step) for step in steps)
    return [part for part in shown if part is not None]


def _own_part(name: str, owners: Owners, step: dict[str, Any]) -> dict[str, Any] | None:
    part: dict[str, Any] = {
        "decodes": [found for found in step["decodes"] if owners.of(found) == name],
        "prefills": [chunk for chunk in step["prefills"] if owners.of(chunk["request_id"]) == name],
        "admitted": [found for found in step["admitted"] if owners.of(found) == name],
    }
    for key in ("passed_over", "preempted", "finished"):
        part[key] = {
            found: _without_others(str(text))
            for found, text in step[key].items()
            if owners.of(found) == name
        }
    if not any(part.values()):
        return None
    return {"started": step["started"], "seconds": step["seconds"], **part}


def _without_others(text: str) -> str:
    """Reasons name the request that something was done for, which may be anybody's."""
    return _ID.sub("another request", text)

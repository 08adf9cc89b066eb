"""Tool calls in a conversation's history: the part of it in which the APIs agree.

Owns that any arguments which clients replay are taken. Knows nothing about endpoints.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec


class WireFunction(msgspec.Struct):
    """The function that a call in the history names; arguments are whatever clients replay."""

    name: str = ""
    arguments: Any = None


class WireToolCall(msgspec.Struct):
    """A tool call in the history; some clients leave its id out."""

    function: WireFunction
    id: str | None = None


def arguments_object(given: Any) -> Any:
    """An object where possible; agents echo broken JSON as they got it, and that stays text."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            return given if given.strip() else {}
    return given if isinstance(given, dict) else {} if given is None else {"value": given}

"""Tool calls as a parser reads them."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A tool call as the model wrote it; `arguments` is JSON text, `id` the model's own or None."""

    name: str
    arguments: str
    id: str | None = None


# The text between a call's markers to calls; [] when it is none.
ParseCalls = Callable[[str], list[ParsedCall]]


def new_call_id() -> str:
    """An id no other call has."""
    return f"call_{secrets.token_hex(12)}"

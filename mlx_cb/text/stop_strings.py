"""Where a text ends because a stop string appeared in it.

Owns the part of a text that could still become a stop string. Knows nothing about tokens: the
result does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """Text before the stop string, and the stop string."""

    text: str
    stop: str


class StopStrings:
    """Passes text on until one of `stops` is complete."""

    __slots__ = ("_held", "_longest", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def feed(self, text: str) -> str | StopMatch:
        """Text that is safe to show, or the match that ends it."""
        text = self._held + text
        match = self._first_match(text)
        if match is not None:
            self._held = ""
            return match
        keep = self._possible_start(text)
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """The held text: nothing more comes, so it is not a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> StopMatch | None:
        """The match that was complete first, as if the text had come character by character."""
        found = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (found is None or (start + len(stop), start) < found[:2]):
                found = (start + len(stop), start, stop)
        return StopMatch(text[: found[1]], found[2]) if found else None

    def _possible_start(self, text: str) -> int:
        """Index from which `text` is a proper prefix of some stop string, or its length."""
        earliest = len(text)
        for stop in self._stops:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= start < earliest and not stop.startswith(text[start:]):
                start = text.find(stop[0], start + 1)
            if 0 <= start < earliest:
                earliest = start
        return earliest

"""Virtual time: actions happen in order of their time, and nothing takes any in between."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

Action = Callable[[], None]


class VirtualClock:
    """An event queue. Actions at the same instant run in the order they were asked for.

    Attributes:
        now: seconds since the beginning.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Action]] = []
        self._numbers = itertools.count()

    def at(self, time: float, action: Action) -> None:
        """Run the action at this time, or now if that has passed."""
        heapq.heappush(self._events, (max(time, self.now), next(self._numbers), action))

    def after(self, seconds: float, action: Action) -> None:
        """Run the action that much later."""
        self.at(self.now + seconds, action)

    def run(self) -> None:
        """Run until nothing is left to happen."""
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()

"""Owns which request ends when by the clock. Knows nothing about what ending means."""

from __future__ import annotations

import heapq
from itertools import count

from mlx_cb.core.request import Request, RequestStatus


class Deadlines:
    """Requests by the time at which they have to end."""

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._numbers = count()

    def __bool__(self) -> bool:
        return bool(self._heap)

    def add(self, request: Request) -> None:
        """Remember a request's deadline, if it has one."""
        if request.deadline is not None:
            entry = _Entry((request.deadline, next(self._numbers)), request)
            heapq.heappush(self._heap, entry)

    def due(self, now: float) -> list[Request]:
        """Unfinished requests whose time is over; each is named once."""
        found = []
        while self._heap and self._heap[0].order[0] <= now:
            request = heapq.heappop(self._heap).request
            if request.status is not RequestStatus.FINISHED:
                found.append(request)
        return found


class _Entry:
    """A request in the heap, ordered by deadline, then by arrival."""

    __slots__ = ("order", "request")

    def __init__(self, order: tuple[float, int], request: Request) -> None:
        self.order = order
        self.request = request

    def __lt__(self, other: _Entry) -> bool:
        return self.order < other.order

"""The newest values of a measure with whose they are, for percentiles over the last while."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

MOST = 2048
PERCENTS = (50, 95, 99)


class Recent:
    """A bounded ring; the oldest values go when there are too many or they are too old."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._values: deque[tuple[float, float, str]] = deque(maxlen=MOST)
        self._clock = clock

    def add(self, value: float, user: str) -> None:
        """Note a value of now."""
        self._values.append((self._clock(), value, user))

    def percentiles(self, seconds: float) -> dict[str, dict[str, float]]:
        """`p50`, `p95`, `p99` and `count` of the last `seconds`, by user, and of all under ""."""
        since = self._clock() - seconds
        by_user: dict[str, list[float]] = {}
        everyone: list[float] = []
        for at, value, user in self._values:
            if at >= since:
                by_user.setdefault(user, []).append(value)
                everyone.append(value)
        if everyone:
            by_user[""] = everyone
        return {user: _percentiles(values) for user, values in by_user.items()}


def _percentiles(values: list[float]) -> dict[str, float]:
    """Nearest-rank percentiles: each is a value that was measured."""
    values.sort()
    last = len(values) - 1
    found = {f"p{p}": round(values[min(last, len(values) * p // 100)], 5) for p in PERCENTS}
    return {**found, "count": len(values)}

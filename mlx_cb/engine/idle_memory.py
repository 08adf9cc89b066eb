"""Gives memory back while nothing runs: a Mac is used for other things too.

Two steps: soon, most of what the storage grew to in advance; much later, every cached block. Knows
when; `EngineCore` knows how.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from mlx_cb.engine.core import EngineCore

TRIM_AFTER_S = 10.0
RELEASE_AFTER_S = 1800.0


class IdleMemory:
    """Counts from the engine's last step, whatever is asked meanwhile."""

    def __init__(self, core: EngineCore, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._core = core
        self._clock = clock
        self._stages = ((TRIM_AFTER_S, core.trim_memory), (RELEASE_AFTER_S, core.release_memory))
        self._rested_since = core.last_step_time
        self._done = 0

    def wait_s(self) -> float | None:
        """Seconds until something is due; None when there is nothing left to give back."""
        if self._core.last_step_time != self._rested_since:
            self._rested_since, self._done = self._core.last_step_time, 0
        if self._done == len(self._stages):
            return None
        return max(0.0, self._rested_since + self._stages[self._done][0] - self._clock())

    def rest(self) -> None:
        """Do what is due now."""
        while self.wait_s() == 0.0:
            self._stages[self._done][1]()
            self._done += 1

"""Writes down how long each user's rows kept the machine, as the engine measures it.

The engine counts seconds by user since it started; here they become what each took since the last
look. So an answer that was given up while its prompt was read is counted too. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
from typing import Any

from mlx_cb.engine.interface import Engine
from mlx_cb.server.usage import Taken, Usage

EVERY_S = 30.0


class MachineTime:
    """One engine's seconds by user, on their way into `Usage`."""

    def __init__(self, engine: Engine, usage: Usage) -> None:
        self._engine = engine
        self._usage = usage
        self._seen: dict[str, float] = {}
        self._worker: Any = None

    async def run(self) -> None:
        """Look again and again: what a worker that dies has counted since is lost."""
        while True:
            await asyncio.sleep(EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Bring the record up to date; an engine that does not answer is asked next time."""
        self.take(await self._engine.status())

    def take(self, status: dict[str, Any]) -> None:
        """Record what was added since the status before this one."""
        totals: dict[str, float] | None = status.get("machine_seconds")
        if totals is None:
            return
        if status.get("worker_pid") != self._worker:
            self._worker, self._seen = status.get("worker_pid"), {}
        day = self._usage.clock().date().isoformat()
        for user, total in totals.items():
            new = total - self._seen.get(user, 0.0)
            if new > 0.0:
                self._usage.record(Taken(day, user, machine_seconds=new))
                self._seen[user] = total

"""Loads seen by a server that cannot tell users apart."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from mlx_cb.bench.calls import Call, Lane, Plan, Run
from mlx_cb.bench.metrics import Figures
from mlx_cb.bench.workloads.base import Workload

LOCAL = "local"


@dataclass(frozen=True)
class OneUser(Workload):
    """A workload all of whose calls are the same user's: what a server without keys sees."""

    inner: Workload

    def plan(self, seed: int) -> Plan:
        """The inner plan; lanes that shared a queue still share it."""
        plan = self.inner.plan(seed)
        queues: dict[int, deque[Call]] = {}
        for lane in plan.lanes:
            if id(lane.calls) not in queues:
                calls = (replace(call, user=LOCAL) for call in lane.calls)
                queues[id(lane.calls)] = deque(calls)
        return Plan(
            [
                Lane(queues[id(lane.calls)], lane.starts_at_s, lane.starts_when)
                for lane in plan.lanes
            ]
        )

    def figures(self, run: Run) -> Figures:
        """Those of the inner workload."""
        return self.inner.figures(run)

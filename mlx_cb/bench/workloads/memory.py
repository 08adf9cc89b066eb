"""Loads about the KV cache: one prefix for many at once, and more text than memory holds.

Their own figures come from the server's step journal, which only ours keeps.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from mlx_cb.bench.calls import Call, Lane, Plan, Prompt, Run
from mlx_cb.bench.metrics import Figures
from mlx_cb.bench.workloads.base import Workload, seeds, workload
from mlx_cb.bench.workloads.closed import Steady


@workload("shared")
@dataclass(frozen=True)
class Shared(Workload):
    """Calls that begin alike and arrive together: is the prefix computed, and kept, once?

    `block_size` is the server's, to turn its blocks into tokens.
    """

    users: int = 16
    shared: int = 512
    tail: int = 24
    output: int = 24
    block_size: int = 16

    def plan(self, seed: int) -> Plan:
        """One lane per call, all at once."""
        next_seed, system = seeds(seed), seeds(seed + 1)()
        return Plan(
            [
                Lane(
                    deque([Call(Prompt(self.tail, next_seed(), self.shared, system), self.output)])
                )
                for _ in range(self.users)
            ]
        )

    def figures(self, run: Run) -> Figures:
        """Prefilled rows, and blocks at the peak, over what one copy and the tails need."""
        if not run.steps:
            return {}
        rows = sum(step["rows_prefill"] for step in run.steps)
        blocks = max(step["blocks_used"] for step in run.steps)
        tails = self.users * (self.tail + self.output)
        return {
            "prefilled_over_ideal": rows / (self.shared + self.users * self.tail),
            "kv_over_ideal": blocks * self.block_size / (self.shared + tails),
        }


@workload("pressed")
@dataclass(frozen=True)
class Pressed(Steady):
    """As steady, with so much text that a small pool cannot hold it all at once."""

    streams: int = 16
    prompt: int = 192
    output: int = 128

    def figures(self, run: Run) -> Figures:
        """Part of all tokens that were computed more than once."""
        done = [record for record in run.records if record.is_complete]
        total = sum(record.prompt_tokens + record.output_tokens for record in done)
        needed = sum(record.prompt_tokens - record.cached_tokens for record in done)
        if not run.steps or not total:
            return {}
        rows = sum(step["rows_prefill"] for step in run.steps)
        return {"recomputed_share": max(0.0, rows - needed) / total}

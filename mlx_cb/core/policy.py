"""Who gets the prefill rows of a step, and who may join. A policy is one class and a registry row.

Knows requests and the time, nothing about blocks or budgets.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from mlx_cb.core.request import Request


class Policy(Protocol):
    """Orders the requests that want prefill rows, and says when newcomers may be admitted."""

    #: Finished requests keep their row until the whole batch has ended.
    pads_finished: bool

    def order(self, candidates: Iterable[Request], now: float) -> list[Request]:
        """Candidates (half-prefilled, preempted and new), most entitled first."""
        ...

    def may_admit(self, num_running: int) -> bool:
        """Whether a waiting request may join, given how many ran when the step was begun."""
        ...


class FirstComeFirstServed:
    """Requests join at every step, in the order of their arrival."""

    pads_finished = False

    def order(self, candidates: Iterable[Request], now: float) -> list[Request]:
        """By arrival; see Policy."""
        return sorted(candidates, key=lambda request: request.arrival_time)

    def may_admit(self, num_running: int) -> bool:
        """Always; see Policy."""
        return True


class ShortestPrefillFirst:
    """Requests join at every step; the fewest missing tokens first, and waiting makes shorter.

    A long prompt cannot be starved: each second of waiting counts as `aging` tokens less. Source:
    shortest remaining processing time with aging (performance.md §3).
    """

    pads_finished = False

    def __init__(self, aging: float = 50.0) -> None:
        self.aging = aging

    def order(self, candidates: Iterable[Request], now: float) -> list[Request]:
        """By missing tokens less aging; see Policy."""
        return sorted(
            candidates,
            key=lambda request: (
                request.num_uncomputed_tokens - self.aging * (now - request.arrival_time),
                request.arrival_time,
            ),
        )

    def may_admit(self, num_running: int) -> bool:
        """Always; see Policy."""
        return True


class StaticBatch(FirstComeFirstServed):
    """The baseline: a batch is formed when nothing runs, and nobody joins until all have ended."""

    pads_finished = True

    def may_admit(self, num_running: int) -> bool:
        """Only into an empty machine; see Policy."""
        return num_running == 0


POLICIES: dict[str, type[Policy]] = {
    "continuous": ShortestPrefillFirst,
    "fcfs": FirstComeFirstServed,
    "static": StaticBatch,
}

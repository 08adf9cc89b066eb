"""Who gets the prefill rows of a step, and who may join. A policy is one class and a registry row.

Knows requests and the time, nothing about blocks or budgets. `fair` has a file of its own. Under
no policy may a request wait for ever while the machine serves others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from mlx_cb.core.request import Request
from mlx_cb.standing import Standing


class Policy(Protocol):
    """Orders the requests that want prefill rows, and says when newcomers may be admitted."""

    #: Finished requests keep their row until the whole batch has ended.
    pads_finished: bool

    def order(self, candidates: Iterable[Request], now: float, rows_per_s: float) -> list[Request]:
        """Candidates (half-prefilled, preempted and new), most entitled first.

        `rows_per_s` is how fast the machine prefills.
        """
        ...

    def may_admit(self, num_running: int) -> bool:
        """Whether a waiting request may join, given how many ran when the step was begun."""
        ...

    def max_running(self, user: str, max_num_seqs: int) -> int:
        """Most requests of this user that may run at once."""
        ...

    def join(self, user: str, standing: Standing) -> None:
        """A request of this user was accepted."""
        ...

    def leave(self, user: str, standing: Standing) -> None:
        """A request of this user, accepted with this standing, has ended."""
        ...

    def charge(self, user: str, rank: int, seconds: float) -> None:
        """The user's rows of this rank took this much of a step's measured time."""
        ...

    def charged(self, user: str) -> float:
        """What the user was charged, by weight: who has most gives way first."""
        ...


class FirstComeFirstServed:
    """Requests join at every step, in the order of their arrival."""

    pads_finished = False

    def order(self, candidates: Iterable[Request], now: float, rows_per_s: float) -> list[Request]:
        """By arrival; see Policy."""
        return sorted(candidates, key=lambda request: request.arrival_time)

    def may_admit(self, num_running: int) -> bool:
        """Always; see Policy."""
        return True

    def max_running(self, user: str, max_num_seqs: int) -> int:
        """All places; see Policy."""
        return max_num_seqs

    def join(self, user: str, standing: Standing) -> None:
        """Users make no difference; see Policy."""

    def leave(self, user: str, standing: Standing) -> None:
        """Users make no difference; see Policy."""

    def charge(self, user: str, rank: int, seconds: float) -> None:
        """Users make no difference; see Policy."""

    def charged(self, user: str) -> float:
        """The same of everyone; see Policy."""
        return 0.0


class Priority(FirstComeFirstServed):
    """By class, then by the user's weight, then by arrival, whatever was served to whom.

    Each `patience` seconds of waiting are worth a class, so that a newcomer passes only those who
    have not waited that long, and nobody waits for ever.
    """

    def __init__(self, patience: float = 30.0) -> None:
        self.patience = patience

    def order(self, candidates: Iterable[Request], now: float, rows_per_s: float) -> list[Request]:
        """By class less patience, weight and arrival; see Policy."""
        return sorted(
            candidates,
            key=lambda request: (
                request.standing.rank - (now - request.arrival_time) // self.patience,
                -request.standing.weight,
                request.arrival_time,
            ),
        )


class StaticBatch(FirstComeFirstServed):
    """The baseline: a batch is formed when nothing runs, and nobody joins until all have ended."""

    pads_finished = True

    def may_admit(self, num_running: int) -> bool:
        """Only into an empty machine; see Policy."""
        return num_running == 0

"""Who gets the prefill rows of a step, and who may join. A policy is one class and a registry row.

Knows requests and the time, nothing about blocks or budgets.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from mlx_cb.core.request import Request
from mlx_cb.standing import EQUAL, Standing


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

    def max_running(self, user: str, max_num_seqs: int) -> int:
        """Most requests of this user that may run at once."""
        ...

    def join(self, user: str, standing: Standing) -> None:
        """A request of this user was accepted."""
        ...

    def leave(self, user: str) -> None:
        """A request of this user has ended."""
        ...

    def charge(self, user: str, seconds: float) -> None:
        """The user's rows took this much of a step's measured time."""
        ...

    def charged(self, user: str) -> float:
        """What the user was charged, by weight: who has most gives way first."""
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

    def max_running(self, user: str, max_num_seqs: int) -> int:
        """All places; see Policy."""
        return max_num_seqs

    def join(self, user: str, standing: Standing) -> None:
        """Users make no difference; see Policy."""

    def leave(self, user: str) -> None:
        """Users make no difference; see Policy."""

    def charge(self, user: str, seconds: float) -> None:
        """Users make no difference; see Policy."""

    def charged(self, user: str) -> float:
        """The same of everyone; see Policy."""
        return 0.0


class Fair:
    """Requests join at every step; between users, whoever was served least goes first.

    Each user has a counter of measured machine seconds (Sheng et al. 2024, Virtual Token Counter,
    charged in time instead of tokens), divided by the user's weight. A user who comes back starts
    at the least counter of those who are active: idleness is not saved up. Inside a user the
    fewest missing tokens go first, and each second of waiting counts as `aging` tokens less, so
    that no long prompt is starved. A higher rank goes after every lower one, whatever was served.
    """

    pads_finished = False

    def __init__(self, aging: float = 50.0) -> None:
        self.aging = aging
        self.served: dict[str, float] = {}
        self._active: dict[str, int] = {}
        self._standings: dict[str, Standing] = {}

    def order(self, candidates: Iterable[Request], now: float) -> list[Request]:
        """By rank, the users' counters, then by missing tokens less aging; see Policy."""
        return sorted(
            candidates,
            key=lambda request: (
                request.standing.rank,
                self.served.get(request.user, 0.0),
                request.num_uncomputed_tokens - self.aging * (now - request.arrival_time),
                request.arrival_time,
            ),
        )

    def may_admit(self, num_running: int) -> bool:
        """Always; see Policy."""
        return True

    def max_running(self, user: str, max_num_seqs: int) -> int:
        """A part of the places by weight among those of the same or a lower rank; see Policy."""
        own = self._standings[user]
        weights = sum(s.weight for s in self._standings.values() if s.rank <= own.rank)
        return max(1, int(max_num_seqs * own.weight / weights))

    def join(self, user: str, standing: Standing) -> None:
        """Lift the counter of a user who was away; see Policy."""
        if user not in self._active:
            least = min((self.served[name] for name in self._active), default=0.0)
            self.served[user] = max(self.served.get(user, 0.0), least)
        self._active[user] = self._active.get(user, 0) + 1
        self._standings[user] = standing

    def leave(self, user: str) -> None:
        """One request less; see Policy."""
        self._active[user] -= 1
        if not self._active[user]:
            del self._active[user], self._standings[user]

    def charge(self, user: str, seconds: float) -> None:
        """Add to the user's counter; see Policy."""
        weight = self._standings.get(user, EQUAL).weight
        self.served[user] = self.served.get(user, 0.0) + seconds / weight

    def charged(self, user: str) -> float:
        """The user's counter; see Policy."""
        return self.served.get(user, 0.0)


class StaticBatch(FirstComeFirstServed):
    """The baseline: a batch is formed when nothing runs, and nobody joins until all have ended."""

    pads_finished = True

    def may_admit(self, num_running: int) -> bool:
        """Only into an empty machine; see Policy."""
        return num_running == 0


POLICIES: dict[str, type[Policy]] = {
    "continuous": Fair,
    "fcfs": FirstComeFirstServed,
    "static": StaticBatch,
}

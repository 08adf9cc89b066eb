"""The fair policy: machine seconds are shared between users, classes keep their order.

Source: Sheng et al. 2024, Virtual Token Counter (bounded service gap between backlogged users),
charged in measured seconds instead of tokens; performance.md §3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from mlx_cb.core.request import Request, RequestStatus
from mlx_cb.standing import EQUAL, Standing

SHORT = 32  # missing tokens up to which a request counts as short: one quantum of prefill
HEAD_START = 20.0  # seconds of waiting that a short request is ahead of its user's others
AGING = 0.5  # seconds of prefill that a second of waiting is worth
BATCH_FLOOR = 0.05  # part of the machine that work nobody waits for gets in any case
BEHIND = 1.0  # weighted seconds behind all others from which a user's share of places is no limit
CREDIT = 1.0  # weighted seconds that somebody who was away may be behind those who were not
MOST_OWED = 1.0  # seconds that either class may be behind or ahead of the floor


@dataclass(slots=True)
class _Member:
    """A user with unfinished requests: how many of each rank, and what the newest was worth.

    `credit` is what the user was given on joining; `fed` when the user had rows last, on the clock
    of all charged seconds.
    """

    standing: Standing
    credit: float
    fed: float
    ranks: Counter[int] = field(default_factory=Counter)

    @property
    def rank(self) -> int:
        """The most urgent rank among the user's requests."""
        return min(self.ranks)


class Fair:
    """Requests join at every step; between users, whoever was served least goes first.

    Each user has a counter of measured machine seconds, divided by the user's weight. A user who
    comes back starts at the least counter of those who are active, less `CREDIT` for a turn to
    begin with: idleness is not saved up. There is no credit while the least served waits.
    Inside a user the fewest missing tokens go first (those in the prefix cache are not missing),
    and each second of waiting counts as `aging` seconds of prefill less, so that no long prompt is
    starved: others pass it for as long as it takes itself, divided by `aging`; a
    short remainder (an editor's completion, a second turn) has a head start over its user's others.
    A higher rank goes after every lower one, but when it had less than `BATCH_FLOOR` of the
    machine it goes first.
    """

    pads_finished = False

    def __init__(self, aging: float = AGING) -> None:
        self.aging = aging
        self.served: dict[str, float] = {}
        self._members: dict[str, _Member] = {}
        self._weights: dict[int, float] = {}  # sums over the members, by their rank
        self._num_batch = 0
        self._charged = 0.0  # seconds, to all
        self._owed = 0.0  # seconds that the batch class is behind its floor

    def order(self, candidates: Iterable[Request], now: float, rows_per_s: float) -> list[Request]:
        """By rank, the users' counters, then by missing tokens less aging; see Policy."""
        served, aging = self.served, self.aging * rows_per_s
        sign = -1 if self._owed > 0 else 1

        def entitlement(request: Request) -> tuple[float, ...]:
            missing = request.num_uncomputed_tokens
            if request.status is not RequestStatus.RUNNING:
                missing -= request.num_resident_tokens
            waited = now - request.arrival_time + (HEAD_START if missing <= SHORT else 0.0)
            return (
                sign * request.standing.rank,
                served.get(request.user, 0.0),
                missing - aging * waited,
                request.arrival_time,
            )

        return sorted(candidates, key=entitlement)

    def charged(self, user: str) -> float:
        """The user's counter; see Policy."""
        return self.served.get(user, 0.0)

    def may_admit(self, num_running: int) -> bool:
        """Always; see Policy."""
        return True

    def max_running(self, user: str, max_num_seqs: int) -> int:
        """A part of the places by weight among those of the same or a lower rank; see Policy.

        Of those whom people wait for, whoever had clearly less than all the others may have more:
        all but one place for each of them. Many small answers take places, and little time.
        """
        own = self._members[user]
        others = [
            self.served[name]
            for name, member in self._members.items()
            if name != user and member.rank == 0
        ]
        if own.rank == 0 and others and self.served[user] + BEHIND < min(others):
            return max(1, max_num_seqs - len(others))
        weights = sum(total for rank, total in self._weights.items() if rank <= own.rank)
        return max(1, int(max_num_seqs * own.standing.weight / weights))

    def join(self, user: str, standing: Standing) -> None:
        """Lift the counter of a user who was away; see Policy."""
        member = self._members.get(user)
        if member is None:
            member = self._members[user] = self._newcomer(user, standing)
        member.standing = standing
        member.ranks[standing.rank] += 1
        self._num_batch += standing.rank > 0
        self._weigh()

    def _newcomer(self, user: str, standing: Standing) -> _Member:
        level, fed = min(
            (
                (self.served[name] + other.credit, other.fed)
                for name, other in self._members.items()
            ),
            default=(0.0, self._charged),
        )
        credit = CREDIT if self._members and self._charged - fed < CREDIT else 0.0
        self.served[user] = max(self.served.get(user, 0.0), level - credit)
        return _Member(standing, credit, self._charged)

    def leave(self, user: str, standing: Standing) -> None:
        """One request less; see Policy."""
        member = self._members[user]
        member.ranks[standing.rank] -= 1
        if not member.ranks[standing.rank]:
            del member.ranks[standing.rank]
        if not member.ranks:
            del self._members[user]
        self._num_batch -= standing.rank > 0
        self._weigh()

    def _weigh(self) -> None:
        weights: dict[int, float] = {}
        for member in self._members.values():
            weights[member.rank] = weights.get(member.rank, 0.0) + member.standing.weight
        self._weights = weights

    def charge(self, user: str, rank: int, seconds: float) -> None:
        """Add to the user's counter, and to what the batch class is owed; see Policy."""
        member = self._members.get(user)
        weight = EQUAL.weight if member is None else member.standing.weight
        self._charged += seconds
        if member is not None:
            member.fed = self._charged
        self.served[user] = self.served.get(user, 0.0) + seconds / weight
        if not self._num_batch:
            self._owed = 0.0
            return
        owed = self._owed + BATCH_FLOOR * seconds - (seconds if rank > 0 else 0.0)
        self._owed = max(-MOST_OWED, min(MOST_OWED, owed))

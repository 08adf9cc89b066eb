"""Who of the waiting may join in this step, and the reason for everyone who may not.

Owns the limits on running requests: places, the policy's share, the cap per user, and what is held
back. Knows nothing about blocks and budgets, which the scheduler asks after.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from mlx_cb.config import SchedulerConfig
from mlx_cb.core.policy import Policy
from mlx_cb.core.request import Request, RequestStatus
from mlx_cb.core.restraint import Restraint


class Entrance:
    """Asked once per step (`open`), then once per candidate (`refusal`)."""

    def __init__(self, config: SchedulerConfig, policy: Policy) -> None:
        self.restraint = Restraint()
        self._config = config
        self._policy = policy
        self._running: Counter[str] = Counter()
        self._num_running = 0
        self._shares: dict[str, int] = {}
        self._is_open = True

    @property
    def num_places(self) -> int:
        """Requests that may run at once."""
        return 1 if self.restraint.one_at_a_time else self._config.max_num_seqs

    def open(self, running: Iterable[Request]) -> None:
        """Begin a step in which these requests hold places."""
        self._running = Counter(request.user for request in running)
        self._num_running = self._running.total()
        self._shares.clear()
        self._is_open = self._policy.may_admit(self._num_running)

    def arrange(self, candidates: list[Request]) -> list[Request]:
        """The policy's order, but for two: who had to give way comes back before anyone joins, and
        users who are held back come behind all others."""
        held = self.restraint.held_users
        if not held and all(r.status is not RequestStatus.PREEMPTED for r in candidates):
            return candidates
        return sorted(
            candidates, key=lambda r: (r.user in held, r.status is not RequestStatus.PREEMPTED)
        )

    def refusal(self, request: Request) -> str:
        """Why the request may not join now; "" when it may."""
        restraint, user = self.restraint, request.user
        if restraint.is_paused(request):
            return "paused by the operator"
        if not self._is_open:
            return "batch to end"
        if self._num_running >= self.num_places:
            return "slots"
        # What runs ends, so these two can hold nobody for ever.
        # Who had to give way is in the middle of an answer: kept out, his stall would only grow.
        is_back = request.status is RequestStatus.PREEMPTED
        if self._num_running and not restraint.admits and not is_back:
            return "admission paused"
        if self._num_running and restraint.batch_paused and request.standing.rank > 0:
            return "class paused"
        if user not in self._shares:
            places = self._config.max_num_seqs
            self._shares[user] = self._policy.max_running(user, places)
        if self._running[user] >= self._shares[user]:
            return "fair share"
        cap = self._config.max_running_per_user
        if cap is not None and self._running[user] >= cap:
            return "user's limit"
        return ""

    def joined(self, request: Request) -> None:
        """The request was admitted."""
        self._running[request.user] += 1
        self._num_running += 1

"""Watches for early signs of trouble: gaps, waits, unfairness, thrashing, failures.

Owns the measuring, over the last seconds. Decides nothing: that is `control`'s. Its cost per step
is a few numbers; everything else is worked out when somebody reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from mlx_cb.core.request import Request, RequestStatus
from mlx_cb.core.scheduler import Scheduler
from mlx_cb.core.scheduler_output import SchedulerOutput
from mlx_cb.core.token_budget import STRETCH

WINDOW_S = 10.0
FAILURE_WINDOW_S = 60.0
NEGLECT = 0.5  # part of a user's fair share below which the user counts as neglected
TOO_MUCH = 1.5  # times a user's fair share from which the user counts as served the most


@dataclass(frozen=True, slots=True)
class Signs:
    """What was seen at one moment. Times in seconds.

    Attributes:
        gap_p99_s: of the gaps between two tokens of a stream; None when nothing was streamed.
        gap_allowed_s: largest gap that the token budget aims at.
        stall_s: longest gap of the window, one that is still open included.
        waits: by user, how long the oldest request that was never admitted has waited.
        neglected: those of `waits` whose user had less than half of the fair share.
        jain: index of Jain over the weighted service of users who always had something waiting;
            None with fewer than two of them.
        most_served: who had far more than the fair share, if anybody.
        preemptions_per_s, failed_steps: of the window, and of the last minute.
        num_users, num_batch: with unfinished requests, and such requests of the batch class.
        num_prefilled: rows of prefill in the window.
    """

    time: float
    gap_p99_s: float | None
    gap_allowed_s: float
    stall_s: float
    waits: dict[str, float]
    neglected: dict[str, float]
    jain: float | None
    most_served: str | None
    preemptions_per_s: float
    failed_steps: int
    step_age_s: float
    num_users: int
    num_batch: int
    num_prefilled: int

    @property
    def gap_ratio(self) -> float | None:
        """The 99th percentile of gaps over the allowed one."""
        return None if self.gap_p99_s is None else self.gap_p99_s / self.gap_allowed_s

    @property
    def stall_ratio(self) -> float:
        """The longest gap over the allowed one."""
        return self.stall_s / self.gap_allowed_s

    @property
    def longest_neglect_s(self) -> float:
        """The longest wait among the neglected; 0 when nobody is."""
        return max(self.neglected.values(), default=0.0)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


@dataclass(slots=True)
class _Gap:
    """All streams that decoded in two steps running waited this long between their tokens."""

    time: float
    seconds: float
    streams: int


@dataclass(slots=True)
class _Look:
    """What was true when somebody read last."""

    time: float
    service: dict[str, float]
    preemptions: int
    backlogged: set[str]


@dataclass(slots=True)
class _Crowd:
    """The unfinished requests, sorted out."""

    weights: dict[str, float] = field(default_factory=dict)
    waits: dict[str, float] = field(default_factory=dict)
    backlogged: set[str] = field(default_factory=set)
    people: set[str] = field(default_factory=set)  # who has a request of rank 0
    num_batch: int = 0
    longest_pause: float = 0.0


class Watch:
    """Sees every step of one scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._gaps: deque[_Gap] = deque()
        self._prefilled: deque[tuple[float, int]] = deque()
        self._failures: deque[float] = deque()
        self._looks: deque[_Look] = deque()
        self._last_tokens: float | None = None
        self._last_step: float | None = None

    def saw(self, plan: SchedulerOutput, now: float) -> None:
        """A step's tokens were read."""
        if plan.decodes and self._last_tokens is not None:
            self._gaps.append(_Gap(now, now - self._last_tokens, len(plan.decodes)))
        self._last_tokens = now if self._scheduler.decoding else None
        self._last_step = now
        if plan.prefills:
            self._prefilled.append((now, plan.record.rows_prefill))
        self._forget(now)

    def failed(self, now: float) -> None:
        """A step went wrong."""
        self._failures.append(now)
        self._last_step = now

    def read(self, now: float) -> Signs:
        """What is to be seen now."""
        self._forget(now)
        crowd = self._sort(now)
        scheduler = self._scheduler
        service = {user: scheduler.service.get(user, 0.0) for user in crowd.weights}
        look = _Look(now, service, scheduler.num_preemptions, crowd.backlogged)
        then = self._looks[0] if self._looks else look
        given = {
            user: (seconds - then.service.get(user, 0.0)) / crowd.weights[user]
            for user, seconds in service.items()
        }
        # Who may wait longer by rights is nobody to be fair to by this measure.
        always = crowd.people.intersection(
            crowd.backlogged, *(look.backlogged for look in self._looks)
        )
        self._looks.append(look)
        fair = sum(given.values()) / len(given) if given else 0.0
        is_open = scheduler.decoding and self._last_tokens is not None
        open_gap = now - (self._last_tokens or 0.0) if is_open else 0.0
        longest = max((gap.seconds for gap in self._gaps), default=0.0)
        most = max(given, key=lambda user: given[user], default=None)
        return Signs(
            time=now,
            gap_p99_s=_percentile(self._gaps, 0.99),
            gap_allowed_s=self._allowed_gap(),
            stall_s=max(longest, open_gap, crowd.longest_pause),
            waits=crowd.waits,
            neglected={
                user: wait
                for user, wait in crowd.waits.items()
                if user in crowd.people and given[user] < NEGLECT * fair
            },
            jain=_jain(given[user] for user in always),
            most_served=most if most is not None and given[most] > TOO_MUCH * fair > 0 else None,
            preemptions_per_s=(scheduler.num_preemptions - then.preemptions)
            / max(now - then.time, 1.0),
            failed_steps=len(self._failures),
            step_age_s=0.0 if self._last_step is None else now - self._last_step,
            num_users=len(crowd.weights),
            num_batch=crowd.num_batch,
            num_prefilled=sum(rows for _, rows in self._prefilled),
        )

    def _allowed_gap(self) -> float:
        scheduler = self._scheduler
        streams = max(1, len(scheduler.decoding))
        context = sum(request.num_computed_tokens for request in scheduler.decoding)
        predicted = scheduler.cost_model.predict(streams, context)
        return max(scheduler.config.itl_target_ms / 1e3, STRETCH * predicted)

    def _sort(self, now: float) -> _Crowd:
        crowd = _Crowd()
        is_paused = self._scheduler.entrance.restraint.is_paused
        for request in self._scheduler.requests.values():
            if is_paused(request):
                continue
            user, rank = request.account
            crowd.weights[user] = request.standing.weight
            crowd.num_batch += rank > 0
            if rank == 0:
                crowd.people.add(user)
            if request.status is RequestStatus.WAITING:
                wait = now - request.arrival_time
                crowd.waits[user] = max(crowd.waits.get(user, 0.0), wait)
                crowd.backlogged.add(user)
            elif request.status is RequestStatus.PREEMPTED and _was_streaming(request):
                crowd.longest_pause = max(crowd.longest_pause, now - request.events[-1].time)
        return crowd

    def _forget(self, now: float) -> None:
        begin = now - WINDOW_S
        while self._gaps and self._gaps[0].time < begin:
            self._gaps.popleft()
        while self._prefilled and self._prefilled[0][0] < begin:
            self._prefilled.popleft()
        while self._looks and self._looks[0].time < begin:
            self._looks.popleft()
        while self._failures and self._failures[0] < now - FAILURE_WINDOW_S:
            self._failures.popleft()


def _was_streaming(request: Request) -> bool:
    return request.first_token_time is not None


def _percentile(gaps: Iterable[_Gap], share: float) -> float | None:
    """The gap that `share` of all streams' gaps do not exceed; None without any."""
    ordered = sorted(gaps, key=lambda gap: gap.seconds)
    left = share * sum(gap.streams for gap in ordered)
    for gap in ordered:
        left -= gap.streams
        if left <= 0:
            return gap.seconds
    return ordered[-1].seconds if ordered else None


def _jain(shares: Iterable[float]) -> float | None:
    """1 when all shares are equal, 1/n when one has everything. Source: Jain et al. 1984."""
    values = list(shares)
    squares = sum(value * value for value in values)
    if len(values) < 2 or not squares:
        return None
    return sum(values) ** 2 / (len(values) * squares)

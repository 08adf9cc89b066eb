"""Says no in time: bounds the queue by predicted wait, from measured rates.

Lives in the front, so that a refusal takes microseconds and never touches the engine. Knows counts
of tokens and requests and whose they are, nothing about prompts or HTTP.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from mlx_cb.errors import Overloaded
from mlx_cb.standing import EQUAL, Standing

SMOOTHING = 0.05  # weight of a new measurement
CALM = 0.8  # part of the limit that the wait falls to before newcomers are let in again
JITTER = 0.1  # so that those who were refused together do not come back together
MIN_RETRY_S = 1.0


@dataclass(slots=True)
class _Average:
    """Exponential moving average; None until something was measured."""

    value: float | None = None

    def add(self, sample: float) -> None:
        self.value = (
            sample if self.value is None else self.value + SMOOTHING * (sample - self.value)
        )


@dataclass(frozen=True, slots=True)
class _Entry:
    """One unfinished request."""

    user: str
    standing: Standing
    prompt_tokens: int
    started: float | None = None


@dataclass(slots=True)
class AdmissionControl:
    """Predicts how long a newcomer would wait for its first token.

    Where users share the machine fairly, what others have waiting holds a newcomer up only as far
    as their shares go: so one user's flood closes the door to that user, and to nobody else. A door
    that was closed opens again when the wait has fallen to `CALM` of the limit; that is the time
    that `retry_after` names.

    Attributes:
        max_num_seqs: requests that run at once.
        max_wait_s: longest predicted wait that is accepted.
        is_fair: users share the machine; else all that came before goes before.
    """

    max_num_seqs: int
    max_wait_s: float
    is_fair: bool = True
    _entries: dict[str, _Entry] = field(default_factory=dict)
    _closed: set[str] = field(default_factory=set)
    _prefill_tokens: _Average = field(default_factory=_Average)
    _prefill_seconds: _Average = field(default_factory=_Average)
    _service_seconds: _Average = field(default_factory=_Average)

    def predicted_wait(self, user: str = "", standing: Standing = EQUAL) -> float:
        """Seconds until a request of this user that comes now would have its turn; 0 while nothing
        is known. Without a name: of somebody who has nothing here yet."""
        before = [e for e in self._entries.values() if e.standing.rank <= standing.rank]
        return max(
            self._prefill_wait(before, user, standing), self._places_wait(before, user, standing)
        )

    def _prefill_wait(self, before: list[_Entry], user: str, standing: Standing) -> float:
        tokens, seconds = self._prefill_tokens.value, self._prefill_seconds.value
        if not tokens or not seconds:
            return 0.0
        waiting = [entry for entry in before if entry.started is None]
        ahead = float(sum(entry.prompt_tokens for entry in waiting))
        if self.is_fair:
            own = sum(entry.prompt_tokens for entry in waiting if entry.user == user)
            ahead = min(ahead, own / _share(before, user, standing))
        return ahead * seconds / tokens

    def _places_wait(self, before: list[_Entry], user: str, standing: Standing) -> float:
        if self._service_seconds.value is None:
            return 0.0
        behind = float(len(before) - self.max_num_seqs + 1)
        if self.is_fair:
            own = sum(entry.user == user and entry.started is None for entry in before)
            behind = min(behind, (own + 1) / _share(before, user, standing))
        return max(0.0, behind) * self._service_seconds.value / self.max_num_seqs

    def check(self, user: str = "", standing: Standing = EQUAL) -> None:
        """Raise Overloaded, with an honest retry_after, when the wait would be too long."""
        wait = self.predicted_wait(user, standing)
        calm = CALM * self.max_wait_s
        if wait <= calm or (user not in self._closed and wait <= self.max_wait_s):
            self._closed.discard(user)
            return
        self._closed.add(user)
        retry = max(MIN_RETRY_S, wait - calm)
        retry *= 1 + random.uniform(-JITTER, JITTER)
        raise Overloaded(
            f"about {wait:.0f} s of work is waiting and at most {self.max_wait_s:.0f} s is "
            f"accepted; try again in {retry:.0f} s",
            retry_after=retry,
        )

    def queue(
        self, request_id: str, prompt_tokens: int, user: str = "", standing: Standing = EQUAL
    ) -> None:
        """A request was handed to the engine."""
        self._entries[request_id] = _Entry(user, standing, prompt_tokens)

    def start(self, request_id: str, now: float) -> None:
        """Its first token came."""
        entry = self._entries.get(request_id)
        if entry is not None and entry.started is None:
            self._entries[request_id] = _Entry(entry.user, entry.standing, entry.prompt_tokens, now)

    def leave(self, request_id: str, now: float) -> None:
        """It has ended, or nobody wants it any more."""
        entry = self._entries.pop(request_id, None)
        if entry is not None and entry.started is not None:
            self._service_seconds.add(now - entry.started)
        if not self._entries:
            self._closed.clear()

    def observe(self, prefill_tokens: int, seconds: float) -> None:
        """A step with prefill rows was measured."""
        if prefill_tokens:
            self._prefill_tokens.add(prefill_tokens)
            self._prefill_seconds.add(seconds)


def _share(entries: Iterable[_Entry], user: str, standing: Standing) -> float:
    """The user's part of the machine by weight, among those who have something here."""
    weights = {entry.user: entry.standing.weight for entry in entries}
    weights[user] = standing.weight
    return standing.weight / sum(weights.values())

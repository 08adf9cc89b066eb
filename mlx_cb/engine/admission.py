"""Says no in time: bounds the queue by predicted wait, from measured rates.

Lives in the front, so that a refusal takes microseconds and never touches the engine. Knows counts
of tokens and requests and whose they are, nothing about prompts or HTTP.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from dataclasses import dataclass, field

from mlx_cb.engine.messages import StepOutputs
from mlx_cb.errors import Overloaded
from mlx_cb.standing import EQUAL, Standing

SMOOTHING = 0.05  # weight of a new measurement
MEMORY_S = 20.0  # what was measured so long ago counts for a third
CALM = 0.8  # part of the limit that the wait falls to before newcomers are let in again
JITTER = 0.1  # so that those who were refused together do not come back together
MIN_RETRY_S = 0.25  # a header of whole seconds says one at least


@dataclass(slots=True)
class _Average:
    """Exponential moving average; None until something was measured."""

    value: float | None = None

    def add(self, sample: float) -> None:
        self.value = (
            sample if self.value is None else self.value + SMOOTHING * (sample - self.value)
        )


@dataclass(slots=True)
class _Rate:
    """An amount per second of machine time, of which the last `MEMORY_S` count most."""

    amount: float = 0.0
    seconds: float = 0.0

    @property
    def is_known(self) -> bool:
        return self.amount > 0 and self.seconds > 0

    def add(self, amount: float, seconds: float) -> None:
        kept = math.exp(-seconds / MEMORY_S)
        self.amount = kept * self.amount + amount
        self.seconds = kept * self.seconds + seconds


@dataclass(slots=True)
class _Entry:
    """One unfinished request. `missing` prompt tokens are to be computed before its first token;
    it has held a place since it `joined`, and waits until it has `started`."""

    user: str
    standing: Standing
    prompt_tokens: int
    missing: int
    joined: float | None = None
    started: bool = False


@dataclass(slots=True)
class AdmissionControl:
    """Predicts how long a newcomer would wait for its turn.

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
    _prefill: _Rate = field(default_factory=_Rate)
    _full_steps: int = 0
    _service_seconds: _Average = field(default_factory=_Average)
    _prompt_tokens: _Average = field(default_factory=_Average)

    def predicted_wait(
        self, user: str = "", standing: Standing = EQUAL, prompt_tokens: int | None = None
    ) -> float:
        """Seconds until a request of this user that comes now would have its turn; 0 while nothing
        is known. Without a name: of somebody who has nothing here yet. Before its length is known
        a prompt is taken to be like the others."""
        before = [e for e in self._entries.values() if e.standing.rank <= standing.rank]
        size = self._prompt_tokens.value or 0.0 if prompt_tokens is None else prompt_tokens
        return max(
            self._prefill_wait(before, user, standing, size),
            self._places_wait(before, user, standing),
        )

    def _prefill_wait(
        self, before: list[_Entry], user: str, standing: Standing, size: float
    ) -> float:
        if not self._prefill.is_known:
            return 0.0
        waiting: defaultdict[str, float] = defaultdict(float)
        ahead = 0.0
        for entry in before:
            if self.is_fair and entry.standing.rank == standing.rank and entry.user != user:
                waiting[entry.user] += entry.missing / entry.standing.weight
            else:
                ahead += entry.missing
        # Until this one has had its turn, others get by their weight what this user gets.
        own = sum(entry.missing for entry in before if entry.user == user)
        share = (own + size) / standing.weight
        weights = {entry.user: entry.standing.weight for entry in before}
        ahead += sum(min(amount, share) * weights[name] for name, amount in waiting.items())
        return ahead * self._prefill.seconds / self._prefill.amount

    def _places_wait(self, before: list[_Entry], user: str, standing: Standing) -> float:
        if self._service_seconds.value is None:
            return 0.0
        behind = float(len(before) - self.max_num_seqs + 1)
        if self.is_fair:
            own = sum(entry.user == user and not entry.started for entry in before)
            weights = {entry.user: entry.standing.weight for entry in before}
            weights[user] = standing.weight
            behind = min(behind, (own + 1) * sum(weights.values()) / standing.weight)
        return max(0.0, behind) * self._service_seconds.value / self.max_num_seqs

    def check(
        self, user: str = "", standing: Standing = EQUAL, prompt_tokens: int | None = None
    ) -> None:
        """Raise Overloaded, with an honest retry_after, when the wait would be too long."""
        wait = self.predicted_wait(user, standing, prompt_tokens)
        calm = CALM * self.max_wait_s
        if wait <= calm or (user not in self._closed and wait <= self.max_wait_s):
            self._closed.discard(user)
            return
        self._closed.add(user)
        retry = max(MIN_RETRY_S, wait - calm)
        retry *= 1 + random.uniform(-JITTER, JITTER)
        raise Overloaded(
            f"about {wait:.0f} s of work is waiting and at most {self.max_wait_s:.0f} s is "
            f"accepted; try again in {retry:.1f} s",
            retry_after=retry,
        )

    def queue(
        self, request_id: str, prompt_tokens: int, user: str = "", standing: Standing = EQUAL
    ) -> None:
        """A request was handed to the engine."""
        self._entries[request_id] = _Entry(user, standing, prompt_tokens, prompt_tokens)
        self._prompt_tokens.add(prompt_tokens)

    def saw(self, step: StepOutputs, now: float) -> None:
        """Take in what the engine said of a step."""
        for request_id, tokens in step.cached.items():
            self._advance(request_id, tokens)
        for request_id, tokens in step.computed.items():
            entry = self._advance(request_id, tokens)
            if entry is not None and entry.joined is None:
                entry.joined = now
        for output in step.outputs:
            entry = self._entries.get(output.request_id)
            if entry is not None and output.token_ids:
                entry.missing, entry.started = 0, True
        self._observe(step.prefill_tokens, step.seconds)

    def _advance(self, request_id: str, tokens: int) -> _Entry | None:
        """So much of its prompt is computed, or was when it came."""
        entry = self._entries.get(request_id)
        if entry is not None and not entry.started:
            entry.missing = max(0, entry.prompt_tokens - tokens)
        return entry

    def leave(self, request_id: str, now: float) -> None:
        """It has ended, or nobody wants it any more."""
        entry = self._entries.pop(request_id, None)
        if entry is not None and entry.started and entry.joined is not None:
            self._service_seconds.add(now - entry.joined)
        if not self._entries:
            self._closed.clear()

    def _observe(self, prefill_tokens: int, seconds: float) -> None:
        """A step that left no prompt waiting was not full and says nothing of how fast the machine
        can be; nor does the first full one, which compiles what the others find ready."""
        if not prefill_tokens or not self._has_backlog:
            return
        self._full_steps += 1
        if self._full_steps > 1:
            self._prefill.add(prefill_tokens, seconds)

    @property
    def _has_backlog(self) -> bool:
        return any(entry.missing for entry in self._entries.values())

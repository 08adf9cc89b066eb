"""Says no in time: bounds the queue by predicted wait, from measured rates.

Lives in the front, so that a refusal takes microseconds and never touches the engine. Knows counts
of tokens and requests, nothing about prompts, users or HTTP.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from mlx_cb.errors import Overloaded

SMOOTHING = 0.05  # weight of a new measurement
CALM = 0.8  # part of the limit that the wait has to fall to before a retry is worth while
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


@dataclass(slots=True)
class AdmissionControl:
    """Predicts how long a newcomer would wait for its first token.

    Attributes:
        max_num_seqs: requests that run at once.
        max_wait_s: longest predicted wait that is accepted.
    """

    max_num_seqs: int
    max_wait_s: float
    _queued: dict[str, int] = field(default_factory=dict)
    _started: dict[str, float] = field(default_factory=dict)
    _prefill_tokens: _Average = field(default_factory=_Average)
    _prefill_seconds: _Average = field(default_factory=_Average)
    _service_seconds: _Average = field(default_factory=_Average)

    def predicted_wait(self) -> float:
        """Seconds until a request that comes now would have its turn; 0 while nothing is known."""
        tokens, seconds = self._prefill_tokens.value, self._prefill_seconds.value
        prefill = 0.0
        if tokens and seconds:
            prefill = sum(self._queued.values()) * seconds / tokens
        behind = len(self._queued) + len(self._started) - self.max_num_seqs + 1
        places = 0.0
        if behind > 0 and self._service_seconds.value is not None:
            places = behind * self._service_seconds.value / self.max_num_seqs
        return max(prefill, places)

    def check(self) -> None:
        """Raise Overloaded, with an honest retry_after, when the wait would be too long."""
        wait = self.predicted_wait()
        if wait <= self.max_wait_s:
            return
        retry = max(MIN_RETRY_S, wait - CALM * self.max_wait_s)
        retry *= 1 + random.uniform(-JITTER, JITTER)
        raise Overloaded(
            f"about {wait:.0f} s of work is waiting and at most {self.max_wait_s:.0f} s is "
            f"accepted; try again in {retry:.0f} s",
            retry_after=retry,
        )

    def queue(self, request_id: str, prompt_tokens: int) -> None:
        """A request was handed to the engine."""
        self._queued[request_id] = prompt_tokens

    def start(self, request_id: str, now: float) -> None:
        """Its first token came."""
        if self._queued.pop(request_id, None) is not None:
            self._started[request_id] = now

    def leave(self, request_id: str, now: float) -> None:
        """It has ended, or nobody wants it any more."""
        self._queued.pop(request_id, None)
        started = self._started.pop(request_id, None)
        if started is not None:
            self._service_seconds.add(now - started)

    def observe(self, prefill_tokens: int, seconds: float) -> None:
        """A step with prefill rows was measured."""
        if prefill_tokens:
            self._prefill_tokens.add(prefill_tokens)
            self._prefill_seconds.add(seconds)

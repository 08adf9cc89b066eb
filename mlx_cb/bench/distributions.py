"""Lengths and arrival times drawn from parametric distributions; knows nothing about calls.

The fits come from public traces (Azure 2023 conversation and code, TraceLab agent steps); the
traces themselves are not part of the package.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Lognormal token counts, cut to [low, high] by drawing again."""

    mu: float
    sigma: float
    high: int
    low: int = 1

    def draw(self, rng: random.Random) -> int:
        """One length, tokens."""
        while True:
            value = round(rng.lognormvariate(self.mu, self.sigma))
            if self.low <= value <= self.high:
                return value

    def scaled(self, divisor: float) -> LogNormal:
        """The same shape, all lengths divided; for machines far slower than the traces'."""
        return LogNormal(
            self.mu - math.log(divisor),
            self.sigma,
            max(self.low, round(self.high / divisor)),
            self.low,
        )


@dataclass(frozen=True, slots=True)
class LengthMix:
    """Prompt and output lengths of one kind of traffic."""

    prompt: LogNormal
    output: LogNormal
    interarrival_shape: float

    def scaled(self, divisor: float) -> LengthMix:
        """Prompt and output divided alike, arrivals unchanged."""
        return LengthMix(
            self.prompt.scaled(divisor), self.output.scaled(divisor), self.interarrival_shape
        )


# Gamma shape = 1 / CV²: 1 is Poisson. The code trace comes in bursts (CV 13).
MIXES = {
    "conv": LengthMix(LogNormal(6.93, 0.77, 8000), LogNormal(4.86, 0.93, 600), 0.84),
    "code": LengthMix(LogNormal(7.29, 0.99, 7437), LogNormal(2.56, 1.13, 250), 1 / 13**2),
    "sharegpt": LengthMix(LogNormal(4.2, 1.3, 2048), LogNormal(5.4, 0.95, 2048), 1.0),
    "arxiv": LengthMix(LogNormal(7.72, 0.75, 4054), LogNormal(5.1, 0.62, 600), 1.0),
}

AGENT_STEP = LengthMix(LogNormal(6.75, 1.43, 24000), LogNormal(5.53, 1.48, 4000), 1.0)


def arrival_times(rng: random.Random, rate: float, count: int, shape: float = 1.0) -> list[float]:
    """`count` arrival times in seconds with `rate` per second; gamma gaps, the first one at 0."""
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += rng.gammavariate(shape, 1.0 / (rate * shape))
    return times

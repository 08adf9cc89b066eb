"""Predicts how long a step takes from what is in it; learns from every step that ran.

Knows rows, context and pairs, not requests. The token budget of a step comes from here: the largest
number of rows whose predicted time stays under a target.
"""

from __future__ import annotations

import math
from bisect import bisect, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

SMOOTHING = 0.2  # weight of a new measurement in its bucket: a machine changes within seconds
TRUST = 2  # steps after which a bucket's average counts half against the line through all
MAX_ROWS = 4096
OUTLIER = 3.0  # times the prediction that a measurement may count for


@dataclass(slots=True)
class _Bucket:
    """Moving averages over the steps with about this many rows, and how their pairs vary."""

    rows: float
    context: float
    pairs: float
    seconds: float
    count: int = 1
    pairs_variance: float = 0.0
    pairs_covariance: float = 0.0  # with the seconds


def chunk_pairs(start: int, num_tokens: int) -> int:
    """Tokens that each of `num_tokens` rows attends to, summed, with `start` tokens before them."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


class StepCostModel:
    """Online least squares for
    `seconds = base + per_row * rows + per_context * context + per_pair * pairs`.

    `rows` are tokens in the step, `context` is the sum of the contexts they attend to, and `pairs`
    counts, for each row of a chunk, the tokens that it attends to. Measurements
    are averaged per half octave of rows and the line is fitted through these averages, so that an
    hour of equal steps does not wash out what is known about others. Pairs are told from how steps
    of about as many rows differ: a long prompt's chunks are alike but for them.

    Rows do not cost the same at 8 as at 80, so a prediction follows the averages themselves, from
    one to the next, as far as they are known; the line says what lies beyond.
    """

    def __init__(self, base: float = 0.02, per_row: float = 0.002) -> None:
        self.base = base
        self.per_row = per_row
        self.per_context = 0.0
        self.per_pair = 0.0
        self.num_observations = 0
        self._buckets: dict[int, _Bucket] = {}
        self._curve: list[tuple[float, float]] = []  # rows and seconds, both ascending

    def predict(self, rows: int, context: int, pairs: int = 0) -> float:
        """Seconds a step of this shape takes."""
        read = self.per_context * context + self.per_pair * pairs
        return self._of_rows(rows) + read

    def _of_rows(self, rows: float) -> float:
        """Seconds of a step that attends to nothing."""
        curve = self._curve
        if not curve:
            return self.base + self.per_row * rows
        after = bisect(curve, (rows, math.inf))
        if after == len(curve):
            return curve[-1][1] + self.per_row * (rows - curve[-1][0])
        right_rows, right = curve[after]
        if after == 0:
            return max(0.5 * right, right - self.per_row * (right_rows - rows))
        left_rows, left = curve[after - 1]
        return left + (right - left) * (rows - left_rows) / (right_rows - left_rows)

    def rows_within(
        self, seconds: float, context: int, num_decodes: int = 0, prefix: int = 0
    ) -> int:
        """Most rows whose step stays under `seconds`; at least one.

        `num_decodes` of them are decodes, the others of a chunk with `prefix` tokens before it.
        """

        def predicted(rows: int) -> float:
            pairs = chunk_pairs(prefix, max(0, rows - num_decodes))
            return self.predict(rows, context, pairs)

        return max(1, bisect_right(range(1, MAX_ROWS + 1), seconds, key=predicted))

    def observe(self, rows: int, context: int, seconds: float, pairs: int = 0) -> None:
        """Learn from a measured step. One stall (a busy core, a nap) counts for little."""
        key = int(2 * math.log2(max(rows, 1)))
        bucket = self._buckets.get(key)
        self.num_observations += 1
        if bucket is None:
            self._buckets[key] = _Bucket(rows, context, pairs, seconds)
        else:
            if bucket.count > 4:
                seconds = min(seconds, OUTLIER * self.predict(rows, context, pairs))
            weight = max(SMOOTHING, 1 / (bucket.count + 1))
            more_pairs = pairs - bucket.pairs
            longer = seconds - bucket.seconds - self.per_row * (rows - bucket.rows)
            bucket.pairs_variance += weight * (more_pairs * more_pairs - bucket.pairs_variance)
            bucket.pairs_covariance += weight * (more_pairs * longer - bucket.pairs_covariance)
            bucket.pairs += weight * more_pairs
            bucket.rows += weight * (rows - bucket.rows)
            bucket.context += weight * (context - bucket.context)
            bucket.seconds += weight * (seconds - bucket.seconds)
            bucket.count += 1
        self._fit()

    def _fit(self) -> None:
        buckets = self._buckets.values()
        if variance := sum(bucket.pairs_variance for bucket in buckets):
            covariance = sum(bucket.pairs_covariance for bucket in buckets)
            # Pairs never explain more than half of any step; a fit that says so is noise.
            most = min(0.5 * b.seconds / b.pairs for b in buckets if b.pairs)
            self.per_pair = min(max(covariance / variance, 0.0), most)
        points = [(b.rows, b.context, b.seconds - self.per_pair * b.pairs) for b in buckets]
        if len(points) == 1:
            # One shape seen: scale the prior, so that the split into base and rows stays plausible.
            rows, context, seconds = points[0]
            factor = seconds / self.predict(round(rows), round(context))
            self.base *= factor
            self.per_row *= factor
            return
        per_context = _slopes(points)[1] if len(points) >= 3 else 0.0
        # Nor does context.
        most = min(
            (0.5 * seconds / context for _, context, seconds in points if context), default=0
        )
        self.per_context = min(max(per_context, 0.0), most)
        flat = [(rows, seconds - self.per_context * context) for rows, context, seconds in points]
        mean_rows = sum(rows for rows, _ in flat) / len(flat)
        mean_seconds = sum(seconds for _, seconds in flat) / len(flat)
        spread = sum((rows - mean_rows) ** 2 for rows, _ in flat)
        slope = (
            sum((rows - mean_rows) * (seconds - mean_seconds) for rows, seconds in flat) / spread
        )
        # Neither may vanish: a budget is divided by the one and a step never costs nothing.
        self.per_row = max(slope, 1e-3 * mean_seconds / mean_rows)
        self.base = max(mean_seconds - self.per_row * mean_rows, 1e-3 * mean_seconds)
        self._curve = _ascending(sorted(self._knots()))

    def _knots(self) -> Iterator[tuple[float, float, int]]:
        """Rows, seconds without what was read, and steps of each bucket; few steps count little."""
        for b in self._buckets.values():
            line = self.base + self.per_row * b.rows
            own = b.seconds - self.per_context * b.context - self.per_pair * b.pairs
            yield b.rows, line + (own - line) * b.count / (b.count + TRUST), b.count


def _ascending(knots: Iterable[tuple[float, float, int]]) -> list[tuple[float, float]]:
    """(rows, seconds) of knots that ascend in rows; those that fall back in seconds are joined.

    Source: Ayer et al. 1955, pool adjacent violators.
    """
    joined: list[tuple[float, float, int]] = []
    for rows, seconds, weight in knots:
        while joined and joined[-1][1] >= seconds:
            other_rows, other, other_weight = joined.pop()
            total = weight + other_weight
            rows = (weight * rows + other_weight * other_rows) / total
            seconds = (weight * seconds + other_weight * other) / total
            weight = total
        joined.append((rows, seconds, weight))
    return [(rows, seconds) for rows, seconds, _ in joined]


def _slopes(points: list[tuple[float, float, float]]) -> tuple[float, float]:
    """Least-squares slopes of the third coordinate over the first two; zeros when undetermined."""
    n = len(points)
    mean = [sum(point[i] for point in points) / n for i in range(3)]
    centred = [[point[i] - mean[i] for i in range(3)] for point in points]
    xx, xy, yy, xz, yz = (
        sum(point[i] * point[j] for point in centred)
        for i, j in ((0, 0), (0, 1), (1, 1), (0, 2), (1, 2))
    )
    determinant = xx * yy - xy * xy
    if determinant <= 1e-6 * xx * yy:
        return 0.0, 0.0
    return (xz * yy - yz * xy) / determinant, (yz * xx - xz * xy) / determinant

"""Order statistics and fairness of plain numbers; knows nothing about calls or servers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

Summary = dict[str, float]


def summarize(values: Sequence[float]) -> Summary:
    """Count, percentiles (linear interpolation) and maximum; only the count when empty."""
    if not values:
        return {"n": 0}
    p50, p95, p99 = np.percentile(np.asarray(values, dtype=np.float64), [50, 95, 99])
    return {
        "n": len(values),
        "p50": float(p50),
        "p95": float(p95),
        "p99": float(p99),
        "max": float(max(values)),
    }


def jain(shares: Iterable[float]) -> float | None:
    """Jain's index: 1 when all shares are equal, 1/n when one has everything.

    None for fewer than two shares or nothing shared out. Source: Jain, Chiu, Hawe 1984.
    """
    values = np.asarray(list(shares), dtype=np.float64)
    if values.size < 2 or not values.any():
        return None
    return float(values.sum() ** 2 / (values.size * np.square(values).sum()))


def median(values: Sequence[float]) -> float:
    """The middle value; of an even number the mean of the two middle ones."""
    return float(np.median(np.asarray(values, dtype=np.float64)))


def linear_fit(columns: Sequence[Sequence[float]], target: Sequence[float]) -> LinearFit:
    """Least squares of target on the columns and a constant."""
    matrix = np.column_stack([np.ones(len(target)), *columns])
    observed = np.asarray(target, dtype=np.float64)
    coefficients, *_ = np.linalg.lstsq(matrix, observed, rcond=None)
    residual = observed - matrix @ coefficients
    spread = float(np.square(observed - observed.mean()).sum())
    r2 = 1.0 - float(np.square(residual).sum()) / spread if spread else 1.0
    return LinearFit([float(value) for value in coefficients], r2)


class LinearFit:
    """Coefficients (constant first) and the share of variance they explain."""

    __slots__ = ("coefficients", "r2")

    def __init__(self, coefficients: list[float], r2: float) -> None:
        self.coefficients = coefficients
        self.r2 = r2

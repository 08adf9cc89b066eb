"""Vectors for qmm_small and sample_rows, as attention/kernel_cases.py has them for attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_cb.attention.kernel_cases import TOLERANCE, Problem
from mlx_cb.attention.kernels import Launcher
from mlx_cb.attention.oracle import dequantize, draw, lowest_kept, unpack
from mlx_cb.model.metal_ops import (
    SampleFilters,
    qmm_small,
    qmm_small_call,
    sample_rows,
    sample_rows_call,
)

FILTERS = (
    (0, 1.0, 0.0, 0.3),
    (50, 1.0, 0.0, 0.99),
    (0, 0.9, 0.0, 0.5),
    (7, 0.5, 0.0, 0.7),
    (0, 1.0, 0.3, 0.1),
    (40, 0.8, 0.05, 0.9),
    (1, 1.0, 0.0, 0.0),
    (200, 1.0, 0.0, 0.999),
    (5000, 0.999, 1.0, 0.6),
)
"""(top_k, top_p, min_p, uniform) of the rows of a SampleCase."""


def filters_of(rows: Sequence[tuple[int, float, float, float]]) -> SampleFilters:
    """The columns of (top_k, top_p, min_p, uniform) rows."""
    k, *rest = (list(column) for column in zip(*rows, strict=True))
    return SampleFilters(
        mx.array(k, dtype=mx.int32), *(mx.array(c, dtype=mx.float32) for c in rest)
    )


@dataclass(frozen=True)
class QmmCase:
    """A problem of qmm_small: rows x k times n columns of weights."""

    rows: int = 4
    k: int = 512
    n: int = 64
    bits: int = 4
    group_size: int = 64
    dtype: mx.Dtype = mx.float16

    @property
    def name(self) -> str:
        """What is multiplied."""
        dtype = str(self.dtype).removeprefix("mlx.core.")
        return f"qmm_small {dtype} {self.rows}x{self.k}x{self.n} {self.bits} bit g{self.group_size}"

    def build(self, seed: int = 0) -> Problem:
        """Random weights with a mean, so that biases matter."""
        rng = np.random.default_rng(seed)
        x = mx.array(rng.standard_normal((self.rows, self.k)).astype(np.float32)).astype(self.dtype)
        weights = mx.array((rng.standard_normal((self.n, self.k)) + 0.5).astype(np.float32))
        w, scales, biases = mx.quantize(
            weights.astype(self.dtype), group_size=self.group_size, bits=self.bits
        )
        wide = [np.array(a.astype(mx.float32)).astype(np.float64) for a in (x, scales, biases)]
        exact = dequantize(unpack(np.array(w), self.bits), wide[1], wide[2], self.group_size)
        arguments = (x, w, scales, biases, self.group_size, self.bits)
        return Problem(
            self.name,
            wide[0] @ exact.T,
            TOLERANCE[self.dtype],
            [qmm_small_call(*arguments)],
            lambda launch: qmm_small(*arguments, launch),
        )


@dataclass(frozen=True)
class SampleCase:
    """A problem of sample_rows: one row per entry of FILTERS.

    The answer has two columns: the lowest kept logit, and the logit of the chosen token.
    """

    vocabulary: int = 1000

    @property
    def name(self) -> str:
        """How large the vocabulary is."""
        return f"sample_rows V={self.vocabulary}"

    def build(self, seed: int = 0) -> Problem:
        """Normal logits."""
        rng = np.random.default_rng(seed)
        logits = (rng.standard_normal((len(FILTERS), self.vocabulary)) * 2).astype(np.float32)
        expected = np.zeros((len(FILTERS), 2))
        for row, (x, (k, p, min_p, uniform)) in enumerate(zip(logits, FILTERS, strict=True)):
            expected[row, 0] = lowest_kept(x, k, p, min_p)[0]
            token, _ = draw(x, expected[row, 0] - 1e-9, uniform)
            expected[row, 1] = x[token]
        keep_all = mx.array(expected[:, 0] <= logits.min(1))  # the kernel says -inf then
        lowest = mx.array(expected[:, 0].astype(np.float32))
        device_logits, filters = mx.array(logits), filters_of(FILTERS)

        def run(launch: Launcher) -> mx.array:
            cut, token = sample_rows(device_logits, filters, launch)
            chosen = mx.take_along_axis(device_logits, token[:, None], axis=1)[:, 0]
            cut = mx.where(keep_all & (cut == -mx.inf), lowest, cut)
            return mx.stack([cut, chosen], axis=1)

        return Problem(self.name, expected, 1e-6, [sample_rows_call(device_logits, filters)], run)

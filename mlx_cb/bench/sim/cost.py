"""How long a forward pass takes, from what is in it.

`AppleCost` is the formula of performance.md §2 (measurements of others, physics, no Mac here);
`FittedCost` is a fit of measured passes, and how this machine's CPU is described. Knows shapes, not
requests.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

from mlx_cb.bench.sim.machines import Chip, ModelShape


@dataclass(slots=True)
class PassShape:
    """What one forward pass computes. Not changed once made.

    Attributes:
        rows: tokens, of decodes, chunks and padding.
        sampled: rows whose logits are computed.
        context: tokens whose keys and values are read: each decode row's context, and what comes
            before each chunk.
        chunks: parts of prefill, each with an attention of its own.
        pairs: query-key pairs of the chunks that causality leaves, c·(s + c/2), c tokens after s.
        scores: the same without causality, c·(s + c).
        copied: tokens whose keys and values are moved elsewhere for this pass; moving any takes a
            few operations in every layer, however little there is.
    """

    rows: int
    sampled: int = 0
    context: int = 0
    chunks: int = 0
    pairs: float = 0.0
    scores: float = 0.0
    copied: int = 0


class PassCost(Protocol):
    """Predicts passes.

    Attributes:
        spread: standard deviation of the logarithm of real time over predicted time.
    """

    spread: float

    def seconds(self, shape: PassShape) -> float:
        """Mean time of passes of this shape."""
        ...


def draw_seconds(cost: PassCost, shape: PassShape, noise: random.Random) -> float:
    """Time of one pass: log-normal around the mean."""
    seconds = cost.seconds(shape)
    if cost.spread:
        seconds *= noise.lognormvariate(-(cost.spread**2) / 2, cost.spread)
    return seconds


class AppleCost:
    """Weights once, tiles of matrix rows, keys and values once, attention, a fixed part per layer.

    Source: performance.md §2 and the measurements named there. Copies are free: that favours the
    peer, the only one who makes any.
    """

    spread = 0.0

    def __init__(self, chip: Chip, model: ModelShape) -> None:
        self.chip = chip
        self.model = model
        launches = 2 if model.experts else 1
        self._fixed = model.layers * chip.layer_us * 1e-6 * launches + 0.2e-3
        self._per_context = model.kv_bytes / (chip.bandwidth * chip.kv_efficiency)
        self._per_pair = 4 * model.layers * model.attention_width / (0.6 * chip.flops)

    def seconds(self, shape: PassShape) -> float:
        """See PassCost."""
        return (
            self._matrices(shape.rows)
            + self._per_context * shape.context
            + self._per_pair * shape.pairs
            + self._fixed
        )

    def _matrices(self, rows: int) -> float:
        chip, model = self.chip, self.model
        read = 0.91 * chip.bandwidth
        if model.experts is not None:
            weights = model.experts.bytes_read(rows)
            return max(weights / read, 2 * model.parameters * rows / (0.6 * chip.flops))
        once = model.weight_bytes / read
        tiles = -(-rows // chip.tile_rows)
        tiled = max(once, 2 * model.parameters * chip.tile_rows * tiles / chip.flops)
        if rows >= chip.vector_limit:
            return tiled
        slope = max(1.0, 0.31 * rows) if chip.wide_vectors else max(1.0, 0.4 + 0.6 * rows)
        return min(once * slope, tiled)


BLAS_ROWS = 4  # that OpenBLAS takes at once; the engine's own figure is model.matmul_tiles.CPU_TILE
KNOTS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048)


def features(shape: PassShape) -> list[float]:
    """The terms of FittedCost: a constant, rows between each two knots, and the shape's parts.

    Of the rows that are left over behind the fours, two are one more pass over the weights, and so
    is one: 11 rows take longer than 12.
    """
    below = [
        float(max(0, min(shape.rows, high) - low))
        for low, high in zip(KNOTS, (*KNOTS[1:], 10**9), strict=True)
    ]
    return [
        1.0,
        *below,
        float((shape.rows % BLAS_ROWS).bit_count()),
        float(shape.sampled),
        float(shape.chunks),
        float(shape.context),
        float(shape.scores),
        float(shape.copied),
        float(shape.copied > 0),
    ]


class FittedCost:
    """A line in every feature; `fit.fit_cost` finds the coefficients, all at least 0."""

    def __init__(self, coefficients: tuple[float, ...], spread: float = 0.0) -> None:
        if len(coefficients) != len(features(PassShape(1))):
            raise ValueError("the coefficients are not those of the features")
        self.coefficients = coefficients
        self.spread = spread
        self._by_rows: dict[int, float] = {}
        self._sampled, self._chunks, self._context, self._scores = coefficients[-6:-2]
        self._copied, self._move = coefficients[-2:]

    def seconds(self, shape: PassShape) -> float:
        """See PassCost."""
        return (
            self._rows(shape.rows)
            + self._sampled * shape.sampled
            + self._chunks * shape.chunks
            + self._context * shape.context
            + self._scores * shape.scores
            + self._copied * shape.copied
            + self._move * (shape.copied > 0)
        )

    def at_pace(self, pace: float) -> FittedCost:
        """The same passes, each taking `pace` times as long."""
        return FittedCost(tuple(pace * value for value in self.coefficients), self.spread)

    def _rows(self, rows: int) -> float:
        found = self._by_rows.get(rows)
        if found is None:
            terms = zip(self.coefficients, features(PassShape(rows)), strict=True)
            found = self._by_rows[rows] = sum(factor * value for factor, value in terms)
        return found

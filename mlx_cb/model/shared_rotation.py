"""Rotary embedding whose angles all layers of a step share; for MLX's CPU backend.

There `mx.fast.rope` is a graph of plain operations that takes sines and cosines anew in every
layer, for queries and for keys: twice the work of all else in it. The rows of a step have the same
positions in all layers. The operations are those of MLX, so every bit is the same; a test holds
them equal. Knows nothing about requests.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np


class Angles:
    """Cosines and sines for the newest positions, by kind of layer.

    Positions are known by identity: arrays do not change, and a step's layers get the same one.
    """

    def __init__(self) -> None:
        self._positions: mx.array | None = None
        self._made: dict[tuple[int, float, float], tuple[mx.array, mx.array]] = {}

    def of(
        self, positions: mx.array, dims: int, base: float, scale: float
    ) -> tuple[mx.array, mx.array]:
        """(T, 1, 1, dims) cosines, and sines with their sign, of (T,) positions."""
        if positions is not self._positions:
            self._positions, self._made = positions, {}
        key = (dims, base, scale)
        if key not in self._made:
            half = dims // 2
            exponents = mx.arange(0, -half, -1, dtype=mx.float32)
            # MLX takes logarithm and quotient in float32: the last bit shows at far positions.
            inverse = mx.exp(exponents * float(np.float32(math.log(base)) / np.float32(half)))
            angles = (positions.astype(mx.float32) * scale).reshape(-1, 1, 1, 1) * inverse
            cosines, sines = mx.cos(angles), mx.sin(angles)
            self._made[key] = (
                mx.concatenate([cosines, cosines], axis=-1),
                mx.concatenate([-sines, sines], axis=-1),
            )
        return self._made[key]


def share_rotation(model: nn.Module) -> int:
    """Let the model's plain rotary layers share their angles within a step.

    A layer's class is replaced by a subclass, which takes rows of length one with positions of
    their own, in float32; all else goes the way it went.

    Returns: the number of layers bound.
    """
    shared = _shared_class(Angles())
    layers = [layer for layer in model.modules() if type(layer) is nn.RoPE]
    for layer in layers:
        layer.__class__ = shared
    return len(layers)


def _shared_class(angles: Angles) -> type[nn.RoPE]:
    class SharedRoPE(nn.RoPE):
        """RoPE over the angles of the step; x is (T, H, 1, D), offset (T,)."""

        def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
            if not self._takes(x, offset):
                return super().__call__(x, offset)
            cosines, sines = angles.of(offset, self.dims, self.base, self.scale)
            half = self.dims // 2
            left, right = x[..., :half], x[..., half : self.dims]
            swapped = mx.concatenate([right, left], axis=-1)
            rotated = x[..., : self.dims] * cosines + swapped * sines
            if self.dims == x.shape[-1]:
                return rotated
            return mx.concatenate([rotated, x[..., self.dims :]], axis=-1)

        def _takes(self, x: mx.array, offset: Any) -> bool:
            are_rows = isinstance(offset, mx.array) and offset.shape == x.shape[:1]
            fits = x.ndim == 4 and x.shape[2] == 1 and x.dtype == mx.float32
            return bool(are_rows and fits and not self.traditional)

    return SharedRoPE

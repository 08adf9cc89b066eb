"""Lets a model's quantized layers use qmm_small for the few rows of a decode step.

Owns: which layers and row counts take our kernel. Where MLX already reads weights once per step
(GPU generation 15 and later) tuning says never, and nothing is bound. Knows nothing about requests.
"""

from __future__ import annotations

import logging
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_cb.attention.kernels import Launcher
from mlx_cb.model.metal_cases import QmmCase
from mlx_cb.model.metal_ops import MAX_ROWS, qmm_small

_log = logging.getLogger(__name__)


def bind_small_matmul(model: nn.Module, max_rows: int, launch: Launcher) -> int:
    """Give the model's 4- and 8-bit affine linear layers a path for 2 to `max_rows` rows.

    A layer's class is replaced by a subclass, so weights and names stay where they are. Every
    variant is compared with float64 first; one that fails is left to MLX, with a warning.

    Returns:
        The number of layers bound.
    """
    limit = min(max_rows, MAX_ROWS)
    if limit < 2:
        return 0
    proven: dict[tuple[int, int, mx.Dtype], bool] = {}
    bound = 0
    for module in model.modules():
        if type(module) is not nn.QuantizedLinear or not _fits(module):
            continue
        variant = (module.bits, module.group_size, module.scales.dtype)
        if variant not in proven:
            proven[variant] = _is_right(*variant, launch)
        if proven[variant]:
            module.__class__ = _few_rows_class(limit, launch)
            bound += 1
    return bound


def _fits(layer: nn.QuantizedLinear) -> bool:
    affine = getattr(layer, "mode", "affine") == "affine"
    return bool(affine and layer.bits in (4, 8) and layer.group_size in (32, 64, 128))


def _is_right(bits: int, group_size: int, dtype: mx.Dtype, launch: Launcher) -> bool:
    for rows in (2, 3, 5, 9):
        problem = QmmCase(rows, 4 * group_size, 40, bits, group_size, dtype).build()
        try:
            error = problem.error(problem.run(launch))
        except RuntimeError as failure:
            _log.warning("Metal kernel qmm_small is switched off: %s", str(failure)[:300])
            return False
        if not error <= problem.tolerance:
            _log.warning("Metal kernel qmm_small is switched off: error %.1e", error)
            return False
    return True


def _few_rows_class(max_rows: int, launch: Launcher) -> type[nn.QuantizedLinear]:
    class FewRowsQuantizedLinear(nn.QuantizedLinear):
        """QuantizedLinear that reads its weights once for 2 to `max_rows` rows."""

        def __call__(self, x: mx.array) -> Any:
            rows = x.size // x.shape[-1]
            if not 2 <= rows <= max_rows or x.dtype != self.scales.dtype:
                return super().__call__(x)
            flat = x.reshape(rows, x.shape[-1])
            assert self.biases is not None  # affine layers have them
            out = qmm_small(
                flat, self.weight, self.scales, self.biases, self.group_size, self.bits, launch
            ).reshape(*x.shape[:-1], -1)
            return out + self["bias"] if "bias" in self else out

    return FewRowsQuantizedLinear

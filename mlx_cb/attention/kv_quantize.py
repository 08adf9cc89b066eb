"""Builds the call of kv_quantize: new keys or values to int8 or 4-bit codes."""

from __future__ import annotations

import mlx.core as mx

from mlx_cb.attention.kernels import KernelCall, Launcher, load_kernel
from mlx_cb.attention.paged import QUANT_GROUP, QuantizedRows, int_row

_SIMDGROUPS = 8


def quantize_call(rows: mx.array, bits: int) -> KernelCall:
    """The call of kv_quantize; see quantize_rows."""
    *outer, dim = rows.shape
    if bits not in (4, 8) or dim % QUANT_GROUP:
        raise ValueError(
            f"kv_quantize: {bits} bits of head dim {dim}; needs 4 or 8 bits and a head dim that "
            f"is a multiple of {QUANT_GROUP}"
        )
    groups = rows.size // QUANT_GROUP
    per_row = (*outer, dim // QUANT_GROUP)
    codes = ((*outer, dim), mx.int8) if bits == 8 else ((*outer, dim // 8), mx.uint32)
    return KernelCall(
        load_kernel("kv_quantize"),
        (rows, int_row(groups)),
        (("T", rows.dtype), ("BITS", bits)),
        (32 * -(-groups // _SIMDGROUPS) * _SIMDGROUPS, 1, 1),
        (32 * _SIMDGROUPS, 1, 1),
        (codes[0], per_row, per_row if bits == 4 else (8,)),
        (codes[1], mx.float16, mx.float16),
    )


def quantize_rows(rows: mx.array, bits: int, launch: Launcher) -> QuantizedRows:
    """Quantize (..., D) in groups of 32.

    Raises:
        ValueError: bits is not 4 or 8, or D is no multiple of 32.
    """
    return QuantizedRows(*launch(quantize_call(rows, bits)))

"""Metal kernels outside attention: quantized matmul of few rows, and the sampler's cut.

Owns: building their calls, and which shapes they accept. Knows nothing about layers or requests.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_cb.attention.kernels import MIN_ELEMENTS, KernelCall, Launcher, load_kernel, pad_elements
from mlx_cb.attention.paged import int_row

_SIMDGROUPS = 8
_COLUMNS = 4
MAX_ROWS = 16
SAMPLE_SIMDGROUPS = 16


def qmm_small_call(
    x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, group_size: int, bits: int
) -> KernelCall:
    """The call of qmm_small; see there."""
    rows, k = x.shape
    n = w.shape[0]
    if not 1 <= rows <= MAX_ROWS or bits not in (4, 8) or group_size not in (32, 64, 128):
        raise ValueError(
            f"qmm_small: {rows} rows, {bits} bits, groups of {group_size}; takes 1 to {MAX_ROWS} "
            "rows, 4 or 8 bits, groups of 32, 64 or 128"
        )
    if scales.size < MIN_ELEMENTS:
        raise ValueError(
            f"qmm_small: {scales.size} groups of weights; takes {MIN_ELEMENTS} or more"
        )
    # the row count is rounded up to a power of two: four compiled variants instead of sixteen
    padded = 1 << (rows - 1).bit_length()
    columns = _COLUMNS if padded <= 8 else 2
    per_group = columns * _SIMDGROUPS
    threads = 32 * _SIMDGROUPS
    return KernelCall(
        load_kernel("qmm_small"),
        (x, w, scales, biases, int_row(rows, k, n)),
        (("T", x.dtype), ("BITS", bits), ("GS", group_size), ("M", padded), ("R", columns)),
        (threads * -(-n // per_group), 1, 1),
        (threads, 1, 1),
        ((rows, n),),
        (x.dtype,),
    )


def qmm_small(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array,
    group_size: int,
    bits: int,
    launch: Launcher,
) -> mx.array:
    """x @ dequantize(w).T, reading each weight once for all rows.

    Args:
        x: (M, K), M <= 16.
        w: uint32 (N, K * bits / 32); scales, biases: (N, K / group_size): MLX's affine format.

    Returns:
        (M, N) of x's type.

    Raises:
        ValueError: a shape or format outside those.
    """
    return launch(qmm_small_call(x, w, scales, biases, group_size, bits))[0]


def sample_rows_call(
    logits: mx.array,
    top_k: mx.array,
    top_p: mx.array,
    min_p: mx.array,
    simdgroups: int = SAMPLE_SIMDGROUPS,
) -> KernelCall:
    """The call of sample_rows; see there."""
    rows, vocabulary = logits.shape
    return KernelCall(
        load_kernel("sample_rows"),
        (
            logits,
            pad_elements(top_k),
            pad_elements(top_p),
            pad_elements(min_p),
            int_row(vocabulary),
        ),
        (("NSG", simdgroups),),
        (32 * simdgroups * rows, 1, 1),
        (32 * simdgroups, 1, 1),
        ((rows,),),
        (mx.float32,),
    )


def sample_rows(
    logits: mx.array, top_k: mx.array, top_p: mx.array, min_p: mx.array, launch: Launcher
) -> mx.array:
    """The lowest logit that each row's filters keep; ties with it are kept too.

    Applied in this order: the top_k largest; of those the fewest whose probability reaches top_p;
    those with at least min_p times the largest probability. top_k <= 0, top_p outside (0, 1) and
    min_p <= 0 are off.

    Args:
        logits: float32 (R, V), already divided by the temperature.
        top_k: int32 (R,). top_p, min_p: float32 (R,).

    Returns:
        float32 (R,).
    """
    return launch(sample_rows_call(logits, top_k, top_p, min_p))[0]

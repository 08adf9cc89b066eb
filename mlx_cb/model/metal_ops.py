"""Metal kernels outside attention: quantized matmul of few rows, and sampling.

Owns: building their calls, and which shapes they accept. Knows nothing about layers or requests.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class SampleFilters:
    """Per-row parameters of sample_rows, all (R,).

    top_k int32, <= 0 is off. top_p float32, outside (0, 1) is off. min_p float32, <= 0 is off.
    uniform float32 in [0, 1): the row's random number. Greedy is top_k 1 and uniform 0.
    """

    top_k: mx.array
    top_p: mx.array
    min_p: mx.array
    uniform: mx.array

    def arrays(self) -> tuple[mx.array, ...]:
        """In the kernel's order, padded."""
        columns = (self.top_k, self.top_p, self.min_p, self.uniform)
        return tuple(pad_elements(column) for column in columns)


def sample_rows_call(
    logits: mx.array, filters: SampleFilters, simdgroups: int = SAMPLE_SIMDGROUPS
) -> KernelCall:
    """The call of sample_rows; see there."""
    rows, vocabulary = logits.shape
    return KernelCall(
        load_kernel("sample_rows"),
        (logits, *filters.arrays(), int_row(vocabulary)),
        (("NSG", simdgroups),),
        (32 * simdgroups * rows, 1, 1),
        (32 * simdgroups, 1, 1),
        ((rows,), (rows,)),
        (mx.float32, mx.int32),
    )


def sample_rows(
    logits: mx.array, filters: SampleFilters, launch: Launcher
) -> tuple[mx.array, mx.array]:
    """Choose a token per row, without sorting the vocabulary.

    Kept are the top_k largest; of those the fewest whose probability reaches top_p; of those the
    ones with at least min_p times the largest probability; logits equal to the last kept one stay.
    The token is the first, by id, at which the cumulated probability exceeds `uniform` of what is
    kept.

    Args:
        logits: float32 (R, V), already divided by the temperature.

    Returns:
        The lowest kept logit, float32 (R,), -inf if all are, and the token, int32 (R,).
    """
    threshold, token = launch(sample_rows_call(logits, filters))
    return threshold, token

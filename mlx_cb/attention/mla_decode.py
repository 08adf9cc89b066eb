"""Builds the calls of mla_decode: absorbed MLA, one new token per sequence."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_cb.attention.kernels import KernelCall, Launcher, load_kernel
from mlx_cb.attention.paged import PagedContext, float_row, int_row, with_inputs
from mlx_cb.attention.paged_decode import merge_call
from mlx_cb.attention.tuning import Tuning


@dataclass(frozen=True, slots=True)
class LatentPool:
    """One latent layer in blocks.

    latent: (num_blocks, block_size, rank), first part of the keys, and the values.
    rotated: (num_blocks, block_size, rope), last part of the keys.
    """

    latent: mx.array
    rotated: mx.array


def slices(dim: int, value_dim: int) -> int | None:
    """Simdgroups that share the columns of 8 heads; None when they are not whole 8x8 matrices."""
    for count in (4, 2, 1):
        if dim % (8 * count) == 0 and value_dim % (8 * count) == 0:
            return count
    return None


def mla_calls(
    queries: mx.array, pool: LatentPool, context: PagedContext, scale: float, tuning: Tuning
) -> list[KernelCall]:
    """The one or two calls of mla_decode; the second's first two inputs are the first's outputs.

    Raises ValueError for widths that `slices` cannot share out.
    """
    count, heads, dim = queries.shape
    block_size, value_dim = pool.latent.shape[1:]
    num_slices = slices(dim, value_dim)
    if num_slices is None:
        raise ValueError(f"no tile for latents of {value_dim} and keys of {dim} columns")
    head_block = 16 if heads > 8 else 8
    blocks = -(-heads // head_block)
    split = context.longest > tuning.partition and count * blocks < tuning.fill
    partition = tuning.partition if split else 0
    parts = -(-context.longest // partition) if split else 1
    threads = head_block // 8 * num_slices * 32
    tables, lengths = context.block_tables, context.context_lens
    out_type = mx.float32 if split else queries.dtype
    decode = KernelCall(
        load_kernel("mla_decode"),
        (
            queries,
            pool.latent,
            pool.rotated,
            tables,
            lengths,
            int_row(parts, context.max_blocks, heads),
            float_row(scale),
        ),
        (
            ("T", queries.dtype),
            ("TO", out_type),
            ("DK", dim),
            ("DV", value_dim),
            ("BS", block_size),
            ("HB", head_block),
            ("NSL", num_slices),
            ("TK", 16 if queries.dtype.size == 2 else 8),
            ("PART", partition),
        ),
        (threads, blocks, count * parts),
        (threads, 1, 1),
        ((count, heads, parts, value_dim), (count, heads, parts, 2) if split else (8,)),
        (out_type, mx.float32),
    )
    if not split:
        return [decode]
    return [decode, merge_call(decode, lengths, None, None)]


def mla_decode(
    queries: mx.array,
    pool: LatentPool,
    context: PagedContext,
    scale: float,
    tuning: Tuning,
    launch: Launcher,
) -> mx.array:
    """Attend one token per sequence to its latents.

    Args:
        queries: (S, H, rank + rope), absorbed: latent part then rotary part.
        pool: of the queries' type.

    Returns:
        (S, H, rank).
    """
    calls = mla_calls(queries, pool, context, scale, tuning)
    outputs = launch(calls[0])
    if len(calls) == 1:
        return outputs[0].reshape(*queries.shape[:2], -1)
    return launch(with_inputs(calls[1], outputs))[0]

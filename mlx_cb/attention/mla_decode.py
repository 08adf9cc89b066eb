"""Builds the calls of mla_decode: absorbed MLA, one new token per sequence."""

from __future__ import annotations

import mlx.core as mx

from mlx_cb.attention.kernels import KernelCall, Launcher, load_kernel
from mlx_cb.attention.paged import PagedContext, float_row, int_row, with_inputs
from mlx_cb.attention.paged_decode import merge_call
from mlx_cb.attention.tuning import Tuning

_SLICES = 4


def mla_calls(
    queries: mx.array,
    latent: mx.array,
    context: PagedContext,
    scale: float,
    value_dim: int,
    tuning: Tuning,
) -> list[KernelCall]:
    """The one or two calls of mla_decode; the second's first two inputs are the first's outputs."""
    count, heads, dim = queries.shape
    head_block = 16 if heads > 8 else 8
    blocks = -(-heads // head_block)
    split = context.longest > tuning.partition and count * blocks < tuning.fill
    partition = tuning.partition if split else 0
    parts = -(-context.longest // partition) if split else 1
    threads = head_block // 8 * _SLICES * 32
    tables, lengths = context.block_tables, context.context_lens
    out_type = mx.float32 if split else queries.dtype
    decode = KernelCall(
        load_kernel("mla_decode"),
        (
            queries,
            latent,
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
            ("BS", latent.shape[1]),
            ("HB", head_block),
            ("NSL", _SLICES),
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
    latent: mx.array,
    context: PagedContext,
    scale: float,
    value_dim: int,
    tuning: Tuning,
    launch: Launcher,
) -> mx.array:
    """Attend one token per sequence to its latents.

    Args:
        queries: (S, H, DK), absorbed: latent part then rotary part.
        latent: (num_blocks, block_size, DK) of the queries' type; the values are its first
            `value_dim` columns.

    Returns:
        (S, H, value_dim).
    """
    calls = mla_calls(queries, latent, context, scale, value_dim, tuning)
    outputs = launch(calls[0])
    if len(calls) == 1:
        return outputs[0].reshape(queries.shape[0], queries.shape[1], value_dim)
    return launch(with_inputs(calls[1], outputs))[0]

"""Builds the calls of paged_decode: 1 or 2 new tokens per sequence against their paged context.

Owns: how a problem's shape becomes template values and a grid, and when the context is split.
Pure functions of their arguments; the launcher decides who runs the call.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_cb.attention.kernels import KernelCall, Launcher, load_kernel
from mlx_cb.attention.paged import (
    THREADGROUP_BYTES,
    AttentionShape,
    KVPool,
    PagedContext,
    float_row,
    int_row,
    sink_array,
    with_inputs,
)
from mlx_cb.attention.tuning import Tuning


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """How paged_decode is cut. `partition` 0: the context is not split."""

    heads_per_simdgroup: int
    head_simdgroups: int
    key_simdgroups: int
    keys_per_step: int
    tile: int
    chunks: int
    partition: int


def plan_decode(
    slots: int, dims: tuple[int, int], item: int, groups: int, span: int, tuning: Tuning
) -> DecodePlan:
    """Choose the cut.

    Args:
        slots: query heads per KV head x query rows.
        dims: head dim of keys and of values.
        item: bytes per element of the queries' type (the staged tile's type).
        groups: sequences x KV heads.
        span: longest number of keys a row sees.
    """
    widest = max(dims)
    per_simdgroup = min(slots, max(1, tuning.registers // widest))
    head_parts = -(-slots // per_simdgroup)
    per_simdgroup = -(-slots // head_parts)
    chunks = -(-head_parts // 16)
    head_parts = -(-head_parts // chunks)
    keys = max(1, min(tuning.key_simdgroups // head_parts, 16384 // (4 * dims[1] * head_parts)))
    tile = 1
    if head_parts > 1:
        room = THREADGROUP_BYTES - 1024 - (head_parts * keys * dims[1] * 4 if keys > 1 else 4)
        tile = max(1, min(16, room // (sum(dims) * item)))
    split = span > tuning.partition and groups * chunks < tuning.fill
    per_step = max(1, min(tuning.keys_per_step, 512 // widest))
    if head_parts > 1:
        per_step = max(1, min(per_step, tile // keys))
    partition = tuning.partition if split else 0
    return DecodePlan(per_simdgroup, head_parts, keys, per_step, tile, chunks, partition)


def paged_decode(
    queries: mx.array,
    pool: KVPool,
    context: PagedContext,
    shape: AttentionShape,
    sinks: mx.array | None,
    tuning: Tuning,
    launch: Launcher,
) -> mx.array:
    """Attend `shape.rows` new tokens of each sequence to its context.

    Args:
        queries: (S * rows, Hq, D); the rows of a sequence are its last tokens, in order.
        sinks: float (Hq,) or None.

    Returns:
        (S * rows, Hq, DV) of the queries' type.
    """
    calls = decode_calls(queries, pool, context, shape, sinks, tuning)
    outputs = launch(calls[0])
    if len(calls) == 1:
        return outputs[0].reshape(queries.shape[0], queries.shape[1], -1)
    return launch(with_inputs(calls[1], outputs))[0]


def decode_calls(
    queries: mx.array,
    pool: KVPool,
    context: PagedContext,
    shape: AttentionShape,
    sinks: mx.array | None,
    tuning: Tuning,
) -> list[KernelCall]:
    """The one or two calls of paged_decode; the second's first inputs are the first's outputs."""
    total, heads, dim = queries.shape
    rows, kv_heads, value_dim = shape.rows, pool.kv_heads, pool.value_dim()
    count, group = total // rows, heads // kv_heads
    span = min(context.longest, shape.window + rows - 1) if shape.window else context.longest
    plan = plan_decode(
        group * rows, (dim, value_dim), queries.dtype.size, count * kv_heads, span, tuning
    )
    parts = -(-span // plan.partition) if plan.partition else 1
    simdgroups = plan.head_simdgroups * plan.key_simdgroups
    tables, lengths = context.block_tables, context.context_lens
    template = (
        ("T", queries.dtype),
        ("TO", mx.float32 if plan.partition else queries.dtype),
        ("D", dim),
        ("DV", value_dim),
        ("BS", pool.block_size),
        ("G", group),
        ("ROWS", rows),
        ("HPT", plan.heads_per_simdgroup),
        ("NH", plan.head_simdgroups),
        ("NK", plan.key_simdgroups),
        ("KU", plan.keys_per_step),
        ("TK", plan.tile),
        ("PART", plan.partition),
        ("SINKS", sinks is not None),
        ("WINDOW", shape.window is not None),
        ("SOFTCAP", shape.softcap is not None),
    )
    dims = int_row(parts, context.max_blocks, kv_heads, shape.window or 0)
    scalars = float_row(shape.scale, shape.softcap or 0.0)
    out_shape = (total, heads, parts, value_dim)
    decode = KernelCall(
        load_kernel("paged_decode"),
        (queries, *pool.arrays(), tables, lengths, sink_array(sinks), dims, scalars),
        template,
        (32 * simdgroups, kv_heads * plan.chunks, count * parts),
        (32 * simdgroups, 1, 1),
        (out_shape, (total, heads, parts, 2) if plan.partition else (8,)),
        (mx.float32 if plan.partition else queries.dtype, mx.float32),
    )
    if not plan.partition:
        return [decode]
    return [decode, merge_call(decode, lengths, sinks, shape.window)]


def merge_call(
    decode: KernelCall, context_lens: mx.array, sinks: mx.array | None, window: int | None
) -> KernelCall:
    """The call of paged_decode_merge after a split `decode` (or mla_decode) call.

    Its first two inputs, the partials, are missing: they are the outputs of `decode`.
    """
    chosen = dict(decode.template)
    total, heads, parts, value_dim = decode.output_shapes[0]
    return KernelCall(
        load_kernel("paged_decode_merge"),
        (context_lens, sink_array(sinks), int_row(parts, 0, heads, window or 0)),
        (
            ("T", chosen["T"]),
            ("DV", value_dim),
            ("ROWS", chosen.get("ROWS", 1)),
            ("PART", chosen["PART"]),
            ("SINKS", sinks is not None),
            ("WINDOW", window is not None),
        ),
        (32, heads, total),
        (32, 1, 1),
        ((total, heads, value_dim),),
        (chosen["T"],),
    )

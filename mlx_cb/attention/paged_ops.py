"""Builds the calls of the paged attention kernels: paged_decode (+ merge), kv_quantize.

Owns: how a problem's shape becomes template values, a grid and padded metadata. Pure functions of
their arguments; the launcher decides who runs the call. Knows nothing about steps, requests or layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np

from .kernels import KernelCall, Launcher, load_kernel, pad_elements
from .tuning import Tuning

QUANT_GROUP = 32
"""Elements that share a scale in an int8 or 4-bit pool."""
THREADGROUP_BYTES = 32768


@dataclass(frozen=True, slots=True)
class KVPool:
    """One layer's keys and values as the kernels read them.

    keys, values: (num_blocks, Hkv, block_size, D) float; or int8 of that shape; or uint32 with
    D / 8 words (4-bit). Scales and biases of quantized pools: float16 (num_blocks, Hkv, block_size,
    D / 32). value = code * scale (+ bias for 4-bit).
    """

    keys: mx.array
    values: mx.array
    k_scale: mx.array
    v_scale: mx.array
    k_bias: mx.array
    v_bias: mx.array

    @staticmethod
    def dense(keys: mx.array, values: mx.array) -> KVPool:
        unused = _unused(mx.float16)
        return KVPool(keys, values, unused, unused, unused, unused)

    @staticmethod
    def quantized(keys: QuantizedRows, values: QuantizedRows) -> KVPool:
        return KVPool(
            keys.codes, values.codes, keys.scale, values.scale, keys.bias, values.bias
        )

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[1]

    def value_dim(self) -> int:
        return self.values.shape[3] * (8 if self.values.dtype == mx.uint32 else 1)

    def arrays(self) -> tuple[mx.array, ...]:
        return (
            self.keys, self.values, self.k_scale, self.v_scale, self.k_bias, self.v_bias
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """codes int8 (..., D) or uint32 (..., D / 8); scale float16 (..., D / 32); bias alike (4-bit)."""

    codes: mx.array
    scale: mx.array
    bias: mx.array


@dataclass(frozen=True, slots=True)
class PagedContext:
    """Where each sequence's keys lie.

    Attributes:
        block_tables: int32 (S, max_blocks); entries beyond a context are never read.
        context_lens: int32 (S,): tokens with keys, the query rows included.
        longest: the largest context, known on the host.
    """

    block_tables: mx.array
    context_lens: mx.array
    longest: int

    def padded(self) -> tuple[mx.array, mx.array]:
        return pad_elements(self.block_tables.reshape(-1)), pad_elements(self.context_lens)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a layer asks for beyond its arrays. `rows`: query rows per sequence in paged_decode."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    rows: int = 1


@cache
def _unused(dtype: mx.Dtype) -> mx.array:
    return mx.zeros((8,), dtype)


def _int_row(*values: int) -> mx.array:
    return mx.array(np.array([*values, *[0] * (8 - len(values))], np.int32))


def _float_row(*values: float) -> mx.array:
    return mx.array(np.array([*values, *[0.0] * (8 - len(values))], np.float32))


def _sink_array(sinks: mx.array | None) -> mx.array:
    return _unused(mx.float32) if sinks is None else pad_elements(sinks.astype(mx.float32))


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """How paged_decode is cut. `partition` 0: the context is not split."""

    heads_per_simdgroup: int
    head_simdgroups: int
    key_simdgroups: int
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
    return DecodePlan(
        per_simdgroup, head_parts, keys, tile, chunks, tuning.partition if split else 0
    )


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
    merge = calls[1]
    return launch(_with_partials(merge, outputs))[0]


def decode_calls(
    queries: mx.array,
    pool: KVPool,
    context: PagedContext,
    shape: AttentionShape,
    sinks: mx.array | None,
    tuning: Tuning,
) -> list[KernelCall]:
    """The one or two calls of paged_decode; the second's first two inputs are the first's outputs."""
    total, heads, dim = queries.shape
    rows, kv_heads, value_dim = shape.rows, pool.kv_heads, pool.value_dim()
    count, group = total // rows, heads // kv_heads
    span = min(context.longest, shape.window + rows - 1) if shape.window else context.longest
    plan = plan_decode(
        group * rows, (dim, value_dim), queries.dtype.size, count * kv_heads, span, tuning
    )
    parts = -(-span // plan.partition) if plan.partition else 1
    simdgroups = plan.head_simdgroups * plan.key_simdgroups
    tables, lengths = context.padded()
    flags = (
        ("SINKS", sinks is not None),
        ("WINDOW", shape.window is not None),
        ("SOFTCAP", shape.softcap is not None),
    )
    template = (
        ("T", queries.dtype), ("TO", mx.float32 if plan.partition else queries.dtype), ("D", dim),
        ("DV", value_dim), ("BS", pool.block_size), ("G", group), ("ROWS", rows),
        ("HPT", plan.heads_per_simdgroup), ("NH", plan.head_simdgroups),
        ("NK", plan.key_simdgroups), ("TK", plan.tile), ("PART", plan.partition), *flags,
    )  # fmt: skip
    dims = _int_row(parts, context.block_tables.shape[1], kv_heads, shape.window or 0)
    scalars = _float_row(shape.scale, shape.softcap or 0.0)
    out_shape = (total, heads, parts, value_dim)
    decode = KernelCall(
        load_kernel("paged_decode"),
        (queries, *pool.arrays(), tables, lengths, _sink_array(sinks), dims, scalars),
        template,
        (32 * simdgroups, kv_heads * plan.chunks, count * parts),
        (32 * simdgroups, 1, 1),
        (out_shape, (total, heads, parts, 2) if plan.partition else (8,)),
        (mx.float32 if plan.partition else queries.dtype, mx.float32),
    )
    if not plan.partition:
        return [decode]
    merge = KernelCall(
        load_kernel("paged_decode_merge"),
        (lengths, _sink_array(sinks), _int_row(parts, 0, heads, shape.window or 0)),
        (("T", queries.dtype), ("DV", value_dim), ("ROWS", rows), ("PART", plan.partition),
         *flags[:2]),
        (32, heads, total),
        (32, 1, 1),
        ((total, heads, value_dim),),
        (queries.dtype,),
    )  # fmt: skip
    return [decode, merge]


def _with_partials(merge: KernelCall, partials: list[mx.array]) -> KernelCall:
    return KernelCall(
        merge.kernel, (*partials, *merge.inputs), merge.template, merge.grid, merge.threadgroup,
        merge.output_shapes, merge.output_dtypes,
    )  # fmt: skip

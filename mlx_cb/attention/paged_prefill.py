"""Builds the calls of paged_prefill: chunks of many query rows against their paged context.

Owns: tile sizes per head dim and type, and the work list. Pure functions of their arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_cb.attention.kernels import KernelCall, Launcher, load_kernel
from mlx_cb.attention.paged import (
    THREADGROUP_BYTES,
    AttentionShape,
    KVPool,
    PagedContext,
    float_row,
    host_array,
    int_row,
    sink_array,
)
from mlx_cb.attention.tuning import Tuning

_TILES = ((32, 32), (32, 16), (32, 8), (16, 16), (16, 8), (8, 8))


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """rows: query rows per threadgroup; tile: keys per step; splits: simdgroups per 8 rows."""

    rows: int
    tile: int
    splits: int


@dataclass(frozen=True, slots=True)
class PrefillChunks:
    """The query rows of a step, on the host and for the kernel.

    Attributes:
        starts: int32 (S + 1,): chunk s is rows starts[s] to starts[s + 1] of the queries; its last
            row is the last token of context s.
    """

    starts: NDArray[np.int32]
    _arrays: dict[int, tuple[mx.array, mx.array, int]] = field(default_factory=dict)

    def arrays(self, rows: int) -> tuple[mx.array, mx.array, int]:
        """`starts`, the work list for tiles of `rows`, and its length; made once per step."""
        if rows not in self._arrays:
            work = self.work_list(rows)
            self._arrays[rows] = (host_array(self.starts), host_array(work), len(work))
        return self._arrays[rows]

    def work_list(self, rows: int) -> np.ndarray:
        """int32 (W, 2): sequence and first row of every threadgroup's tile."""
        lengths = np.diff(self.starts)
        tiles = -(-lengths // rows)
        seqs = np.repeat(np.arange(len(lengths)), tiles)
        first = np.concatenate([np.arange(n) * rows for n in tiles]) if len(tiles) else np.zeros(0)
        return np.stack([seqs, first], 1).astype(np.int32)


def plan_prefill(dims: tuple[int, int], item: int, tuning: Tuning) -> PrefillPlan | None:
    """The largest tile that fits in threadgroup memory, or None.

    Args:
        dims: head dim of keys and of values.
        item: bytes per element of the queries' type.
    """
    widest = max(dims)
    most_rows = tuning.prefill_rows if widest <= 128 else 16
    most_keys = 16 if widest <= 128 else 8
    pad = 16 // item
    for rows, tile in _TILES:
        used = rows * (dims[0] + pad) + tile * (dims[0] + dims[1] + 2 * pad)
        if rows <= most_rows and tile <= most_keys and used * item <= THREADGROUP_BYTES:
            return PrefillPlan(rows, tile, 2 if dims[1] > 256 else 1)
    return None


def prefill_call(
    queries: mx.array,
    pool: KVPool,
    context: PagedContext,
    chunks: PrefillChunks,
    shape: AttentionShape,
    sinks: mx.array | None,
    tuning: Tuning,
) -> KernelCall:
    """The call of paged_prefill; see there. Raises ValueError if no tile fits."""
    _, heads, dim = queries.shape
    dims = (dim, pool.value_dim())
    plan = plan_prefill(dims, queries.dtype.size, tuning)
    if plan is None:
        raise ValueError(f"paged_prefill: no tile for head dim {dims} of {queries.dtype}")
    tables, lengths = context.block_tables, context.context_lens
    starts, work, tiles = chunks.arrays(plan.rows)
    group = heads // pool.kv_heads
    threads = plan.rows // 8 * plan.splits * 32
    return KernelCall(
        load_kernel("paged_prefill"),
        (
            queries,
            *pool.arrays(),
            tables,
            lengths,
            starts,
            work,
            sink_array(sinks),
            int_row(pool.kv_heads, context.max_blocks, shape.window or 0),
            float_row(shape.scale, shape.softcap or 0.0),
        ),
        (
            ("T", queries.dtype),
            ("D", dim),
            ("DV", dims[1]),
            ("BS", pool.block_size),
            ("BQ", plan.rows),
            ("TKV", plan.tile),
            ("DSPLIT", plan.splits),
            ("G", group),
            ("SINKS", sinks is not None),
            ("WINDOW", shape.window is not None),
            ("SOFTCAP", shape.softcap is not None),
        ),
        (threads * tiles, heads, 1),
        (threads, 1, 1),
        ((queries.shape[0], heads, dims[1]),),
        (queries.dtype,),
    )


def paged_prefill(
    queries: mx.array,
    pool: KVPool,
    context: PagedContext,
    chunks: PrefillChunks,
    shape: AttentionShape,
    sinks: mx.array | None,
    tuning: Tuning,
    launch: Launcher,
) -> mx.array:
    """Causal attention of ragged chunks.

    Args:
        queries: (T, Hq, D), the chunks one after another.

    Returns:
        (T, Hq, DV) of the queries' type.
    """
    return launch(prefill_call(queries, pool, context, chunks, shape, sinks, tuning))[0]

"""The attention backend in plain MLX operations: the specification, and the path on any CPU.

Blocks are gathered into contiguous keys and values, because MLX's CPU matrix product is several
times slower on transposed views. Decode rows of similar context are gathered together, so that the
work follows the sum of the contexts and not rows times the longest one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_cb.attention.addresses import BlockTable
from mlx_cb.attention.backend import AttentionBackend
from mlx_cb.attention.exponential import exp2
from mlx_cb.attention.kv_storage import KVLayer
from mlx_cb.attention.latent import LatentLayer
from mlx_cb.attention.metadata import AttentionMetadata

LOG2E = math.log2(math.e)
MASKED = -1e30  # finite, so that a row of masked scores gives no NaN
#: Padding, in tokens over all rows of a group, that costs as much as one more group per layer.
MAX_PADDING = 512
#: Scores that a chunk holds at once, in numbers: a long context under many heads would else take
#: gigabytes (latent attention has up to 128 heads over one key).
MAX_SCORES = 2**26


@dataclass(slots=True)
class _DecodeGroup:
    """Decode rows `start` to `stop`, padded to the longest of them."""

    start: int
    stop: int
    block_table: BlockTable  # (rows, blocks)
    seq_lens: mx.array  # (rows, 1, 1, 1) int32


@dataclass(slots=True)
class _Chunk:
    """Prefill rows `start` to `stop` of one request."""

    start: int
    stop: int
    block_table: BlockTable  # (1, blocks)
    positions: mx.array  # (rows, 1, 1) int32

    def cut(self, max_rows: int) -> list[_Chunk]:
        """Itself in pieces of at most `max_rows` rows, or of one."""
        rows, step = self.stop - self.start, max(1, max_rows)
        if rows <= step:
            return [self]
        return [
            _Chunk(
                self.start + first,
                self.start + min(first + step, rows),
                self.block_table,
                self.positions[first : first + step],
            )
            for first in range(0, rows, step)
        ]


class ReferenceBackend(AttentionBackend):
    """Gather, two matrix products and a softmax between them, the softmax in float32."""

    name = "reference"

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._groups: list[_DecodeGroup] = []
        self._chunks: list[_Chunk] = []
        self._masks: dict[tuple[int, int, int | None], mx.array] = {}

    def begin(self, metadata: AttentionMetadata) -> None:
        """Prepare the index arrays that all layers share; see AttentionBackend."""
        super().begin(metadata)
        seq_lens, tables = metadata.seq_lens, metadata.block_tables
        self._groups, self._masks = [], {}
        for start, stop in group_decodes(seq_lens[: metadata.num_decodes]):
            num_blocks = -(-int(seq_lens[stop - 1]) // self.block_size)
            table = BlockTable(mx.array(tables[start:stop, :num_blocks]))
            lengths = mx.array(seq_lens[start:stop].reshape(-1, 1, 1, 1))
            self._groups.append(_DecodeGroup(start, stop, table, lengths))
        self._chunks = []
        for entry in range(metadata.num_decodes, len(seq_lens)):
            start, stop = (int(row) for row in metadata.query_start_loc[entry : entry + 2])
            num_blocks = -(-int(seq_lens[entry]) // self.block_size)
            table = BlockTable(mx.array(tables[entry : entry + 1, :num_blocks]))
            positions = metadata.positions[start:stop].reshape(-1, 1, 1)
            self._chunks.append(_Chunk(start, stop, table, positions))

    def attend(
        self, layer: KVLayer | LatentLayer, queries: mx.array, scale: float, sinks: mx.array | None
    ) -> mx.array:
        """Attend group by group, chunk by chunk; see AttentionBackend."""
        if sinks is not None:
            sinks = sinks.astype(mx.float32).reshape(layer.spec.num_kv_heads, -1, 1) * LOG2E
        scaled = queries.squeeze(2) * (scale * LOG2E)
        parts = [self._attend_decodes(layer, scaled, group, sinks) for group in self._groups]
        parts += [self._attend_chunk(layer, scaled, chunk, sinks) for chunk in self._chunks]
        output = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        return output[:, :, None]

    def attend_latent(
        self, layer: KVLayer, queries: mx.array, rotated: mx.array, scale: float
    ) -> mx.array:
        """One KV head of rank + rope width; see AttentionBackend."""
        joined = mx.concatenate([queries * scale, rotated.astype(queries.dtype)], axis=-1)
        return self.attend(LatentLayer(layer), joined, 1.0, None)

    def _attend_decodes(
        self,
        layer: KVLayer | LatentLayer,
        queries: mx.array,
        group: _DecodeGroup,
        sinks: mx.array | None,
    ) -> mx.array:
        heads = layer.spec.num_kv_heads
        rows = group.stop - group.start
        if rows < queries.shape[0]:
            queries = queries[group.start : group.stop]
        q = queries.reshape(rows, heads, -1, layer.spec.key_dim)
        keys, values = layer.gather(group.block_table)
        scores = (q @ keys.swapaxes(-1, -2)).astype(mx.float32)  # (rows, Hkv, G, context)
        mask = self._mask(group.start, group.seq_lens - 1, scores.shape[-1], layer.spec.window)
        weights, total = _exponentials(scores + mask, sinks)
        output = (weights.astype(values.dtype) @ values) / total
        return output.astype(queries.dtype).reshape(rows, -1, layer.spec.value_dim)

    def _attend_chunk(
        self, layer: KVLayer | LatentLayer, queries: mx.array, chunk: _Chunk, sinks: mx.array | None
    ) -> mx.array:
        keys, values = (array[0] for array in layer.gather(chunk.block_table))
        window = layer.spec.window
        pieces = chunk.cut(MAX_SCORES // (queries.shape[1] * keys.shape[1]))
        parts = [self._attend_piece(queries, keys, values, p, window, sinks) for p in pieces]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def _attend_piece(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        piece: _Chunk,
        window: int | None,
        sinks: mx.array | None,
    ) -> mx.array:
        heads, rows = keys.shape[0], piece.stop - piece.start
        q = queries[piece.start : piece.stop].reshape(rows, heads, -1, keys.shape[-1])
        group_size = q.shape[2]
        q = q.swapaxes(0, 1).reshape(heads, rows * group_size, -1)
        scores = (q @ keys.swapaxes(-1, -2)).astype(mx.float32)  # (Hkv, rows * G, context)
        scores = scores.reshape(heads, rows, group_size, -1)
        mask = self._mask(piece.start, piece.positions, scores.shape[-1], window)
        if sinks is not None:
            sinks = sinks[:, None]
        weights, total = _exponentials(scores + mask, sinks)
        weights = weights.astype(values.dtype).reshape(heads, rows * group_size, -1)
        output = (weights @ values).reshape(heads, rows, group_size, -1) / total
        return output.astype(queries.dtype).swapaxes(0, 1).reshape(rows, heads * group_size, -1)

    def _mask(self, start: int, positions: mx.array, num_keys: int, window: int | None) -> mx.array:
        """What to add to the scores of the rows from `start` on, made once per step and window."""
        key = (start, positions.shape[0], window)
        if key not in self._masks:
            context = mx.arange(num_keys)
            visible = context <= positions
            if window is not None:
                visible = visible & (context > positions - window)
            self._masks[key] = mx.where(visible, 0.0, MASKED)
        return self._masks[key]


def _exponentials(scores: mx.array, sinks: mx.array | None) -> tuple[mx.array, mx.array]:
    """Unnormalised softmax weights over the last axis, and what to divide by.

    Scores are already multiplied by log2(e): powers of two are what the Metal kernels use, and
    faster than MLX's exp on a CPU. Dividing the output is less work than dividing the weights.
    """
    peak = mx.max(scores, axis=-1, keepdims=True)
    if sinks is not None:
        peak = mx.maximum(peak, sinks)
    weights = exp2(scores - peak)
    total = mx.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + exp2(sinks - peak)
    return weights, total


def group_decodes(seq_lens: np.ndarray) -> list[tuple[int, int]]:
    """Split rows of ascending context into (start, stop) groups of similar context.

    A group ends where padding its rows to a longer one would cost more than another group.
    """
    groups: list[tuple[int, int]] = []
    start, padding = 0, 0
    lengths = seq_lens.tolist()
    for row in range(1, len(lengths)):
        padding += (row - start) * (lengths[row] - lengths[row - 1])
        if padding > MAX_PADDING:
            groups.append((start, row))
            start, padding = row, 0
    if lengths:
        groups.append((start, len(lengths)))
    return groups

"""Where a step reads and writes in the arrays behind the blocks, as index arrays.

All layers with the same number of heads use the same ones: made once per step instead of once per
layer, they are a tenth of a small model's step on a CPU. Knows no layers and no requests.
"""

from __future__ import annotations

import mlx.core as mx

HeadIndex = tuple[mx.array, mx.array, mx.array]


class Slots:
    """Slots that T rows are written to: (T,) int32 block ids, and offsets inside the blocks."""

    __slots__ = ("_index", "block_ids", "offsets")

    def __init__(self, block_ids: mx.array, offsets: mx.array) -> None:
        self.block_ids = block_ids
        self.offsets = offsets
        self._index: dict[int, HeadIndex] = {}

    def index(self, num_heads: int) -> HeadIndex:
        """Three (T, num_heads) int32 arrays for arrays of (block, head, offset, width)."""
        if num_heads not in self._index:
            parts = (self.block_ids[:, None], mx.arange(num_heads)[None], self.offsets[:, None])
            block, head, offset = (mx.contiguous(p) for p in mx.broadcast_arrays(*parts))
            self._index[num_heads] = block, head, offset
        return self._index[num_heads]


class BlockTable:
    """Blocks of several contexts: (rows, blocks) int32 ids."""

    __slots__ = ("_tiles", "block_ids")

    def __init__(self, block_ids: mx.array) -> None:
        self.block_ids = block_ids
        self._tiles: dict[int, mx.array] = {}

    def tiles(self, num_heads: int) -> mx.array:
        """(rows, num_heads, blocks) int32: block_id * num_heads + head."""
        if num_heads not in self._tiles:
            heads = mx.arange(num_heads, dtype=mx.int32)[:, None]
            self._tiles[num_heads] = self.block_ids[:, None, :] * num_heads + heads
        return self._tiles[num_heads]

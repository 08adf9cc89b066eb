"""Owns the arrays behind the blocks, one pair per attention layer; knows nothing about requests.

A block of a KV head is one contiguous tile. Writes happen in place because nobody else holds the
array: never keep a second reference to `keys` or `values` across a write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class KVLayerSpec:
    """Shape of one attention layer's keys and values.

    `window` is the number of positions a query sees, itself included; None sees everything.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype
    window: int | None = None

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token's keys and values take in this layer."""
        return self.num_kv_heads * (self.key_dim + self.value_dim) * self.dtype.size


class KVLayer:
    """Keys and values of one layer: (num_blocks, num_kv_heads, block_size, dim)."""

    __slots__ = ("block_size", "keys", "spec", "values")

    def __init__(self, spec: KVLayerSpec, block_size: int) -> None:
        self.spec = spec
        self.block_size = block_size
        self.keys = self._zeros(0, spec.key_dim)
        self.values = self._zeros(0, spec.value_dim)

    def _zeros(self, num_blocks: int, dim: int) -> mx.array:
        shape = (num_blocks, self.spec.num_kv_heads, self.block_size, dim)
        return mx.zeros(shape, dtype=self.spec.dtype)

    @property
    def num_blocks(self) -> int:
        """Blocks that exist in memory."""
        return self.keys.shape[0]

    def resize(self, num_blocks: int) -> None:
        """Grow or shrink to `num_blocks`, keeping the content of the blocks that stay.

        Evaluated at once, keys before values, so that the extra peak is one array.
        """
        for name, dim in (("keys", self.spec.key_dim), ("values", self.spec.value_dim)):
            array = getattr(self, name)
            missing = num_blocks - array.shape[0]
            if missing > 0:
                array = mx.concatenate([array, self._zeros(missing, dim)])
            else:
                array = mx.contiguous(array[:num_blocks])
            mx.eval(array)
            setattr(self, name, array)

    def write(
        self, keys: mx.array, values: mx.array, block_ids: mx.array, block_offsets: mx.array
    ) -> None:
        """Store T rows: keys (T, num_kv_heads, key_dim), values (T, num_kv_heads, value_dim)."""
        self.keys[block_ids, :, block_offsets] = keys.astype(self.spec.dtype)
        if self.spec.value_dim:
            self.values[block_ids, :, block_offsets] = values.astype(self.spec.dtype)

    def arrays(self) -> list[mx.array]:
        """Every array, the block first. Do not keep the list across a write."""
        return [self.keys, self.values]

    def put_blocks(self, block_ids: mx.array, parts: Sequence[mx.array]) -> None:
        """Overwrite whole blocks; one part per array of `arrays`, (N, heads, block_size, dim)."""
        keys, values = parts
        self.keys[block_ids] = keys
        if self.spec.value_dim:
            self.values[block_ids] = values

    def gather(self, block_table: mx.array) -> tuple[mx.array, mx.array]:
        """Contiguous copies of the keys and values of (rows, blocks) int32 block ids.

        Returns: two arrays (rows, num_kv_heads, blocks * block_size, dim).
        """
        heads = self.spec.num_kv_heads
        rows, num_blocks = block_table.shape
        # One tile per (block, head): rows of a matrix, so that the gather copies whole tiles.
        tiles = block_table[:, None, :] * heads + mx.arange(heads, dtype=mx.int32)[:, None]
        gathered = []
        for array in (self.keys, self.values):
            dim = array.shape[-1]
            flat = array.reshape(array.shape[0] * heads, self.block_size * dim)
            taken = mx.take(flat, tiles, axis=0)
            gathered.append(taken.reshape(rows, heads, num_blocks * self.block_size, dim))
        return gathered[0], gathered[1]


class KVStorage:
    """All layers' arrays over the same block ids. Grows on demand, layer by layer.

    Layers that see everything have an array entry per block; those with a window have places, by
    window, in `windows`. `num_blocks` is the number of blocks that exist in memory.
    """

    def __init__(self, specs: list[KVLayerSpec], block_size: int) -> None:
        from mlx_cb.attention.window_blocks import WindowBlocks

        self.block_size = block_size
        self.layers = [KVLayer(spec, block_size) for spec in specs]
        self.num_blocks = 0
        self._full = [layer for layer in self.layers if layer.spec.window is None]
        self.windows = {
            window: WindowBlocks(
                window, [a for a in self.layers if a.spec.window == window], block_size
            )
            for window in dict.fromkeys(spec.window for spec in specs)
            if window is not None
        }

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block id over the layers that see everything."""
        return self.block_size * sum(layer.spec.bytes_per_token for layer in self._full)

    @property
    def nbytes(self) -> int:
        """Bytes that exist in memory."""
        return sum(array.nbytes for array in self.arrays())

    def resize(self, num_blocks: int) -> None:
        """Make exactly `num_blocks` exist."""
        for layer in self._full:
            layer.resize(num_blocks)
        self.num_blocks = num_blocks
        mx.clear_cache()  # the old arrays' buffers fit nothing else

    def keeps(self, block_ids: Sequence[int]) -> bool:
        """True when a request can go on behind these full blocks, in every layer."""
        return all(window.keeps(block_ids) for window in self.windows.values())

    def clear(self) -> None:
        """Forget all content and memory, e.g. after a failed step."""
        for layer in self.layers:
            layer.__init__(layer.spec, layer.block_size)  # type: ignore[misc]
        for window in self.windows.values():
            window.clear()
        self.num_blocks = 0

    def arrays(self) -> list[mx.array]:
        """Every array, to be evaluated with a step. Do not keep the list."""
        return [array for layer in self.layers for array in (layer.keys, layer.values)]

"""Owns the arrays behind the blocks, one pair per attention layer; knows nothing about requests.

A block of a KV head is one contiguous tile. Writes happen in place because nobody else holds the
array: never keep a second reference to a layer's arrays across a write.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_cb.attention.addresses import BlockTable, Slots
from mlx_cb.attention.stored_form import Floats, Quantizer, StoredForm, quantize_plainly

GROWTH = 1.5  # times what there is; growing copies it, so it has to stay rare
MIN_GROWTH = 128  # blocks; a request of 2,048 tokens
AHEAD = 8  # while the last eighth of the blocks is taken, they grow


@dataclass(frozen=True, slots=True)
class KVLayerSpec:
    """Shape of one attention layer's keys and values.

    Attributes:
        dtype: what the model computes keys and values in.
        window: positions a query sees, itself included; None sees everything.
        stored: how they are kept; None keeps them as they are.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype
    window: int | None = None
    stored: StoredForm | None = None

    @property
    def form(self) -> StoredForm:
        """How keys and values are kept."""
        return self.stored or Floats(self.dtype, self.dtype)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token's keys and values take in this layer."""
        form = self.form
        return self.num_kv_heads * (
            form.bytes_per_row(self.key_dim) + form.bytes_per_row(self.value_dim)
        )


class Tiles:
    """Keys, or values, of one layer: rows of `dim` numbers, (num_blocks, num_heads, block_size).

    `arrays` are the parts that its form keeps them in, each (num_blocks, num_heads, block_size,
    width). Entries of the list are written in place: never hold one across a write.
    """

    __slots__ = ("arrays", "dim", "form")

    def __init__(self, form: StoredForm, shape: tuple[int, int], dim: int) -> None:
        self.form = form
        self.dim = dim
        self.arrays = [mx.zeros((0, *shape, width), dtype) for width, dtype in form.parts(dim)]

    @property
    def num_blocks(self) -> int:
        """Blocks that exist in memory."""
        return self.arrays[0].shape[0]

    def resize(self, num_blocks: int) -> None:
        """Grow or shrink, keeping the content of the blocks that stay.

        Evaluated array by array, so that the extra peak is one array.
        """
        for index, array in enumerate(self.arrays):
            missing = num_blocks - array.shape[0]
            if missing > 0:
                more = mx.zeros((missing, *array.shape[1:]), dtype=array.dtype)
                array = mx.concatenate([array, more])
            else:
                array = mx.contiguous(array[:num_blocks])
            mx.eval(array)
            self.arrays[index] = array

    def write(self, rows: mx.array, slots: Slots, quantizer: Quantizer) -> None:
        """Store (T, num_heads, dim) rows."""
        if not self.dim:
            return
        index = slots.index(rows.shape[1])
        for number, part in enumerate(self.form.encode(rows, quantizer)):
            self.arrays[number][index] = part

    def gather(self, tiles: mx.array) -> mx.array:
        """Contiguous copies of whole tiles, decoded.

        Args:
            tiles: (rows, heads, blocks) int32, each block_id * num_heads + head.

        Returns: (rows, heads, blocks * block_size, dim).
        """
        rows, heads, num_blocks = tiles.shape
        parts = []
        for array in self.arrays:
            _, _, block_size, width = array.shape
            # One tile per (block, head): rows of a matrix, so that the gather copies whole tiles.
            flat = array.reshape(array.shape[0] * heads, block_size * width)
            taken = mx.take(flat, tiles, axis=0)
            parts.append(taken.reshape(rows, heads, num_blocks * block_size, width))
        return self.form.decode(parts)

    def put_blocks(self, block_ids: mx.array, parts: Sequence[mx.array]) -> None:
        """Overwrite whole blocks with parts as they are stored, one per array."""
        for index, part in enumerate(parts):
            if part.size:
                self.arrays[index][block_ids] = part

    def copy_blocks(self, sources: mx.array, targets: mx.array) -> None:
        """Give the target blocks the sources' content; all sources are read before any write."""
        read = [array[sources] for array in self.arrays]
        # Waited for: while a read still holds the old array, no write happens in place.
        mx.eval(read)
        for index, content in enumerate(read):
            self.arrays[index][targets] = content


class KVLayer:
    """Keys and values of one layer."""

    __slots__ = ("block_size", "keys", "spec", "values")

    def __init__(self, spec: KVLayerSpec, block_size: int) -> None:
        self.spec = spec
        self.block_size = block_size
        shape = (spec.num_kv_heads, block_size)
        self.keys = Tiles(spec.form, shape, spec.key_dim)
        self.values = Tiles(spec.form, shape, spec.value_dim)

    @property
    def num_blocks(self) -> int:
        """Blocks that exist in memory."""
        return self.keys.num_blocks

    def arrays(self) -> list[mx.array]:
        """Every array, the block first. Do not keep the list across a write."""
        return [*self.keys.arrays, *self.values.arrays]

    def resize(self, num_blocks: int) -> None:
        """Grow or shrink to `num_blocks`, keeping the content of the blocks that stay."""
        self.keys.resize(num_blocks)
        self.values.resize(num_blocks)

    def write(
        self,
        keys: mx.array,
        values: mx.array,
        slots: Slots,
        quantizer: Quantizer = quantize_plainly,
    ) -> None:
        """Store T rows: keys (T, num_kv_heads, key_dim), values (T, num_kv_heads, value_dim)."""
        self.keys.write(keys, slots, quantizer)
        self.values.write(values, slots, quantizer)

    def put_blocks(self, block_ids: mx.array, parts: Sequence[mx.array]) -> None:
        """Overwrite whole blocks; one part per array of `arrays`, (N, heads, block_size, width)."""
        num_keys = len(self.keys.arrays)
        self.keys.put_blocks(block_ids, parts[:num_keys])
        self.values.put_blocks(block_ids, parts[num_keys:])

    def gather(self, table: BlockTable) -> tuple[mx.array, mx.array]:
        """Contiguous copies of the keys and values of (rows, blocks) block ids.

        Returns: two arrays (rows, num_kv_heads, blocks * block_size, dim) of the spec's dtype.
        """
        tiles = table.tiles(self.spec.num_kv_heads)
        return self.keys.gather(tiles), self.values.gather(tiles)

    def copy_blocks(self, sources: mx.array, targets: mx.array) -> None:
        """Give the target blocks (N,) int32 the sources' content."""
        self.keys.copy_blocks(sources, targets)
        self.values.copy_blocks(sources, targets)


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

    def ensure(self, num_blocks: int, most: int) -> None:
        """Have at least `num_blocks`, and prepare for more, up to `most`.

        Growing copies everything, which would hold up one step by seconds. So it goes on layer by
        layer while the last blocks are taken, as far into the layers as into these.
        """
        have = self.num_blocks
        wanted = max(num_blocks, min(most, max(int(have * GROWTH), have + MIN_GROWTH)))
        if wanted <= have or not self._full:
            self.num_blocks = max(have, num_blocks)
            return
        share = min(1.0, 1 - (have - num_blocks) / max(1, have // AHEAD))
        if share <= 0.0:
            return
        first = self._full[: math.ceil(share * len(self._full))]
        behind = [layer for layer in first if layer.num_blocks < wanted]
        for layer in behind:
            layer.resize(wanted)
        if behind:
            self.num_blocks = min(layer.num_blocks for layer in self._full)
            mx.clear_cache()  # the old arrays' buffers fit nothing else

    def trim(self, num_blocks: int) -> None:
        """Keep `num_blocks`, and room for one more request unless there are none.

        Without that room the next request would begin with growing, a copy of all that is kept.
        """
        most = (num_blocks + MIN_GROWTH) * AHEAD // (AHEAD - 1) if num_blocks else 0
        if any(layer.num_blocks > most for layer in self._full):
            self.resize(most)

    def keeps(self, block_ids: Sequence[int], num_tokens: int) -> bool:
        """True when a request can go on behind the blocks' first tokens, in every layer."""
        return all(window.keeps(block_ids, num_tokens) for window in self.windows.values())

    def is_in_windows(self, block_id: int) -> bool:
        """True when every window's layers have the block."""
        return all(window.holds(block_id) for window in self.windows.values())

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Give the target blocks the sources' content; all sources are read before any write."""
        source, target = np.array(sources, np.int32), np.array(targets, np.int32)
        for layer in self._full:
            layer.copy_blocks(mx.array(source), mx.array(target))
        for window in self.windows.values():
            window.copy_blocks(source, target)

    def clear(self) -> None:
        """Forget all content and memory, e.g. after a failed step."""
        for layer in self.layers:
            layer.__init__(layer.spec, layer.block_size)  # type: ignore[misc]
        for window in self.windows.values():
            window.clear()
        self.num_blocks = 0

    def arrays(self) -> list[mx.array]:
        """Every array, to be evaluated with a step. Do not keep the list."""
        return [array for layer in self.layers for array in layer.arrays()]

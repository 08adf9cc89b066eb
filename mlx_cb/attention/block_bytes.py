"""Copies whole blocks out of the arrays and back into them, bit for bit, as plain bytes.

What a block's bytes mean depends on the layers' shapes and types alone, so they fit any storage
made from the same specs. Knows no files and no requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_cb.attention.kv_storage import KVLayer, KVStorage

Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Group:
    """Layers, and where their arrays have a block."""

    layers: Sequence[KVLayer]
    places: Callable[[Ids], Ids]


class BlockBytes:
    """The bytes of blocks over some of a storage's layers."""

    def __init__(self, groups: Sequence[_Group], block_size: int) -> None:
        self._groups = groups
        self._layers = [layer for group in groups for layer in group.layers]
        per_token = sum(layer.spec.bytes_per_token for layer in self._layers)
        #: Bytes of one block.
        self.num_bytes = block_size * per_token

    @classmethod
    def of_full_layers(cls, storage: KVStorage) -> BlockBytes:
        """Over the layers that see everything."""
        layers = [layer for layer in storage.layers if layer.spec.window is None]
        return cls([_Group(layers, lambda block_ids: block_ids)], storage.block_size)

    @classmethod
    def of_windows(cls, storage: KVStorage) -> BlockBytes:
        """Over the layers with a sliding window. Blocks must have places in all of them."""
        windows = storage.windows.values()
        return cls([_Group(w.layers, w.places) for w in windows], storage.block_size)

    def copy_out(self, block_ids: Sequence[int]) -> NDArray[np.uint8]:
        """(blocks, num_bytes) uint8, what launched steps have written included.

        Waits for the device: the copy must be whole before anything writes to the blocks again,
        and an array that somebody still has to read is not written in place.
        """
        if not self.num_bytes:
            return np.zeros((len(block_ids), 0), np.uint8)
        ids = np.array(block_ids, dtype=np.int32)
        parts = []
        for group in self._groups:
            index = mx.array(group.places(ids))
            parts += [
                array[index].reshape(len(block_ids), -1).view(mx.uint8)
                for layer in group.layers
                for array in layer.arrays()
                if array.size
            ]
        return np.array(mx.concatenate(parts, axis=1))

    def copy_in(self, block_ids: Sequence[int], contents: Sequence[bytes]) -> None:
        """Put contents that `copy_out` gave into blocks that exist, each id once."""
        if not (self.num_bytes and block_ids):
            return
        ids = np.array(block_ids, dtype=np.int32)
        rows = mx.array(np.stack([np.frombuffer(content, np.uint8) for content in contents]))
        start = 0
        for group in self._groups:
            index = mx.array(group.places(ids))
            for layer in group.layers:
                start = _put(layer, index, rows, start)
        assert start == rows.shape[1], f"{rows.shape[1]} bytes for blocks of {start}"
        mx.eval([layer.arrays() for layer in self._layers])


def _put(layer: KVLayer, index: mx.array, rows: mx.array, start: int) -> int:
    """Overwrite a layer's blocks with its part of the rows; returns where the next one begins."""
    parts = []
    for array in layer.arrays():
        shape = (rows.shape[0], *array.shape[1:])
        size = array.nbytes // max(1, array.shape[0])
        part = rows[:, start : start + size]
        parts.append(mx.contiguous(part).view(array.dtype).reshape(shape))
        start += size
    del array  # a second reference, and the write would copy the whole array
    layer.put_blocks(index, parts)
    return start

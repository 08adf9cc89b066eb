"""Copies whole blocks out of the arrays and back into them, bit for bit, as plain bytes.

What a block's bytes mean depends on the layers' shapes and types alone, so they fit any storage
made from the same specs. Knows no files and no requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_cb.attention.kv_storage import KVStorage


class BlockBytes:
    """The bytes of blocks over all layers of a storage that has no sliding windows."""

    def __init__(self, storage: KVStorage) -> None:
        assert not storage.windows, "a block's place differs from layer to layer"
        self._storage = storage

    @property
    def num_bytes(self) -> int:
        """Bytes of one block."""
        return self._storage.bytes_per_block

    def copy_out(self, block_ids: Sequence[int]) -> NDArray[np.uint8]:
        """(blocks, num_bytes) uint8, what launched steps have written included.

        Waits for the device: the copy must be whole before anything writes to the blocks again,
        and an array that somebody still has to read is not written in place.
        """
        index = mx.array(np.array(block_ids, dtype=np.int32))
        parts = [
            array[index].reshape(len(block_ids), -1).view(mx.uint8)
            for array in self._storage.arrays()
            if array.size
        ]
        return np.array(mx.concatenate(parts, axis=1))

    def copy_in(self, block_ids: Sequence[int], contents: Sequence[bytes]) -> None:
        """Put contents that `copy_out` gave into blocks that exist, each id once."""
        index = mx.array(np.array(block_ids, dtype=np.int32))
        rows = mx.array(np.stack([np.frombuffer(content, np.uint8) for content in contents]))
        start = 0
        for layer in self._storage.layers:
            parts = []
            for array in layer.arrays():
                shape = (len(contents), *array.shape[1:])
                size = array.nbytes // max(1, array.shape[0])
                part = rows[:, start : start + size]
                parts.append(mx.contiguous(part).view(array.dtype).reshape(shape))
                start += size
            del array  # a second reference, and the write would copy the whole array
            layer.put_blocks(index, parts)
        assert start == rows.shape[1], f"{rows.shape[1]} bytes for blocks of {start}"
        mx.eval(self._storage.arrays())

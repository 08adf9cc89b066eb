"""Cache objects for models that want real keys and values: gathered from the blocks, with a mask.

Slower than handles, because every layer copies the whole context at every step, and exact for any
layer that uses a cache's arrays in its own way. Knows nothing about requests.
"""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.cache import create_attention_mask

from mlx_cb.attention.addresses import BlockTable
from mlx_cb.attention.kv_storage import KVLayer
from mlx_cb.attention.metadata import AttentionMetadata


class GatheredContext:
    """Index arrays that all layers of one forward share: rows, or one chunk.

    Attributes:
        block_table: (entries, blocks) ids.
        length: tokens of the longest context.
        positions: (rows,) int32.
        mask_shape: that of (entries,) values to compare with the context's index.
    """

    def __init__(self, metadata: AttentionMetadata, block_size: int, mask_axes: int = 4) -> None:
        self.metadata = metadata
        self.mask_shape = (-1, *(1,) * (mask_axes - 1))
        self.length = int(metadata.seq_lens.max())
        num_blocks = -(-self.length // block_size)
        self.block_table = BlockTable(mx.array(metadata.block_tables[:, :num_blocks]))
        self.positions = metadata.positions


class GatheredKVCache:
    """Stands where mlx-lm's batched cache would, for rows of length one: (B, 1) tokens."""

    #: llama4 cuts its masks from here on; nothing is ever dropped from the front.
    start_position = 0

    def __init__(self, layer: KVLayer, context: GatheredContext) -> None:
        self.layer = layer
        self.context = context
        # Some files touch these; what they hold is this forward's gathered copy.
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    @property
    def offset(self) -> mx.array | int:
        """Position of each row, (B,) int32."""
        return self.context.positions

    def maybe_trim_front(self) -> None:
        """Nothing: old tokens are masked, not cut off."""

    def make_mask(
        self, num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """(B, 1, 1, context) bool, or with more axes of one: what each row sees."""
        lengths = mx.array(self.context.metadata.seq_lens.reshape(self.context.mask_shape))
        index = mx.arange(self.context.length)
        visible = index < lengths
        window = _smaller(window_size, self.layer.spec.window)
        return visible if window is None else visible & (index >= lengths - window)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write (B, Hkv, 1, D) to the slots; returns (B, Hkv, context, D) keys and values."""
        self._write(keys[:, :, 0], values[:, :, 0])
        return self.keys_and_values()

    def _write(self, keys: mx.array, values: mx.array) -> None:
        metadata = self.context.metadata
        self.layer.write(keys, values, metadata.slots)
        self.keys, self.values = (
            array[:, :, : self.context.length]
            for array in self.layer.gather(self.context.block_table)
        )

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The gathered arrays, also for later layers that share them."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values


class GatheredChunkCache(GatheredKVCache):
    """Stands where mlx-lm's KVCache would, for consecutive tokens of one request: (1, L) tokens."""

    @property
    def offset(self) -> int:
        """Position of the first token."""
        return self.context.length - int(self.context.metadata.query_start_loc[1])

    def make_mask(
        self, num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """What mlx-lm's own cache of the whole context would give, the layer's window included."""
        window = _smaller(window_size, self.layer.spec.window)
        return create_attention_mask(num_tokens, self.offset, return_array, window)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write (1, Hkv, L, D) to the slots; returns (1, Hkv, context, D) keys and values."""
        self._write(keys[0].swapaxes(0, 1), values[0].swapaxes(0, 1))
        return self.keys_and_values()


def _smaller(left: int | None, right: int | None) -> int | None:
    sizes = [size for size in (left, right) if size is not None]
    return min(sizes, default=None)

"""The cache objects that mlx-lm's layers see: they carry the step's context, not the keys.

The cache list is the forward context: no global and no wrapped modules. A layer asks its cache for
`offset` and `update_and_fetch`, and gets handles that only the bound attention function can open;
any other use of them raises instead of being silently wrong.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlx_cb.attention.backend import AttentionBackend
from mlx_cb.attention.kv_storage import KVLayer
from mlx_cb.attention.metadata import AttentionMetadata


class PagedKV:
    """Handle of one layer's keys and values in the blocks."""

    __slots__ = ("cache",)

    def __init__(self, cache: PagedKVCache) -> None:
        self.cache = cache


class PagedKVCache:
    """Stands where mlx-lm's KVCache or RotatingKVCache would, one per attention layer."""

    def __init__(self, layer: KVLayer, backend: AttentionBackend) -> None:
        self.layer = layer
        self.backend = backend

    @property
    def metadata(self) -> AttentionMetadata:
        """Shapes of the step that is being run."""
        return self.backend.metadata

    @property
    def offset(self) -> mx.array:
        """Position of each row, (T,) int32: mx.fast.rope rotates every row by its own."""
        return self.metadata.positions

    def make_mask(self, *_: Any, **__: Any) -> None:
        """None: the backend masks, and knows the window from the layer's spec."""
        return

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[PagedKV, PagedKV]:
        """Write (T, Hkv, 1, D) keys and values to their slots; returns handles."""
        self.backend.write(self.layer, keys, values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[PagedKV, PagedKV]:
        """Handles, also for later layers that share this layer's keys and values."""
        handle = PagedKV(self)
        return handle, handle

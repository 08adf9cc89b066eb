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
from mlx_cb.attention.latent import RotatedKeys
from mlx_cb.attention.metadata import AttentionMetadata
from mlx_cb.errors import UnsupportedModel


class PagedKV:
    """Handle of one layer's keys and values in the blocks."""

    __slots__ = ("cache",)

    def __init__(self, cache: PagedKVCache) -> None:
        self.cache = cache


class PagedKVCache:
    """Stands where mlx-lm's KVCache or RotatingKVCache would, one per attention layer.

    For rows of length one: a batch of (T, 1) tokens.
    """

    def __init__(self, layer: KVLayer, backend: AttentionBackend) -> None:
        self.layer = layer
        self.backend = backend
        # In latent attention the values are the rotated part of the keys; else nobody reads them.
        self._handles = PagedKV(self), RotatedKeys(layer)

    @property
    def metadata(self) -> AttentionMetadata:
        """Shapes of the step that is being run."""
        return self.backend.metadata

    @property
    def offset(self) -> mx.array | int:
        """Position of each row, (T,) int32: mx.fast.rope rotates every row by its own."""
        return self.metadata.positions

    def make_mask(self, *_: Any, window_size: int | None = None, **__: Any) -> None:
        """None: the backend masks, and knows the window from the layer's spec.

        Raises UnsupportedModel when the model wants another window than the layer's cache keeps.
        """
        if window_size is not None and window_size != self.layer.spec.window:
            raise UnsupportedModel(
                f"a mask of {window_size} tokens for a layer that keeps {self.layer.spec.window}"
            )

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[PagedKV, RotatedKeys]:
        """Write (T, Hkv, 1, D) keys and values to their slots; returns handles."""
        self.backend.write(self.layer, keys, values)
        return self._handles

    def keys_and_values(self) -> tuple[PagedKV, RotatedKeys]:
        """Handles, also for later layers that share this layer's keys and values."""
        return self._handles

    def attend(self, queries: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        """Attention of (T, H, 1, D) queries over their requests' contexts."""
        return self.backend.attend(self.layer, queries, scale, sinks)

    def attend_latent(self, queries: mx.array, rotated: mx.array, scale: float) -> mx.array:
        """Absorbed latent attention of (T, H, 1, rank) and (T, H, 1, rope) queries."""
        return self.backend.attend_latent(self.layer, queries, rotated, scale)


class PagedChunkCache(PagedKVCache):
    """The same for consecutive tokens of one request: a batch of (1, L) tokens."""

    @property
    def offset(self) -> int:
        """Position of the first token."""
        return int(self.metadata.seq_lens[0] - self.metadata.query_start_loc[1])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[PagedKV, RotatedKeys]:
        """Write (1, Hkv, L, D) keys and values to their slots; returns handles."""
        return super().update_and_fetch(_rows(keys), _rows(values))

    def attend(self, queries: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        """Attention of (1, H, L, D) queries over the request's context."""
        return super().attend(_rows(queries), scale, sinks)[:, :, 0].swapaxes(0, 1)[None]

    def attend_latent(self, queries: mx.array, rotated: mx.array, scale: float) -> mx.array:
        """Refused: mlx-lm does not absorb chunks, so the queries would have the wrong width.

        Raises UnsupportedModel.
        """
        raise UnsupportedModel("latent attention of a chunk is not in its absorbed form")


def _rows(array: mx.array) -> mx.array:
    """(1, H, L, D) as (L, H, 1, D)."""
    return array[0].swapaxes(0, 1)[:, :, None]

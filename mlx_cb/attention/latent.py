"""Latent attention (MLA) over blocks, in its absorbed form: one KV head of rank + rope width.

mlx-lm's files cache the latent as keys and the rotated part as values, compute the rotated part's
scores themselves and hand them on as a mask. Here the rotated part is a handle: multiplying by it
keeps the queries, and the bound attention function puts both parts together.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlx_cb.attention.addresses import BlockTable
from mlx_cb.attention.kv_storage import KVLayer, KVLayerSpec

#: A length that broadcasts with nothing, so that any other use of a handle raises.
_ODD_LENGTH = 7919


class RotatedKeys(mx.array):
    """Handle of the rotated part of a layer's latent keys; knows only how to be multiplied by.

    A subclass of mx.array, because only then does Python ask it for `queries @ handle` first.
    """

    def __init__(self, layer: KVLayer) -> None:
        super().__init__([float("nan")] * _ODD_LENGTH)
        self.layer = layer

    def swapaxes(self, *_: Any, **__: Any) -> RotatedKeys:
        """Itself: the attention function knows the axes."""
        return self

    def __rmatmul__(self, queries: mx.array) -> RotatedScores:  # type: ignore[misc]
        return RotatedScores(self.layer, queries)


class RotatedScores:
    """Scores of rotated, already scaled queries (T, H, 1, rope), not computed yet."""

    __slots__ = ("layer", "queries")

    def __init__(self, layer: KVLayer, queries: mx.array) -> None:
        self.layer = layer
        self.queries = queries


class LatentLayer:
    """A latent layer as attention sees it: keys of rank + rope width whose first part is the value.

    Stands where a KVLayer would for a backend that gathers.
    """

    def __init__(self, layer: KVLayer) -> None:
        self._layer = layer
        self.spec = KVLayerSpec(
            num_kv_heads=layer.spec.num_kv_heads,
            key_dim=layer.spec.key_dim + layer.spec.value_dim,
            value_dim=layer.spec.key_dim,
            dtype=layer.spec.dtype,
            window=layer.spec.window,
        )

    def gather(self, table: BlockTable) -> tuple[mx.array, mx.array]:
        """Contiguous keys and values of a block table; see KVLayer."""
        latent, rotated = self._layer.gather(table)
        return mx.concatenate([latent, rotated], axis=-1), latent

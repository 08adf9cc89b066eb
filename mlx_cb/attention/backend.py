"""What an attention backend must do. Backends are siblings; each has its own module."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Self

import mlx.core as mx

from mlx_cb.attention.kv_storage import KVLayer
from mlx_cb.attention.metadata import AttentionMetadata
from mlx_cb.attention.paged import QuantizedRows
from mlx_cb.attention.stored_form import quantize_plainly
from mlx_cb.errors import UnsupportedModel


class AttentionBackend(ABC):
    """Writes and attends for all layers of a model. One instance per engine."""

    name: str
    metadata: AttentionMetadata

    def begin(self, metadata: AttentionMetadata) -> None:
        """Take over the shapes of the next step, once, before any layer runs."""
        self.metadata = metadata

    def sibling(self) -> Self:
        """The same backend for the layers of another window, with a step of its own."""
        return copy.copy(self)

    def write(self, layer: KVLayer, keys: mx.array, values: mx.array) -> None:
        """Store this step's rows.

        Args:
            keys: (T, num_kv_heads, 1, key_dim).
            values: (T, num_kv_heads, 1, value_dim).
        """
        layer.write(keys.squeeze(2), values.squeeze(2), self.metadata.slots, self.quantize)

    def quantize(self, rows: mx.array, bits: int) -> QuantizedRows:
        """(..., D) rows as codes, for layers that are stored so."""
        return quantize_plainly(rows, bits)

    @abstractmethod
    def attend(
        self, layer: KVLayer, queries: mx.array, scale: float, sinks: mx.array | None
    ) -> mx.array:
        """Causal attention of each row over its own request's context, window included.

        Args:
            queries: (T, num_heads, 1, key_dim).
            scale: factor of the scores.
            sinks: (num_heads,) extra logits that take part in the normalisation only, or None.

        Returns: (T, num_heads, 1, value_dim), dtype of the queries.
        """

    def attend_latent(
        self, layer: KVLayer, queries: mx.array, rotated: mx.array, scale: float
    ) -> mx.array:
        """Causal latent attention: `layer` keeps latents as keys and rotated keys as values.

        Args:
            queries: (T, num_heads, 1, rank), absorbed, not scaled.
            rotated: (T, num_heads, 1, rope), already scaled.

        Returns: (T, num_heads, 1, rank).
        Raises UnsupportedModel where a backend has no such form; the layer is gathered then.
        """
        raise UnsupportedModel(f"{self.name} attention has no latent form")

"""Reads a model's own cache objects and decides how its layers live in blocks.

The layout is a property of the model, found at load. What cannot be run right is refused here, by
name, before anything is served.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from mlx_cb.attention.binding import bind
from mlx_cb.attention.kv_storage import KVLayerSpec
from mlx_cb.errors import UnsupportedModel


class Layout(Enum):
    """How a step's tokens go through the model.

    PACKED: all tokens of all requests as rows of length one, in a single forward.
    """

    PACKED = "packed"


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """Layout and per-layer shapes of one model's cache."""

    layout: Layout
    layers: tuple[KVLayerSpec, ...]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values per token over all layers."""
        return sum(layer.bytes_per_token for layer in self.layers)


#: Families whose code derives positions from the shape of the keys: wrong in blocks.
REFUSED = {"afm7": "it derives positions from the shape of the cached keys"}


def probe(model: nn.Module, architecture: str, dtype: mx.Dtype) -> CacheSpec:
    """Find the layout and bind the attention function of the model's own modules.

    Runs one token through the model with mlx-lm's own caches to learn the shapes.
    Raises UnsupportedModel with the family's name and the reason.
    """
    if architecture in REFUSED:
        raise UnsupportedModel(f"{architecture} is not served: {REFUSED[architecture]}")
    caches = make_prompt_cache(model)
    for cache in caches:
        if type(cache) not in (KVCache, RotatingKVCache):
            raise UnsupportedModel(
                f"{architecture} is not served yet: it keeps its state in {type(cache).__name__}"
            )
        if isinstance(cache, RotatingKVCache) and cache.keep:
            raise UnsupportedModel(
                f"{architecture} is not served yet: it pins the first {cache.keep} tokens"
            )
    if bind(model) == 0:
        raise UnsupportedModel(f"{architecture} is not served yet: it attends in a way of its own")
    mx.eval(model(mx.array([[0]]), cache=caches))
    layers = []
    for cache in caches:
        if cache.keys is None:
            raise UnsupportedModel(f"{architecture} is not served yet: a cached layer stays empty")
        layers.append(
            KVLayerSpec(
                num_kv_heads=cache.keys.shape[1],
                key_dim=cache.keys.shape[-1],
                value_dim=cache.values.shape[-1],
                dtype=cache.keys.dtype,
                window=cache.max_size if isinstance(cache, RotatingKVCache) else None,
            )
        )
    return CacheSpec(Layout.PACKED, tuple(layers))

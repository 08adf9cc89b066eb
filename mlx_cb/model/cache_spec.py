"""Reads a model's own cache objects: what its layers keep, and how that lives in blocks.

The layout is a property of the model, found at load. What cannot be run right is refused there, by
name, before anything is served.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from mlx_cb.attention.kv_storage import KVLayerSpec
from mlx_cb.attention.stored_form import CODES, stored_form
from mlx_cb.errors import UnsupportedModel
from mlx_cb.model.cache_tree import leaves


class Layout(Enum):
    """How a step's tokens go through the model.

    PACKED: all tokens of all requests as rows of length one, in a single forward.
    GROUPED: decode rows together in one forward, every chunk in one of its own.
    SERIAL: every request in a forward of its own.
    """

    PACKED = "packed"
    GROUPED = "grouped"
    SERIAL = "serial"


class Access(Enum):
    """How attention layers reach keys and values.

    PAGED: through handles, attending to the blocks in place.
    GATHERED: as contiguous copies with a mask, for layers that use them in their own way.
    """

    PAGED = "paged"
    GATHERED = "gathered"


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """Layout and shapes of one model's cache.

    Attributes:
        layers: every attention layer's keys and values, in the order of the caches' leaves.
        caches: the model's own empty cache objects, nested as it wants them.
        state_bytes: bytes that recurrent layers remember per request.
        mask_axes: of the masks of gathered rows, the batch first and the context last.
        late_logits: the model's head computes every row, wanted or not.
    """

    layout: Layout
    layers: tuple[KVLayerSpec, ...]
    caches: tuple[Any, ...]
    state_bytes: int = 0
    decode_access: Access = Access.PAGED
    chunk_access: Access = Access.PAGED
    mask_axes: int = 4
    late_logits: bool = False

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values per token over all layers."""
        return sum(layer.bytes_per_token for layer in self.layers)

    @property
    def bytes_by_window(self) -> dict[int | None, int]:
        """Bytes per token of all layers of one window; None are those that see everything."""
        found: dict[int | None, int] = {}
        for layer in self.layers:
            found[layer.window] = found.get(layer.window, 0) + layer.bytes_per_token
        return found

    @property
    def num_state_arrays(self) -> int:
        """Arrays that one request's recurrent layers remember, each a buffer of its own."""
        return sum(len(c.cache) for c in leaves(self.caches) if isinstance(c, ArraysCache))

    @property
    def is_recurrent(self) -> bool:
        """True when a position cannot be taken up from keys and values alone."""
        return any(isinstance(cache, ArraysCache) for cache in leaves(self.caches))


def read_caches(model: nn.Module, architecture: str) -> CacheSpec:
    """What the model's layers keep, learned from two tokens through mlx-lm's own caches.

    Nothing is computed: shapes are known before values are. The layout is not decided here.
    Raises UnsupportedModel with the family's name and the reason.
    """
    caches = make_prompt_cache(model)
    for cache in leaves(caches):
        _check(cache, architecture)
    model(mx.array([[0, 0]]), cache=caches)
    attention = [c for c in leaves(caches) if not isinstance(c, ArraysCache)]
    recurrent: list[Any] = [c for c in leaves(caches) if isinstance(c, ArraysCache)]
    return CacheSpec(
        layout=Layout.SERIAL,
        layers=tuple(_layer_spec(cache, architecture) for cache in attention),
        caches=tuple(make_prompt_cache(model)),
        state_bytes=sum(
            array.nbytes for cache in recurrent for array in cache.cache if array is not None
        ),
    )


def store_as(spec: CacheSpec, kv_dtype: str) -> CacheSpec:
    """The spec with keys and values kept as `--kv-dtype` says; `auto` keeps what is computed.

    Raises UnsupportedModel when this model's keys and values cannot be kept so.
    """
    if kv_dtype in CODES and not spec.layers:
        raise UnsupportedModel(
            f"--kv-dtype {kv_dtype}: this model keeps states and no keys or values. "
            "Hint: use --kv-dtype auto."
        )
    layers = [
        replace(a, stored=stored_form(kv_dtype, a.dtype, (a.key_dim, a.value_dim)))
        for a in spec.layers
    ]
    return replace(spec, layers=tuple(layers))


def _check(cache: Any, architecture: str) -> None:
    if type(cache) not in (KVCache, RotatingKVCache, ChunkedKVCache, ArraysCache):
        raise UnsupportedModel(
            f"{architecture} is not served: it keeps its state in {type(cache).__name__}, "
            "a form of its own that blocks cannot follow"
        )
    if isinstance(cache, RotatingKVCache) and cache.keep:
        raise UnsupportedModel(
            f"{architecture} is not served: it pins its first {cache.keep} tokens"
        )


def _layer_spec(cache: Any, architecture: str) -> KVLayerSpec:
    if cache.keys is None:
        raise UnsupportedModel(f"{architecture} is not served: a cached layer stays empty")
    return KVLayerSpec(
        num_kv_heads=cache.keys.shape[1],
        key_dim=cache.keys.shape[-1],
        value_dim=cache.values.shape[-1],
        dtype=cache.keys.dtype,
        window=cache.max_size if isinstance(cache, RotatingKVCache) else None,
    )


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers that keep the same thing, for `/status`. `window` in tokens, None sees everything."""

    kind: str
    window: int | None
    stored_as: str
    num_layers: int
    bytes_per_token: int


def layer_kinds(spec: CacheSpec) -> list[LayerKind]:
    """What the attention layers keep, grouped; latents are keys and values of unequal width."""
    grouped: dict[tuple[str, int | None, str], list[int]] = {}
    for layer in spec.layers:
        is_latent = layer.num_kv_heads == 1 and layer.key_dim != layer.value_dim
        kind = "latent" if is_latent else "keys and values"
        grouped.setdefault((kind, layer.window, layer.form.name), []).append(layer.bytes_per_token)
    return [
        LayerKind(*key, num_layers=len(sizes), bytes_per_token=sum(sizes))
        for key, sizes in grouped.items()
    ]

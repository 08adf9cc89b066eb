"""Layout PACKED: all tokens of all requests as rows of length one, in a single forward.

The weights are read once for prefill and decode together. For models whose layers attend through
handles and remember nothing but keys and values.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_cb.attention.backend import AttentionBackend
from mlx_cb.attention.cache import PagedKVCache
from mlx_cb.attention.kv_storage import KVStorage
from mlx_cb.attention.layer_groups import LayerGroups
from mlx_cb.model.cache_spec import CacheSpec
from mlx_cb.model.cache_tree import rebuild
from mlx_cb.model.forward_batch import ForwardBatch
from mlx_cb.model.layouts.base import Forward
from mlx_cb.model.logit_rows import LogitRows
from mlx_cb.model.recurrent import RecurrentStates


class PackedForward(Forward):
    """(T, 1) tokens, once through the model."""

    def __init__(
        self, model: nn.Module, spec: CacheSpec, storage: KVStorage, backend: AttentionBackend
    ) -> None:
        self._model = LogitRows(model)
        self.has_late_logits = self._model.is_late
        self.states = RecurrentStates([])
        self._groups = groups = LayerGroups(storage, backend)
        caches = iter([PagedKVCache(layer, groups.backend_of(layer)) for layer in storage.layers])
        self._caches = rebuild(spec.caches, lambda _: next(caches))

    def run(self, batch: ForwardBatch) -> mx.array:
        """See Forward."""
        rows = batch.attention.logit_rows
        self._groups.begin(batch.attention)
        wanted = mx.array(rows if rows.size else np.zeros(1, dtype=np.int32))
        return self._model(batch.token_ids, self._caches, wanted)

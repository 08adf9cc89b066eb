"""One attention backend per window: layers of one window share block ids, and nothing else does."""

from __future__ import annotations

from mlx_cb.attention.backend import AttentionBackend
from mlx_cb.attention.kv_storage import KVLayer, KVStorage
from mlx_cb.attention.metadata import AttentionMetadata


class LayerGroups:
    """Finds each layer's backend, and each window's view of a step."""

    def __init__(self, storage: KVStorage, backend: AttentionBackend) -> None:
        self._storage = storage
        windows = dict.fromkeys(layer.spec.window for layer in storage.layers)
        first = next(iter(windows), None)
        self._backends = {
            window: backend if window == first else backend.sibling() for window in windows
        }

    def backend_of(self, layer: KVLayer) -> AttentionBackend:
        """The backend that a layer attends through."""
        return self._backends[layer.spec.window]

    def views(self, metadata: AttentionMetadata) -> dict[int | None, AttentionMetadata]:
        """The step by window, in that window's block ids."""
        return {
            window: metadata
            if window is None
            else metadata.mapped(self._storage.windows[window].places, self._storage.block_size)
            for window in self._backends
        }

    def begin(self, metadata: AttentionMetadata) -> None:
        """Hand the step to every backend."""
        for window, view in self.views(metadata).items():
            self._backends[window].begin(view)

"""Layouts GROUPED and SERIAL: one step as several forwards.

GROUPED runs the decode rows together as (B, 1) and every chunk as (1, L): for models with recurrent
layers, which must see a chunk's tokens in order, and for layers that want real keys and values.
SERIAL runs every request by itself, exactly as mlx-lm would: for models that cannot tell the
positions of a batch's rows apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import ArraysCache

from mlx_cb.attention.backend import AttentionBackend
from mlx_cb.attention.cache import PagedChunkCache, PagedKVCache
from mlx_cb.attention.gathered import GatheredChunkCache, GatheredContext, GatheredKVCache
from mlx_cb.attention.kv_storage import KVStorage
from mlx_cb.attention.layer_groups import LayerGroups
from mlx_cb.attention.metadata import AttentionMetadata
from mlx_cb.core.request import Request
from mlx_cb.model.cache_spec import Access, CacheSpec, Layout
from mlx_cb.model.cache_tree import leaves, rebuild
from mlx_cb.model.forward_batch import ForwardBatch
from mlx_cb.model.layouts.base import Forward
from mlx_cb.model.logit_rows import LogitRows
from mlx_cb.model.recurrent import RecurrentStates


@dataclass(slots=True)
class _Part:
    """Entries of a step that share a forward: decodes as rows, or one chunk.

    `requests` are those of the last entries; the ones before are padding. `places` are the
    positions of its logits in the step's.
    """

    metadata: AttentionMetadata
    token_ids: mx.array  # (B, 1) or (1, L)
    requests: list[Request]
    is_chunk: bool
    places: list[int] = field(default_factory=list)


class GroupedForward(Forward):
    """Decode rows together, chunks one by one."""

    def __init__(
        self, model: nn.Module, spec: CacheSpec, storage: KVStorage, backend: AttentionBackend
    ) -> None:
        self._model = LogitRows(model)
        self.has_late_logits = self._model.is_late
        self._spec = spec
        self._storage = storage
        self._groups = LayerGroups(storage, backend)
        recurrent = [c for c in leaves(spec.caches) if isinstance(c, ArraysCache)]
        self.states = RecurrentStates([len(cache.cache) for cache in recurrent])
        self._has_states = bool(recurrent)

    def run(self, batch: ForwardBatch) -> mx.array:
        """See Forward."""
        logits, places = [], []
        for part in self._parts(batch):
            wanted = self._run_part(part)
            if part.places:
                logits.append(wanted)
                places += part.places
        if not logits:
            return wanted
        joined = logits[0] if len(logits) == 1 else mx.concatenate(logits)
        if places == list(range(len(places))):
            return joined
        return joined[mx.array(np.argsort(places))]

    def _parts(self, batch: ForwardBatch) -> Iterator[_Part]:
        metadata = batch.attention
        decodes, chunks = self._entries(batch)
        for first, last in [*decodes, *chunks]:
            start, stop = (int(metadata.query_start_loc[entry]) for entry in (first, last))
            part = _Part(
                metadata.part(first, last),
                batch.token_ids[start:stop],
                [request for request in batch.entries[first:last] if request is not None],
                (first, last) in chunks,
                [p for p, row in enumerate(metadata.logit_rows) if start <= row < stop],
            )
            yield from self._cut_at_checkpoints(part) if part.is_chunk else [part]

    def _cut_at_checkpoints(self, part: _Part) -> Iterator[_Part]:
        """A chunk, cut behind every token at which a state is to be saved."""
        (request,), (end,) = part.requests, part.metadata.seq_lens.tolist()
        count = part.token_ids.shape[0]
        saved = request.checkpoint_tokens if self._has_states else ()
        borders = [tokens - (end - count) for tokens in saved if end - count < tokens < end]
        places = iter(part.places)
        row = 0
        for metadata in part.metadata.cut(borders):
            stop = row + int(metadata.query_start_loc[1])
            yield _Part(
                metadata,
                part.token_ids[row:stop].reshape(1, -1),
                part.requests,
                True,
                [next(places) for _ in metadata.logit_rows],
            )
            row = stop

    def _entries(self, batch: ForwardBatch) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(first, last) of every group of decodes, and of every chunk.

        Padding runs with the first decodes; where every request runs alone there is nothing to pad.
        """
        num_decodes, total = batch.attention.num_decodes, len(batch.entries)
        first = sum(request is None for request in batch.entries)
        chunks = [(entry, entry + 1) for entry in range(num_decodes, total)]
        if self._spec.layout is Layout.SERIAL:
            return [], [(entry, entry + 1) for entry in range(first, num_decodes)] + chunks
        groups: list[tuple[int, int]] = []
        for entry in range(first, num_decodes):
            if groups and self._stack_together(batch, groups[-1][0], entry):
                groups[-1] = (groups[-1][0], entry + 1)
            else:
                groups.append((entry, entry + 1))
        if groups:
            groups[0] = (0, groups[0][1])
        return groups, chunks

    def _stack_together(self, batch: ForwardBatch, left: int, right: int) -> bool:
        if not self._has_states:
            return True
        first, second = batch.entries[left], batch.entries[right]
        assert first is not None
        assert second is not None
        return self.states.shapes(first) == self.states.shapes(second)

    def _run_part(self, part: _Part) -> mx.array:
        ends = part.metadata.seq_lens.tolist()
        counts = np.diff(part.metadata.query_start_loc).tolist()
        starts = [end - count for end, count in zip(ends, counts, strict=True)]
        padding = len(ends) - len(part.requests)
        states = self._load_states(part, starts[padding:], padding)
        rows = part.metadata.logit_rows
        logits = self._model(
            part.token_ids,
            self._caches(part, states),
            mx.array(rows if rows.size else np.zeros(1, dtype=np.int32)),
        )
        if self._has_states:
            ends = ends[padding:]
            self.states.save(part.requests, ends, states, padding)
            if part.is_chunk and ends[0] in part.requests[0].checkpoint_tokens:
                border = ends[0] // self._storage.block_size
                self.states.save_checkpoint(
                    part.requests[0], part.requests[0].block_hashes[border - 1]
                )
            for request, end in zip(part.requests, ends, strict=True):
                if end % self._storage.block_size == 0 and end not in request.checkpoint_tokens:
                    self.states.note_border(request)
        return logits

    def _load_states(self, part: _Part, starts: list[int], padding: int) -> list[ArraysCache]:
        if not self._has_states:
            return []
        if starts == [0]:
            return self.states.fresh()
        # Padding computes on somebody's state, and what comes of it is dropped.
        requests = part.requests[:1] * padding + part.requests
        return self.states.load(requests, starts[:1] * padding + starts)

    def _caches(self, part: _Part, states: Sequence[ArraysCache]) -> list[Any]:
        layers, recurrent = self._storage.layers, iter(states)
        access = self._spec.chunk_access if part.is_chunk else self._spec.decode_access
        if access is Access.PAGED:
            self._groups.begin(part.metadata)
            paged = PagedChunkCache if part.is_chunk else PagedKVCache
            attention: list[Any] = [paged(a, self._groups.backend_of(a)) for a in layers]
        else:
            contexts = {
                window: GatheredContext(view, self._storage.block_size, self._spec.mask_axes)
                for window, view in self._groups.views(part.metadata).items()
            }
            gathered = GatheredChunkCache if part.is_chunk else GatheredKVCache
            attention = [gathered(layer, contexts[layer.spec.window]) for layer in layers]
        caches = iter(attention)
        return rebuild(
            self._spec.caches,
            lambda leaf: next(recurrent) if isinstance(leaf, ArraysCache) else next(caches),
        )

"""Sees to it that sliding-window layers have the blocks that a step reads and writes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from mlx_cb.attention.kv_storage import KVStorage
from mlx_cb.attention.window_blocks import Ids, WindowBlocks
from mlx_cb.core.request import Request, RequestStatus
from mlx_cb.core.scheduler_output import SchedulerOutput


class WindowPlaces:
    """Knows the running requests, whose blocks must keep their places."""

    def __init__(self, storage: KVStorage) -> None:
        self._windows = list(storage.windows.values())
        self._running: dict[str, Request] = {}

    def prepare(self, plan: SchedulerOutput) -> None:
        """Place what the step needs, before its arrays are built."""
        if not self._windows:
            return
        chunks = plan.prefills
        for request in (*plan.decodes, *(chunk.request for chunk in chunks)):
            self._running[request.request_id] = request
        for name, request in list(self._running.items()):
            if request.status is not RequestStatus.RUNNING:
                del self._running[name]
        for window in self._windows:
            copied = [copy.source for copy in plan.copies]
            needed = [np.array([*plan.pad_table, *copied], dtype=np.int64)]
            for request in plan.decodes:
                end = request.num_computed_tokens
                needed.append(_blocks(window, request, end - 1, end))
            for chunk in chunks:
                end = chunk.start + chunk.num_tokens
                needed.append(_blocks(window, chunk.request, chunk.start, end))
            window.place(np.concatenate(needed), lambda w=window: self._protected(w))  # type: ignore[misc]

    def _protected(self, window: WindowBlocks) -> Ids:
        parts = [
            _blocks(window, request, request.num_computed_tokens - 1, request.num_computed_tokens)
            for request in _with_blocks(self._running.values())
        ]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def _with_blocks(requests: Iterable[Request]) -> Iterable[Request]:
    return (request for request in requests if request.block_table)


def _blocks(window: WindowBlocks, request: Request, start: int, stop: int) -> Ids:
    first, last = window.span(start, stop)
    return np.array(request.block_table[first:last], dtype=np.int64)

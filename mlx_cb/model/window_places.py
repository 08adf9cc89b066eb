"""Sees to it that sliding-window layers have the blocks that a step reads and writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from mlx_cb.attention.kv_storage import KVStorage
from mlx_cb.attention.window_blocks import Ids, WindowBlocks
from mlx_cb.core.request import Request, RequestStatus
from mlx_cb.core.scheduler_output import SchedulerOutput


class WindowPlaces:
    """Knows the running requests, whose blocks must keep their places."""

    def __init__(self, storage: KVStorage) -> None:
        self._windows = list(storage.windows.values())
        self._block_size = storage.block_size
        self._running: dict[str, Request] = {}

    def restore(self, requests: Iterable[Request], block_ids: Sequence[int]) -> None:
        """Place blocks whose windows come back. From now on what these requests have stays."""
        self._running |= {request.request_id: request for request in requests}
        self._sweep()
        for window in self._windows if block_ids else ():
            needed = np.array(block_ids, dtype=np.int64)
            window.place(needed, lambda w=window: self._protected(w))  # type: ignore[misc]

    def drop(self, block_ids: Sequence[int]) -> None:
        """These blocks have got another content, without their windows."""
        for window in self._windows:
            window.drop(block_ids)

    def _sweep(self) -> None:
        for name, request in list(self._running.items()):
            if request.status is not RequestStatus.RUNNING:
                del self._running[name]

    def prepare(self, plan: SchedulerOutput) -> None:
        """Place what the step needs, before its arrays are built."""
        if not self._windows:
            return
        chunks = plan.prefills
        for request in (*plan.decodes, *(chunk.request for chunk in chunks)):
            self._running[request.request_id] = request
        self._sweep()
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
        # To the table's end: behind what counts as computed there may be blocks that came back.
        parts = [
            _blocks(
                window,
                request,
                max(0, request.num_computed_tokens - 1),
                len(request.block_table) * self._block_size,
            )
            for request in _with_blocks(self._running.values())
        ]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def _with_blocks(requests: Iterable[Request]) -> Iterable[Request]:
    return (request for request in requests if request.block_table)


def _blocks(window: WindowBlocks, request: Request, start: int, stop: int) -> Ids:
    first, last = window.span(start, stop)
    return np.array(request.block_table[first:last], dtype=np.int64)

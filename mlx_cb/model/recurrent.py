"""Owns what recurrent and convolutional layers remember of each request.

States are values: a step's new states are new arrays, kept stacked as the forward returned them,
and a request's state is a row of such a stack. A batch that stays together is never copied, a row
that is no longer wanted is dropped with its stack, and no slot is ever reused while the device may
still read it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache

from mlx_cb.core.checkpoints import BorderState, Checkpoints
from mlx_cb.core.request import Request, RequestStatus
from mlx_cb.errors import UnsupportedModel

#: Per recurrent layer the arrays it remembers, requests along the first axis.
LayerStates = list[list[mx.array | None]]


@dataclass(slots=True, eq=False)
class _Stack:
    """States of several requests after one forward. `shapes` is one row's, without the batch."""

    states: LayerStates
    num_rows: int
    shapes: tuple[Any, ...]


@dataclass(slots=True)
class _Row:
    """One request's state: how much text it follows, and where it is."""

    num_tokens: int
    stack: _Stack
    index: int


class RecurrentStates:
    """States of all requests that have begun. `sizes` is the number of arrays per layer.

    A checkpoint is a request's row at a block border: values do not change, so it is only kept.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = list(sizes)
        self.checkpoints: Checkpoints | None = None
        self._rows: dict[str, _Row] = {}
        self._requests: dict[str, Request] = {}
        self._borders: list[_Row] = []

    def fresh(self) -> list[Any]:
        """Caches for a request that begins: mlx-lm's own, empty."""
        return [ArraysCache(size) for size in self._sizes]

    def load(self, requests: Sequence[Request], num_tokens: Sequence[int]) -> list[Any]:
        """Caches holding the states of requests after their first `num_tokens` tokens, stacked.

        All rows must have the same shapes; see `shapes`. Raises KeyError for a request whose state
        is not here or belongs to another position.
        """
        rows = [self._row(*pair) for pair in zip(requests, num_tokens, strict=True)]
        caches = self.fresh()
        for layer, cache in enumerate(caches):
            entries: list[mx.array | None] = [
                _stacked(rows, layer, entry) for entry in range(len(cache.cache))
            ]
            cache.cache = entries
        return caches

    def _row(self, request: Request, num_tokens: int) -> _Row:
        for row in (self._rows.get(request.request_id), request.resume_state):
            if row is not None and row.num_tokens == num_tokens:
                return row
        raise KeyError(f"no state of {request.request_id} after {num_tokens} tokens")

    def save_checkpoint(self, request: Request, content_hash: bytes) -> None:
        """Let later requests with the same text go on from where this one is now."""
        if self.checkpoints is not None:
            self.checkpoints.save(content_hash, self._rows[request.request_id])

    def note_border(self, request: Request) -> None:
        """Leave the state at a block border with the request, for its next turn.

        Copied out of the batch's stack, which would else live for as long as one of its rows.
        """
        if self.checkpoints is None or not self.checkpoints.capacity:
            return
        row = self._rows[request.request_id]
        if row.stack.num_rows > 1:
            index = mx.array([row.index])
            states: LayerStates = [
                [None if array is None else array[index] for array in layer]
                for layer in row.stack.states
            ]
            row = _Row(row.num_tokens, _Stack(states, 1, row.stack.shapes), 0)
            self._borders.append(row)
        request.border_state = BorderState(row.num_tokens, row)

    def dump(self, row: Any) -> bytes:
        """A saved state as bytes: the arrays' types and shapes, then the arrays."""
        arrays = [
            None if array is None else array[row.index : row.index + 1]
            for layer in row.stack.states
            for array in layer
        ]
        forms = [
            None if a is None else [str(a.dtype).removeprefix("mlx.core."), list(a.shape)]
            for a in arrays
        ]
        head = json.dumps(forms).encode()
        parts = [np.array(mx.contiguous(a).view(mx.uint8)) for a in arrays if a is not None]
        return b"".join(
            [len(head).to_bytes(4, "little"), head, *(part.tobytes() for part in parts)]
        )

    def restore(self, request: Request, content_hash: bytes, num_tokens: int, data: bytes) -> None:
        """Give a request the state that `dump` made bytes of, and keep it for others."""
        start = 4 + int.from_bytes(data[:4], "little")
        arrays: list[mx.array | None] = []
        for form in json.loads(data[4:start]):
            if form is None:
                arrays.append(None)
                continue
            dtype, shape = getattr(mx, form[0]), form[1]
            size = dtype.size * math.prod(shape)
            part = mx.array(np.frombuffer(data, np.uint8, size, start))
            arrays.append(part.view(dtype).reshape(shape))
            start += size
        left = iter(arrays)
        states: LayerStates = [[next(left) for _ in range(size)] for size in self._sizes]
        shapes = tuple(None if array is None else array.shape[1:] for array in arrays)
        row = _Row(num_tokens, _Stack(states, 1, shapes), 0)
        mx.eval([array for array in arrays if array is not None])
        request.resume_state = row
        if self.checkpoints is not None:
            self.checkpoints.save(content_hash, row)

    def shapes(self, request: Request) -> tuple[Any, ...]:
        """What has to be equal for requests to be stacked."""
        return self._rows[request.request_id].stack.shapes

    def save(
        self,
        requests: Sequence[Request],
        num_tokens: Sequence[int],
        caches: Sequence[Any],
        padding: int = 0,
    ) -> None:
        """Keep what a forward left in the caches, one row per request behind `padding` others.

        Raises UnsupportedModel when a layer does not keep its requests along the first axis.
        """
        states: LayerStates = [list(cache.cache) for cache in caches]
        shapes = tuple(
            None if array is None else array.shape[1:] for layer in states for array in layer
        )
        for array in (array for layer in states for array in layer if array is not None):
            if array.shape[0] != padding + len(requests):
                raise UnsupportedModel(
                    f"a layer's state of {padding + len(requests)} requests has the shape "
                    f"{array.shape}"
                )
        stack = _Stack(states, padding + len(requests), shapes)
        for index, (request, count) in enumerate(
            zip(requests, num_tokens, strict=True), start=padding
        ):
            self._rows[request.request_id] = _Row(count, stack, index)
            self._requests[request.request_id] = request
            request.resume_state = None  # the checkpoint lives on its own

    def sweep(self) -> None:
        """Drop the states of requests that are not running any more."""
        self._borders.clear()
        for request in list(self._requests.values()):
            if request.status is not RequestStatus.RUNNING:
                del self._rows[request.request_id], self._requests[request.request_id]

    def arrays(self) -> list[mx.array]:
        """Every state of a step, to be evaluated with it."""
        return _arrays([*self._rows.values(), *self._borders])

    @property
    def nbytes(self) -> int:
        """Bytes of the running requests' states; saved ones are counted as checkpoints."""
        return sum(array.nbytes for array in _arrays(self._rows.values()))

    @property
    def num_buffers(self) -> int:
        """Arrays that are kept, those of checkpoints included."""
        saved = 0 if self.checkpoints is None else len(self.checkpoints)
        return len(self.arrays()) + saved * sum(self._sizes)

    def clear(self) -> None:
        """Forget all states, checkpoints too."""
        self._rows.clear()
        self._requests.clear()
        self._borders.clear()
        if self.checkpoints is not None:
            self.checkpoints.clear()


def _arrays(rows: Iterable[_Row]) -> list[mx.array]:
    stacks = {id(row.stack): row.stack for row in rows}
    return [
        array
        for stack in stacks.values()
        for layer in stack.states
        for array in layer
        if array is not None
    ]


def _stacked(rows: list[_Row], layer: int, entry: int) -> mx.array | None:
    """One array of one layer for all rows, in their order; copies nothing for a whole stack."""
    parts = []
    start = 0
    while start < len(rows):
        stack = rows[start].stack
        stop = start + 1
        while stop < len(rows) and rows[stop].stack is stack:
            stop += 1
        array = stack.states[layer][entry]
        if array is None:
            return None
        indices = [row.index for row in rows[start:stop]]
        parts.append(array if indices == list(range(stack.num_rows)) else array[mx.array(indices)])
        start = stop
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)

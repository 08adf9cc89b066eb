"""Owns which blocks have a place in the arrays of sliding-window layers, and where.

A layer with a window needs the newest tokens of a request only, so its arrays hold fewer places
than there are blocks. A block keeps its place until another one needs it: a prefix whose last
blocks still have theirs can be taken up. Knows block ids, not requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_cb.attention.kv_storage import KVLayer

GROWTH = 1.5
_ABSENT = -1

Ids = NDArray[np.int64]


class WindowBlocks:
    """Places for the blocks of all layers with one window.

    `budget` is the number of places that the arrays grow to before old blocks lose theirs; what
    running requests need gets a place in any case.
    """

    def __init__(self, window: int, layers: Sequence[KVLayer], block_size: int) -> None:
        self.window = window
        self.layers = list(layers)
        self.block_size = block_size
        self.budget: int | None = None
        self.clear()

    def clear(self) -> None:
        """Forget every place, e.g. after a failed step."""
        self.num_places = 0
        self._free: list[int] = []
        self._place_of = np.full(0, _ABSENT, dtype=np.int32)
        self._used_at = np.zeros(0, dtype=np.int64)
        self._clock = 0

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """Index of the first block that tokens `start` to `stop` see, and behind the last."""
        return max(0, start - self.window + 1) // self.block_size, -(-stop // self.block_size)

    def keeps(self, block_ids: Sequence[int], num_tokens: int) -> bool:
        """True when a request can go on behind the first tokens of these blocks."""
        first, last = self.span(num_tokens, num_tokens)
        needed = np.array(block_ids[first:last], dtype=np.int64)
        if needed.size and needed.max() >= len(self._place_of):
            return False
        return bool((self._place_of[needed] != _ABSENT).all())

    def place(self, needed: Ids, protected: Callable[[], Ids]) -> None:
        """Give every needed block a place; only blocks that are not protected may lose theirs."""
        self._clock += 1
        self._know(int(needed.max()) + 1)
        self._used_at[needed] = self._clock
        missing = np.unique(needed[self._place_of[needed] == _ABSENT])
        if missing.size > len(self._free):
            self._make_room(missing.size, protected)
        for block_id in missing.tolist():
            self._place_of[block_id] = self._free.pop()

    def holds(self, block_id: int) -> bool:
        """True when the block has a place."""
        return block_id < len(self._place_of) and bool(self._place_of[block_id] != _ABSENT)

    def drop(self, block_ids: Sequence[int]) -> None:
        """Take the places of blocks whose content here is another one's."""
        for block_id in block_ids:
            if self.holds(block_id):
                self._free.append(int(self._place_of[block_id]))
                self._place_of[block_id] = _ABSENT

    def _know(self, num_blocks: int) -> None:
        extra = num_blocks - len(self._place_of)
        if extra > 0:
            self._place_of = np.append(self._place_of, np.full(extra, _ABSENT, dtype=np.int32))
            self._used_at = np.append(self._used_at, np.zeros(extra, dtype=np.int64))

    def _make_room(self, count: int, protected: Callable[[], Ids]) -> None:
        budget = self.budget if self.budget is not None else self.num_places + count
        wanted = max(self.num_places + count - len(self._free), int(self.num_places * GROWTH))
        self._resize(min(wanted, budget))
        if len(self._free) >= count:
            return
        idle = self._place_of != _ABSENT
        kept = protected()
        idle[kept[kept < idle.size]] = False
        idle &= self._used_at < self._clock
        oldest_first = np.flatnonzero(idle)[np.argsort(self._used_at[idle], kind="stable")]
        # Some more than needed, so that the next steps find free places.
        for block_id in oldest_first[: count - len(self._free) + self.num_places // 8].tolist():
            self._free.append(int(self._place_of[block_id]))
            self._place_of[block_id] = _ABSENT
        self._resize(self.num_places + max(0, count - len(self._free)))

    def _resize(self, num_places: int) -> None:
        if num_places <= self.num_places:
            return
        for layer in self.layers:
            layer.resize(num_places)
        self._free += range(num_places - 1, self.num_places - 1, -1)
        self.num_places = num_places

    def copy_blocks(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """Give the target blocks the sources' content; all of them have places."""
        source, target = (mx.array(self._place_of[blocks]) for blocks in (sources, targets))
        for layer in self.layers:
            layer.copy_blocks(source, target)

    def places(self, block_ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Places of blocks; 0 for one without, which only what is masked may read."""
        self._know(int(block_ids.max(initial=0)) + 1)
        return np.maximum(self._place_of[block_ids], 0)

"""Owns the saved states of recurrent layers: what a request needs beside blocks to go on from a
prefix. Knows neither arrays nor layers; a state is whatever the runner saves.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class BorderState:
    """What recurrent layers remember after a text's first `num_tokens` tokens, whole blocks."""

    num_tokens: int
    state: Any


class Checkpoints:
    """States by the content hash of the last block they follow; the least recently used goes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._states: OrderedDict[bytes, Any] = OrderedDict()
        self._loaded: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, content_hash: bytes) -> bool:
        return content_hash in self._states

    def save(self, content_hash: bytes, state: Any) -> None:
        """Keep a state; the first one with a content stays."""
        if self.capacity < 1:
            return
        if content_hash not in self._states:
            if len(self._states) >= self.capacity:
                oldest, _ = self._states.popitem(last=False)
                self._loaded.discard(oldest)
            self._states[content_hash] = state
        self._states.move_to_end(content_hash)

    def replace(self, previous: bytes | None, content_hash: bytes, state: Any) -> None:
        """Keep a state instead of an earlier one of the same text, unless that one was used."""
        if previous is not None and previous not in self._loaded:
            self._states.pop(previous, None)
        self.save(content_hash, state)

    def load(self, content_hash: bytes) -> Any:
        """The state that was saved. Raises KeyError when it is not here (any more)."""
        self._states.move_to_end(content_hash)
        self._loaded.add(content_hash)
        return self._states[content_hash]

    def peek(self, content_hash: bytes) -> Any:
        """The state that was saved, None when it is not here; counts as no use."""
        return self._states.get(content_hash)

    def clear(self) -> None:
        """Forget all states."""
        self._states.clear()
        self._loaded.clear()

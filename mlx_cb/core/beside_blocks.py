"""What a prefix needs to be gone on from, part by part, and what of it can be brought back.

Layers that see everything keep it in every block. Layers with a sliding window keep the newest
blocks of a text in arrays of their own, recurrent layers a state at a block's end. Knows the names
under which parts are kept and counts blocks; knows no arrays.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from enum import Enum


class Part(Enum):
    """What is kept under one name: a block's own keys and values, those of its window layers, or
    what recurrent layers remember at its end."""

    BLOCK = "block"
    WINDOWS = "windows"
    STATE = "state"


def key_of(content_hash: bytes, part: Part) -> bytes:
    """Name of a part that belongs to a content; a block's own is its hash."""
    if part is Part.BLOCK:
        return content_hash
    return hashlib.blake2b(content_hash, digest_size=16, person=part.value.encode()).digest()


@dataclass(frozen=True, slots=True)
class Piece:
    """A step of bringing a prefix back: a block with what belongs to it, or a state.

    `content_hash` is that of the block, or of the one at whose end the state is.
    """

    content_hash: bytes
    parts: tuple[Part, ...]

    @property
    def keys(self) -> list[bytes]:
        """Names of all that has to be read for it."""
        return [key_of(self.content_hash, part) for part in self.parts]


@dataclass(frozen=True, slots=True)
class Places:
    """Where things are: `on_ssd` by name; `find` gives the pool's block with a content."""

    on_ssd: Container[bytes]
    find: Callable[[bytes], int | None]


@dataclass(frozen=True, slots=True)
class PrefixNeeds:
    """What a model's layers keep of a prefix.

    Attributes:
        has_blocks: some layer sees everything, so that every block has bytes of its own.
        window: positions that the widest sliding window sees; None without one.
        has_state: recurrent layers need the state at the prefix's end.
    """

    has_blocks: bool = True
    window: int | None = None
    has_state: bool = False

    @property
    def parts(self) -> list[Part]:
        """What there may be to keep of a block."""
        kept = (self.has_blocks, self.window is not None, self.has_state)
        return [part for part, is_kept in zip(Part, kept, strict=True) if is_kept]

    @property
    def is_exact_anywhere(self) -> bool:
        """True when blocks are all there is: half of a prefix is a prefix then."""
        return self.parts == [Part.BLOCK]

    def pieces(
        self, hashes: Sequence[bytes], start: int, block_size: int, places: Places
    ) -> list[Piece]:
        """The longest prefix that can be brought back whole, from block `start` on.

        `hashes` are those of all full blocks of a text, of which the first `start` are there.
        Empty when there is none.
        """
        reachable, windows = start, [start]  # per border: from which block on windows are kept
        while reachable < len(hashes) and self._has_block(hashes[reachable], places):
            is_whole = self._is_whole(hashes[reachable], places)
            reachable += 1
            windows.append(windows[-1] if is_whole else reachable)
        for border in range(reachable, start, -1):
            first = max(start, self._first_in_window(border, block_size))
            last = hashes[border - 1]
            if windows[border - start] > first:
                continue
            if self.has_state and key_of(last, Part.STATE) not in places.on_ssd:
                continue
            own = [Part.BLOCK] if self.has_blocks else []
            pieces = [Piece(content, tuple(own)) for content in hashes[start:first]]
            whole = (*own, Part.WINDOWS)
            pieces += [Piece(content, whole) for content in hashes[first:border]]
            return [*pieces, Piece(last, (Part.STATE,))] if self.has_state else pieces
        return []

    def _first_in_window(self, border: int, block_size: int) -> int:
        """Index of the first block that window layers see from a border, itself without any."""
        if self.window is None:
            return border
        return max(0, border * block_size - self.window + 1) // block_size

    def _has_block(self, content_hash: bytes, places: Places) -> bool:
        if not self.has_blocks:
            return True
        return content_hash in places.on_ssd or places.find(content_hash) is not None

    def _is_whole(self, content_hash: bytes, places: Places) -> bool:
        """True when a block with its windows can be read; one of the pool may belong to others."""
        if self.has_blocks and content_hash not in places.on_ssd:
            return False
        return self.window is None or key_of(content_hash, Part.WINDOWS) in places.on_ssd

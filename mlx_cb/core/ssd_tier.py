"""Decides which blocks are written to the SSD and which come back. Reads and writes nothing.

The engine carries the orders out and reports what came of them. What is on the SSD is known by
content hash, so a prefix comes back to whoever has the same text: a new turn, a server that was
started again, or a request whose blocks were taken while it ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class BlockContent:
    """A block, and the hash of the content that it has or is to have."""

    block_id: int
    content_hash: bytes


@dataclass(frozen=True, slots=True)
class SsdLimits:
    """How much is moved.

    Attributes:
        min_restore_blocks: a prefix with fewer blocks on the SSD is computed instead.
        max_staged_blocks: most blocks in memory, or ordered, between the SSD and the pool.
        stores_per_step: blocks that leave together, so that the device is seldom waited for.
        patience_s: wait for one block, after which the rest of the prefix is computed.
    """

    min_restore_blocks: int = 4
    max_staged_blocks: int = 64
    stores_per_step: int = 16
    patience_s: float = 10.0


class Fetch(Enum):
    """How far a block has come on its way from the SSD."""

    ABSENT = "absent"
    AWAITED = "awaited"
    ARRIVED = "arrived"


class SsdTier:
    """What is on the SSD, what is to be written, what is on its way back. `known` is there now."""

    def __init__(self, limits: SsdLimits, known: Iterable[bytes] = ()) -> None:
        self.limits = limits
        self.is_on = True
        self.num_stored_blocks = 0
        self.num_restored_blocks = 0
        self.num_lost_blocks = 0
        self._held: set[bytes] = set(known)
        self._unsaved: dict[bytes, None] = {}
        self._leaving: list[BlockContent] = []
        self._wanted: list[bytes] = []
        self._awaited: dict[bytes, float] = {}
        self._arrived: set[bytes] = set()

    def __len__(self) -> int:
        """Blocks on the SSD, or on their way to it."""
        return len(self._held)

    def __contains__(self, content_hash: bytes) -> bool:
        return content_hash in self._held

    def turn_off(self) -> None:
        """The SSD has failed: from now on nothing is there and nothing is ordered."""
        self.is_on = False
        for contents in (self._held, self._unsaved, self._leaving, self._awaited, self._wanted):
            contents.clear()

    # To the SSD.

    def note(self, content_hash: bytes) -> None:
        """A block has become findable: worth writing when there is nothing better to do."""
        if self.is_on and content_hash not in self._held:
            self._unsaved[content_hash] = None

    def evict(self, block_id: int, content_hash: bytes) -> None:
        """A findable block is taken for something else: it is to be copied out before that."""
        self._unsaved.pop(content_hash, None)
        if self.is_on and content_hash not in self._held:
            self._leaving.append(BlockContent(block_id, content_hash))
            self._held.add(content_hash)

    def forget_unsaved(self) -> None:
        """The blocks' content cannot be trusted: nothing of it is to be written."""
        self._unsaved.clear()
        self._held.difference_update(order.content_hash for order in self._leaving)
        self._leaving.clear()

    @property
    def has_unsaved(self) -> bool:
        """True while findable blocks are in memory only."""
        return bool(self._unsaved)

    def take_stores(self, find: Callable[[bytes], int | None]) -> list[BlockContent]:
        """Blocks to copy out before the step. `find` gives the block with a content.

        When any has to go, some that may have to go soon leave with it.
        """
        if not self._leaving:
            return []
        leaving, self._leaving = self._leaving, []
        return leaving + self.write_behind(find, self.limits.stores_per_step - len(leaving))

    def write_behind(self, find: Callable[[bytes], int | None], count: int) -> list[BlockContent]:
        """Up to `count` of the blocks that are in memory only, the oldest first."""
        orders: list[BlockContent] = []
        while self._unsaved and len(orders) < count:
            content_hash = next(iter(self._unsaved))
            del self._unsaved[content_hash]
            block_id = find(content_hash)
            if block_id is not None and content_hash not in self._held:
                orders.append(BlockContent(block_id, content_hash))
                self._held.add(content_hash)
        return orders

    def stored(self, count: int) -> None:
        """So many blocks were handed over for writing."""
        self.num_stored_blocks += count

    def gone(self, content_hash: bytes) -> None:
        """A block is not on the SSD (any more), or was never written."""
        if content_hash in self._held:
            self._held.discard(content_hash)
            self.num_lost_blocks += 1

    # Back from it.

    def num_held(self, hashes: Sequence[bytes]) -> int:
        """How many of these come from the SSD, without a gap; 0 when too few to be worth it."""
        count = 0
        while count < len(hashes) and hashes[count] in self._held:
            count += 1
        return count if count >= self.limits.min_restore_blocks else 0

    def order(self, hashes: Iterable[bytes], now: float) -> None:
        """Ask for blocks, the first first, as far as there is room to put them."""
        for content_hash in hashes:
            is_full = len(self._awaited) + len(self._arrived) >= self.limits.max_staged_blocks
            if is_full or content_hash not in self._held:
                return
            if content_hash not in self._awaited and content_hash not in self._arrived:
                self._awaited[content_hash] = now
                self._wanted.append(content_hash)

    def take_fetches(self) -> list[bytes]:
        """Blocks to read from the SSD now."""
        wanted, self._wanted = self._wanted, []
        return wanted

    @property
    def awaits(self) -> bool:
        """True while a block is on its way."""
        return bool(self._awaited)

    def state(self, content_hash: bytes, now: float) -> Fetch:
        """How far a block has come. One that takes too long counts as absent."""
        if content_hash in self._arrived:
            return Fetch.ARRIVED
        ordered = self._awaited.get(content_hash)
        if ordered is None:
            return Fetch.AWAITED if content_hash in self._held else Fetch.ABSENT
        return Fetch.AWAITED if now - ordered < self.limits.patience_s else Fetch.ABSENT

    def arrive(self, content_hash: bytes) -> bool:
        """A block has been read. False when nobody waits for it any more."""
        if self._awaited.pop(content_hash, None) is None:
            return False
        self._arrived.add(content_hash)
        return True

    def miss(self, content_hash: bytes) -> None:
        """A block that was ordered could not be read."""
        self._awaited.pop(content_hash, None)
        self.gone(content_hash)

    def take(self, content_hash: bytes) -> None:
        """An arrived block goes into the pool."""
        self._arrived.discard(content_hash)
        self.num_restored_blocks += 1

    def release(self, hashes: Iterable[bytes]) -> None:
        """Nobody waits for these any more."""
        for content_hash in hashes:
            self._arrived.discard(content_hash)
            self._awaited.pop(content_hash, None)

    def is_staged(self, content_hash: bytes) -> bool:
        """True while the content of an arrived block has to be kept for the pool."""
        return content_hash in self._arrived

"""Decides which blocks are written to the SSD and which come back. Reads and writes nothing.

The engine carries the orders out and reports what came of them. What is on the SSD is known by
content hash, so a prefix comes back to whoever has the same text: a new turn, a server that was
started again, or a request whose blocks were taken while it ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from mlx_cb.core.beside_blocks import Part, PrefixNeeds, key_of


@dataclass(frozen=True, slots=True)
class BlockContent:
    """A block, the hash of the content that it has or is to have, and which parts of it are meant.

    A block that is restored without its windows has none afterwards.
    """

    block_id: int
    content_hash: bytes
    parts: tuple[Part, ...] = (Part.BLOCK,)


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
    """What is on the SSD, what is to be written, what is on its way back.

    `known` is there now; `needs` says of which parts. Parts go by their names (`key_of`).
    """

    def __init__(
        self,
        limits: SsdLimits,
        known: Iterable[bytes] = (),
        needs: PrefixNeeds = PrefixNeeds(),  # noqa: B008 - frozen
    ) -> None:
        self.limits = limits
        self.needs = needs
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
        """Parts on the SSD, or on their way to it."""
        return len(self._held)

    def __contains__(self, key: object) -> bool:
        return key in self._held

    def turn_off(self) -> None:
        """The SSD has failed: from now on nothing is there and nothing is ordered."""
        self.is_on = False
        for contents in (self._held, self._unsaved, self._leaving, self._awaited, self._wanted):
            contents.clear()

    # To the SSD.

    def note(self, content_hash: bytes) -> None:
        """A block has become findable: worth writing when there is nothing better to do."""
        if self.is_on and self._missing(content_hash):
            self._unsaved[content_hash] = None

    def _missing(self, content_hash: bytes) -> tuple[Part, ...]:
        """Parts of a block that are not on the SSD."""
        if self.needs.is_exact_anywhere:
            return () if content_hash in self._held else (Part.BLOCK,)
        parts = self.needs.parts
        return tuple(part for part in parts if key_of(content_hash, part) not in self._held)

    def evict(self, block_id: int, content_hash: bytes) -> None:
        """A findable block is taken for something else: it is to be copied out before that."""
        self._unsaved.pop(content_hash, None)
        if self.is_on and (parts := self._missing(content_hash)):
            self._leaving.append(self._promise(block_id, content_hash, parts))

    def _promise(self, block_id: int, content_hash: bytes, parts: tuple[Part, ...]) -> BlockContent:
        self._held.update(key_of(content_hash, part) for part in parts)
        return BlockContent(block_id, content_hash, parts)

    def forget_unsaved(self) -> None:
        """The blocks' content cannot be trusted: nothing of it is to be written."""
        self._unsaved.clear()
        for order in self._leaving:
            self._held.difference_update(key_of(order.content_hash, part) for part in order.parts)
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
            if block_id is not None and (parts := self._missing(content_hash)):
                orders.append(self._promise(block_id, content_hash, parts))
        return orders

    def lacks(self, key: bytes) -> None:
        """A part that was to be written does not exist in memory (any more)."""
        self._held.discard(key)

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

    def order(self, together: Iterable[Sequence[bytes]], now: float) -> None:
        """Ask for parts, the first first, as far as there is room to put them.

        Those that are wanted together are asked for together: with half of what he needs each,
        nobody could go on.
        """
        for keys in together:
            missing = [key for key in keys if key not in self._awaited and key not in self._arrived]
            staged = len(self._awaited) + len(self._arrived) + len(missing)
            if missing and staged > self.limits.max_staged_blocks:
                return
            if not all(key in self._held for key in missing):
                return
            self._awaited.update(dict.fromkeys(missing, now))
            self._wanted += missing

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

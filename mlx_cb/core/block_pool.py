"""Owns the fixed-size blocks of the KV cache: who is free, who is shared, who is forgotten first.

Knows block ids only; the keys and values behind them belong to `attention.kv_storage`.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

#: Times that a block was found again, from which on it lasts `PATIENCE` times longer, and again.
POPULAR = (1, 4)
PATIENCE = 4
#: Newest blocks behind one place in a text that are compared with what a request goes on with.
MAX_COMPARED = 8


@dataclass(slots=True)
class Content:
    """What a block holds, while it can be found again.

    Attributes:
        follows: hash of everything before the block; the salt for a first block.
        tokens: the block's own, as many as are written.
        whole: hash of everything up to the block's end, None while the block is not full.
        user: who had it computed.
    """

    follows: bytes
    tokens: array[int]
    whole: bytes | None
    user: str = ""


@dataclass(slots=True)
class Block:
    """One block of the pool. `times_found` and `freed_at` decide how long its content is kept."""

    block_id: int
    ref_count: int = 0
    content: Content | None = None
    times_found: int = 0
    freed_at: int = 0

    @property
    def popularity(self) -> int:
        """0, 1 or 2: how often the content was found again."""
        return sum(self.times_found >= times for times in POPULAR)


class BlockPool:
    """Free lists in eviction order, reference counts, and the index of reusable blocks.

    The pool starts empty and grows one block at a time up to `capacity`, so that the storage can
    grow with demand. Freed blocks that hold findable content stay findable until they are taken
    again; blocks without such content are taken first. Of those with content the one goes that was
    not used for longest, where time passes `PATIENCE` times slower for what was found again: a
    system prompt outlasts what came once. `on_evict` hears of every full block whose content is
    about to be lost to another one: block id and content hash.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: list[Block] = []
        self.on_evict: Callable[[int, bytes], None] = lambda block_id, content_hash: None
        self.num_evictions = 0
        self.evictions_by_user: Counter[str] = Counter()
        self._plain: OrderedDict[int, None] = OrderedDict()
        self._cached: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(3)]
        self._by_hash: dict[bytes, int] = {}
        self._followers: dict[bytes, dict[int, None]] = {}
        self._clock = 0

    @property
    def num_free(self) -> int:
        """Blocks that exist and that nobody references."""
        return len(self._plain) + self.num_cached

    @property
    def num_available(self) -> int:
        """Blocks that can be taken now: free, evictable, or not yet grown."""
        return self.num_free + self.capacity - len(self.blocks)

    @property
    def num_used(self) -> int:
        """Blocks referenced by at least one request."""
        return len(self.blocks) - self.num_free

    @property
    def num_cached(self) -> int:
        """Unreferenced blocks whose content can still be found."""
        return sum(map(len, self._cached))

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks with one reference each.

        Raises ValueError when fewer than `count` are available; nothing is taken then.
        """
        if count > self.num_available:
            raise ValueError(f"{count} blocks wanted, {self.num_available} available")
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        self._clock += 1
        if self._plain:
            block_id = next(iter(self._plain))
        elif len(self.blocks) < self.capacity:
            self.blocks.append(Block(len(self.blocks), ref_count=1))
            return len(self.blocks) - 1
        else:
            block_id = self._least_wanted()
        block = self.blocks[block_id]
        del self._list_of(block)[block_id]
        if block.content is not None and block.content.whole is not None:
            self.on_evict(block_id, block.content.whole)
        self._evict(block)
        block.ref_count = 1
        return block_id

    def _least_wanted(self) -> int:
        """Of the oldest block of each popularity, the one that is older than it deserves."""
        oldest = [next(iter(cached)) for cached in self._cached if cached]
        return max(oldest, key=self._staleness)

    def _staleness(self, block_id: int) -> float:
        block = self.blocks[block_id]
        return (self._clock - block.freed_at) / PATIENCE**block.popularity

    def _list_of(self, block: Block) -> OrderedDict[int, None]:
        return self._plain if block.content is None else self._cached[block.popularity]

    def _evict(self, block: Block) -> None:
        if block.content is not None:
            self.num_evictions += 1
            self.evictions_by_user[block.content.user] += 1
            self._forget(block)

    def _forget(self, block: Block) -> None:
        content = block.content
        if content is None:
            return
        if content.whole is not None:
            del self._by_hash[content.whole]
        self._unlink(block.block_id, content.follows)
        block.content = None
        block.times_found = 0

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each block that was found, taking unreferenced ones off the lists."""
        for block_id in block_ids:
            block = self.blocks[block_id]
            if block.ref_count == 0:
                del self._list_of(block)[block_id]
            block.times_found += 1
            block.ref_count += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Drop a reference to each block of a block table, given in the table's order.

        The last block of a table is the first to be forgotten: a prefix is useful without its
        continuation, never the other way round.
        """
        for block_id in reversed(block_ids):
            block = self.blocks[block_id]
            if block.ref_count < 1:
                raise ValueError(f"block {block_id} is freed twice")
            block.ref_count -= 1
            if block.ref_count == 0:
                block.freed_at = self._clock
                self._list_of(block)[block_id] = None

    def find(self, content_hash: bytes) -> int | None:
        """Full block whose end has this hash, referenced or not."""
        return self._by_hash.get(content_hash)

    def find_beginning(self, follows: bytes, tokens: array[int]) -> tuple[int, int]:
        """Block behind `follows` that begins like `tokens`, and the number of equal tokens.

        The longest of the newest few; (0, 0) without any.
        """
        best = (0, 0)
        newest = reversed(self._followers.get(follows, {}))
        for block_id, _ in zip(newest, range(MAX_COMPARED), strict=False):
            content = self.blocks[block_id].content
            assert content is not None
            count = 0
            for mine, wanted in zip(content.tokens, tokens, strict=False):
                if mine != wanted:
                    break
                count += 1
            best = max(best, (block_id, count), key=lambda found: found[1])
        return best

    def is_referenced(self, block_id: int) -> bool:
        """True while a request uses the block."""
        return self.blocks[block_id].ref_count > 0

    def remember(self, block_id: int, content: Content) -> None:
        """Make a referenced block findable by what it holds now.

        A full block's content never changes, and the first one with a content stays the known one.
        """
        block = self.blocks[block_id]
        assert block.ref_count > 0, f"nobody wrote {block}"
        if block.content is not None:
            if block.content.whole is not None:
                return
            self._unlink(block_id, block.content.follows)
            block.content = None
        if content.whole is not None:
            if content.whole in self._by_hash:
                return
            self._by_hash[content.whole] = block_id
        block.content = content
        self._followers.setdefault(content.follows, {})[block_id] = None

    def _unlink(self, block_id: int, follows: bytes) -> None:
        followers = self._followers[follows]
        del followers[block_id]
        if not followers:
            del self._followers[follows]

    def forget_all(self) -> None:
        """Make nothing findable any more, after a step whose writes cannot be trusted."""
        for cached in self._cached:
            self._plain |= cached
            cached.clear()
        for block in self.blocks:
            self._forget(block)

    def shrink(self, max_blocks: int) -> int:
        """Drop free blocks from the end of the pool until `max_blocks` are left, or one is in use.

        Returns the number of blocks the pool now has.
        """
        while len(self.blocks) > max_blocks and self.blocks[-1].ref_count == 0:
            block = self.blocks.pop()
            del self._list_of(block)[block.block_id]
            self._evict(block)
        return len(self.blocks)

    def check_integrity(self, block_tables: Iterable[Sequence[int]] = ()) -> None:
        """Raise AssertionError unless every block is accounted for exactly once.

        `block_tables` are those of all requests that hold blocks.
        """
        expected = [0] * len(self.blocks)
        for table in block_tables:
            for block_id in table:
                expected[block_id] += 1
        for block, references in zip(self.blocks, expected, strict=True):
            assert block.ref_count == references, f"{block} has {references} owners"
            lists = [f for f in (self._plain, *self._cached) if block.block_id in f]
            assert len(lists) == (block.ref_count == 0), f"{block} is lost"
            assert all(found is self._list_of(block) for found in lists), f"{block} is misplaced"
            if block.content is not None:
                assert block.block_id in self._followers[block.content.follows]
                if block.content.whole is not None:
                    assert self._by_hash[block.content.whole] == block.block_id
        assert len(self.blocks) <= self.capacity
        contents = [block.content for block in self.blocks if block.content is not None]
        assert sum(map(len, self._followers.values())) == len(contents)
        assert len(self._by_hash) == sum(content.whole is not None for content in contents)

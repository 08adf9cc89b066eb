"""Owns the fixed-size blocks of the KV cache: who is free, who is shared, who is forgotten first.

Knows block ids only; the keys and values behind them belong to `attention.kv_storage`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Block:
    """One block of the pool. `content_hash` is set while its full content can be found again."""

    block_id: int
    ref_count: int = 0
    content_hash: bytes | None = None


class BlockPool:
    """Free list in eviction order, reference counts, and the index of reusable blocks.

    The pool starts empty and grows one block at a time up to `capacity`, so that the storage can
    grow with demand. Freed blocks that hold findable content stay findable until they are taken
    again; blocks without such content are taken first. `on_evict` hears of every block whose
    content is about to be lost to another one: block id and content hash.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.on_evict: Callable[[int, bytes], None] = lambda block_id, content_hash: None
        self.blocks: list[Block] = []
        self.num_evictions = 0
        self._free: OrderedDict[int, None] = OrderedDict()
        self._by_hash: dict[bytes, int] = {}

    @property
    def num_available(self) -> int:
        """Blocks that can be taken now: free, evictable, or not yet grown."""
        return len(self._free) + self.capacity - len(self.blocks)

    @property
    def num_used(self) -> int:
        """Blocks referenced by at least one request."""
        return len(self.blocks) - len(self._free)

    @property
    def num_cached(self) -> int:
        """Unreferenced blocks whose content can still be found."""
        return sum(1 for block_id in self._free if self.blocks[block_id].content_hash is not None)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks with one reference each.

        Raises ValueError when fewer than `count` are available; nothing is taken then.
        """
        if count > self.num_available:
            raise ValueError(f"{count} blocks wanted, {self.num_available} available")
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._free:
            block_id = next(iter(self._free))
            block = self.blocks[block_id]
            if block.content_hash is None or len(self.blocks) == self.capacity:
                del self._free[block_id]
                if block.content_hash is not None:
                    self.on_evict(block_id, block.content_hash)
                self._forget(block)
                block.ref_count = 1
                return block_id
        self.blocks.append(Block(len(self.blocks), ref_count=1))
        return len(self.blocks) - 1

    def _forget(self, block: Block) -> None:
        if block.content_hash is not None:
            del self._by_hash[block.content_hash]
            block.content_hash = None
            self.num_evictions += 1

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each block, taking the unreferenced ones off the free list."""
        for block_id in block_ids:
            block = self.blocks[block_id]
            if block.ref_count == 0:
                del self._free[block_id]
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
                self._free[block_id] = None
                if block.content_hash is None:
                    self._free.move_to_end(block_id, last=False)

    def find(self, content_hash: bytes) -> int | None:
        """Block that holds this content, referenced or not."""
        return self._by_hash.get(content_hash)

    def is_referenced(self, block_id: int) -> bool:
        """True while a request uses the block."""
        return self.blocks[block_id].ref_count > 0

    def remember(self, block_id: int, content_hash: bytes) -> None:
        """Make a full block findable. The first block with a content stays the known one."""
        block = self.blocks[block_id]
        if block.content_hash is None and content_hash not in self._by_hash:
            block.content_hash = content_hash
            self._by_hash[content_hash] = block_id

    def forget_all(self) -> None:
        """Make nothing findable any more, after a step whose writes cannot be trusted."""
        for block in self.blocks:
            self._forget(block)

    def shrink(self, max_blocks: int) -> int:
        """Drop free blocks from the end of the pool until `max_blocks` are left, or one is in use.

        Returns the number of blocks the pool now has.
        """
        while len(self.blocks) > max_blocks and self.blocks[-1].ref_count == 0:
            block = self.blocks.pop()
            del self._free[block.block_id]
            self._forget(block)
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
            assert (block.ref_count == 0) == (block.block_id in self._free), f"{block} is lost"
            if block.content_hash is not None:
                assert self._by_hash[block.content_hash] == block.block_id
        assert len(self.blocks) <= self.capacity
        assert len(self._by_hash) == sum(block.content_hash is not None for block in self.blocks)

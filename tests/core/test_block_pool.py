"""BlockPool and KVCacheManager: nothing is lost, nothing shared changes, the oldest goes first."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from mlx_cb.core.block_pool import BlockPool


def test_grows_only_when_no_free_block_is_plain() -> None:
    pool = BlockPool(8)
    first = pool.allocate(3)
    assert first == [0, 1, 2]
    pool.free(first)
    assert sorted(pool.allocate(3)) == [0, 1, 2]
    assert len(pool.blocks) == 3


def test_content_stays_findable_until_the_capacity_is_needed() -> None:
    pool = BlockPool(3)
    table = pool.allocate(2)
    pool.remember(table[0], b"first")
    pool.remember(table[1], b"second")
    pool.free(table)
    assert pool.allocate(1) == [2], "grows before it forgets"
    assert pool.find(b"first") == table[0]
    assert pool.allocate(1) == [table[1]], "the tail of a table is forgotten before its head"
    assert pool.find(b"second") is None
    assert pool.find(b"first") == table[0]
    assert pool.num_evictions == 1


def test_refuses_more_than_there_is_and_takes_nothing() -> None:
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="3 blocks wanted, 2 available"):
        pool.allocate(3)
    assert pool.num_available == 2


def test_freeing_twice_is_an_error() -> None:
    pool = BlockPool(2)
    table = pool.allocate(1)
    pool.free(table)
    with pytest.raises(ValueError, match="freed twice"):
        pool.free(table)


class BlockPoolMachine(RuleBasedStateMachine):
    """Random allocation, sharing, remembering, freeing and shrinking."""

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.live: list[list[int]] = []
        self.contents = 0

    @rule(target=tables, count=st.integers(1, 5))
    def allocate(self, count: int) -> list[int]:
        if count > self.pool.num_available:
            with pytest.raises(ValueError, match="wanted"):
                self.pool.allocate(count)
            return []
        table = self.pool.allocate(count)
        self.live.append(table)
        return table

    @rule(table=tables)
    def remember(self, table: list[int]) -> None:
        if any(table is live for live in self.live):
            for block_id in table:
                self.contents += 1
                self.pool.remember(block_id, str(self.contents).encode())

    @rule(target=tables, index=st.integers(0, 200))
    def share_found(self, index: int) -> list[int]:
        block_id = self.pool.find(str(index).encode())
        if block_id is None:
            return []
        self.pool.share([block_id])
        self.live.append([block_id])
        return self.live[-1]

    @rule(table=consumes(tables))
    def free(self, table: list[int]) -> None:
        for index, live in enumerate(self.live):
            if live is table:
                del self.live[index]
                self.pool.free(table)
                break

    @rule(max_blocks=st.integers(0, 12))
    def shrink(self, max_blocks: int) -> None:
        left = self.pool.shrink(max_blocks)
        assert left <= max_blocks or self.pool.blocks[-1].ref_count > 0

    @rule()
    def forget_all(self) -> None:
        self.pool.forget_all()
        assert self.pool.num_cached == 0

    @invariant()
    def nothing_is_lost(self) -> None:
        self.pool.check_integrity(self.live)


TestBlockPoolMachine = BlockPoolMachine.TestCase

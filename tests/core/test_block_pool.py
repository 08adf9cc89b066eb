"""BlockPool and KVCacheManager: nothing is lost, nothing shared changes, the oldest goes first."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from mlx_cb.core.block_pool import PATIENCE, BlockPool, Content


def content(name: bytes, follows: bytes = b"", tokens: tuple[int, ...] = ()) -> Content:
    return Content(follows, array("i", tokens), name, "ann")


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
    pool.remember(table[0], content(b"first"))
    pool.remember(table[1], content(b"second", b"first"))
    pool.free(table)
    assert pool.allocate(1) == [2], "grows before it forgets"
    assert pool.find(b"first") == table[0]
    assert pool.allocate(1) == [table[1]], "the tail of a table is forgotten before its head"
    assert pool.find(b"second") is None
    assert pool.find(b"first") == table[0]
    assert pool.num_evictions == 1
    assert pool.evictions_by_user == {"ann": 1}


def test_what_is_found_often_outlasts_what_came_later() -> None:
    """A system prompt that everyone shares stays while texts that come once go by."""
    pool = BlockPool(6)
    system = pool.allocate(2)
    for index, block_id in enumerate(system):
        pool.remember(block_id, content(b"system%d" % index))
    pool.free(system)
    for _ in range(4):
        pool.share(system)
        pool.free(system)

    def pass_by(number: int) -> None:
        once = pool.allocate(4)
        for index, block_id in enumerate(once):
            pool.remember(block_id, content(b"once%d.%d" % (number, index)))
        pool.free(once)

    lasted = 0
    while pool.find(b"system0") is not None:
        pass_by(lasted)
        lasted += 1
        assert lasted < 100, "popular once is not popular for ever"
        assert pool.find(b"system1") is None or pool.find(b"system0") is not None
    assert lasted > PATIENCE
    pool.check_integrity([])


def test_a_beginning_is_found_in_full_and_in_unfinished_blocks() -> None:
    pool = BlockPool(8)
    table = pool.allocate(3)
    pool.remember(table[0], content(b"a", b"salt", (1, 2, 3, 4)))
    pool.remember(table[1], Content(b"a", array("i", [5, 6]), None))
    pool.remember(table[2], content(b"b", b"a", (5, 6, 7, 8)))
    assert pool.find_beginning(b"salt", array("i", [1, 2, 9])) == (table[0], 2)
    assert pool.find_beginning(b"a", array("i", [5, 6, 7, 1])) == (table[2], 3)
    assert pool.find_beginning(b"a", array("i", [4])) == (0, 0)
    assert pool.find_beginning(b"other salt", array("i", [1, 2])) == (0, 0)
    pool.remember(table[1], Content(b"a", array("i", [5, 6, 9]), None))
    assert pool.find_beginning(b"a", array("i", [5, 6, 9, 9])) == (table[1], 3)
    pool.free(table)
    assert pool.num_cached == 3
    pool.forget_all()
    assert pool.find_beginning(b"a", array("i", [5, 6])) == (0, 0)
    pool.check_integrity([])


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
                name = str(self.contents).encode()
                whole = None if self.contents % 5 == 0 else name
                tokens = array("i", range(self.contents % 7))
                self.pool.remember(block_id, Content(name[:1], tokens, whole, name.decode()[-1:]))

    @rule(target=tables, index=st.integers(0, 200))
    def share_found(self, index: int) -> list[int]:
        block_id = self.pool.find(str(index).encode())
        if block_id is None:
            return []
        self.pool.share([block_id])
        self.live.append([block_id])
        return self.live[-1]

    @rule(target=tables, first=st.integers(1, 9), length=st.integers(1, 7))
    def copy_beginning(self, first: int, length: int) -> list[int]:
        wanted = array("i", range(length))
        block_id, count = self.pool.find_beginning(str(first).encode(), wanted)
        if not count or not self.pool.num_available:
            return []
        found = self.pool.blocks[block_id].content
        assert found is not None
        assert found.tokens[:count] == wanted[:count]
        self.live.append(self.pool.allocate(1))
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
TestBlockPoolMachine.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)

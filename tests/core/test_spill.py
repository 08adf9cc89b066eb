"""Spill and restore under the scheduler: what leaves comes back or is lost, no slot is wrong."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from mlx_cb.core.request import RequestStatus
from tests.core.spill_world import BLOCK_SIZE, World

SHARED = [list(range(16)), list(range(100, 109))]


def crowded(*, on: bool) -> World:
    """Four requests that need 18 blocks each, over 24 blocks, run to their end."""
    world = World(num_blocks=24, max_num_batched_tokens=64)
    if not on:
        world.tier.turn_off()
    for index in range(4):
        world.add(f"r{index}", list(range(50 * index, 50 * index + 9)), output=60)
    world.finish()
    assert all(len(world.answers[f"r{index}"]) == 60 for index in range(4))
    return world


def prefix_on_the_ssd() -> tuple[World, list[int]]:
    """A prompt that was answered as "first", and whose blocks were then taken by another text."""
    world = World(num_blocks=8)
    prompt = list(range(21))
    world.add("first", prompt, output=2)
    world.finish()
    world.idle(100)
    world.add("other", list(range(200, 229)), output=2)  # takes every block
    world.finish()
    return world, prompt


def test_a_request_that_gave_way_comes_back_from_the_ssd() -> None:
    world = crowded(on=True)
    ladder = world.scheduler.ladder
    assert ladder.gave_way > 0
    assert world.scheduler.restoring.num_tokens > 0
    # What is computed again is the unfinished last block, once for each time it gave way.
    assert ladder.recomputed_tokens <= ladder.gave_way * BLOCK_SIZE


def test_without_the_ssd_it_is_computed_again() -> None:
    world = crowded(on=False)
    assert world.scheduler.restoring.num_tokens == 0
    recomputed = world.scheduler.ladder.recomputed_tokens
    assert recomputed > world.scheduler.ladder.gave_way * BLOCK_SIZE


def test_a_prefix_is_restored_for_the_next_turn_and_counts_as_cached() -> None:
    world, prompt = prefix_on_the_ssd()
    request = world.add("second", prompt, output=2)
    world.finish()
    assert request.num_cached_tokens == 20
    computed = sum(
        chunk.num_tokens
        for record in world.scheduler.journal.records
        for chunk in record.prefills
        if chunk.request_id == "second"
    )
    assert computed == 1
    assert world.answers["second"] == world.answers["first"]


def test_a_block_that_is_lost_on_the_way_is_computed() -> None:
    world, prompt = prefix_on_the_ssd()
    request = world.add("second", prompt, output=2)
    world.step()
    assert world.scheduler.restoring.num_tokens == 0
    assert request.waiting_for == "ssd"
    world.deliver(2)
    world.deliver(lose=True)
    world.finish()
    assert request.num_cached_tokens == 8
    assert world.answers["second"] == world.answers["first"]


def test_a_disk_that_does_not_answer_is_not_waited_for_for_ever() -> None:
    world, prompt = prefix_on_the_ssd()
    world.add("second", prompt, output=2)
    steps = 0
    while world.scheduler.has_work:
        world.step()  # nothing is delivered; the clock moves on by itself
        steps += 1
        assert steps < 5000
    assert steps > 100
    assert world.answers["second"] == world.answers["first"]


def test_an_aborted_request_leaves_nothing_behind() -> None:
    world, prompt = prefix_on_the_ssd()
    world.add("second", prompt, output=2)
    world.step()
    world.deliver(1)
    world.scheduler.abort("second")
    world.deliver()
    world.step()
    assert not world.staged
    assert not world.tier.awaits
    assert world.scheduler.kv_cache.pool.num_used == 0


def test_untrusted_content_is_never_written() -> None:
    world = World(num_blocks=12)
    world.add("r", list(range(13)), output=4)
    plan = world.launch()
    world.collect(plan)
    assert world.tier.has_unsaved
    plan = world.launch()
    world.scheduler.fail(plan, "the device failed")
    assert not world.tier.has_unsaved
    world.idle(100)
    assert not world.disk


class SpillMachine(RuleBasedStateMachine):
    """Random requests of two users over a pool that is too small, and a disk that forgets.

    Blocks are taken and written by `step`, forked, freed by ends and `abort`, evicted because there
    are too few, spilled before that and by `write_behind`, restored by `deliver`.
    """

    num_rules = 0
    seen: ClassVar[Counter[str]] = Counter()

    @initialize(num_blocks=st.integers(9, 16), budget=st.integers(3, 20), ahead=st.booleans())
    def start(self, num_blocks: int, budget: int, ahead: bool) -> None:
        self.world = World(num_blocks, max_num_batched_tokens=budget)
        self.ahead = ahead

    @rule(
        shared=st.sampled_from([[], *SHARED]),
        tail=st.lists(st.integers(0, 3), min_size=1, max_size=6),
        output=st.integers(1, 12),
        user=st.sampled_from(["ann", "bob"]),
    )
    def add(self, shared: list[int], tail: list[int], output: int, user: str) -> None:
        self.world.add(f"r{len(self.world.prompts)}", [*shared, *tail], output, user)

    @precondition(lambda self: self.world.scheduler.requests)
    @rule(index=st.integers(0, 1000), output=st.integers(1, 12))
    def fork(self, index: int, output: int) -> None:
        """One more answer to a prompt that is being answered."""
        names = sorted(self.world.scheduler.requests)
        user, prompt, _ = self.world.prompts[names[index % len(names)]]
        self.world.add(f"r{len(self.world.prompts)}", prompt, output, user)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.world.step_ahead() if self.ahead else self.world.step()
            self.world.check()

    @rule(most=st.integers(1, 4))
    def deliver(self, most: int) -> None:
        self.world.deliver(most)

    @precondition(lambda self: self.world.asked)
    @rule()
    def lose_on_the_way(self) -> None:
        self.world.deliver(1, lose=True)

    @precondition(lambda self: self.world.disk)
    @rule(index=st.integers(0, 1000))
    def delete_from_disk(self, index: int) -> None:
        hashes = sorted(self.world.disk)
        self.world.lose(hashes[index % len(hashes)])

    @rule(most=st.integers(1, 4))
    def write_behind(self, most: int) -> None:
        self.world.idle(most)

    @precondition(lambda self: self.world.scheduler.requests)
    @rule(index=st.integers(0, 1000))
    def abort(self, index: int) -> None:
        names = sorted(self.world.scheduler.requests)
        output = self.world.scheduler.abort(names[index % len(names)])
        assert output is not None
        self.world.take([output])

    @precondition(lambda self: self.world.in_flight is None)
    @rule()
    def fail_a_step(self) -> None:
        plan = self.world.launch()
        if not plan.is_empty:
            self.world.take(self.world.scheduler.fail(plan, "failed"))
            self.world.scheduler.restart_running("failed")
            self.world.blocks.clear()
            self.world.take([])

    @rule()
    def the_disk_fails(self) -> None:
        if len(self.world.prompts) % 7 == 6:
            self.world.tier.turn_off()
            self.world.disk.clear()

    @invariant()
    def nothing_is_lost(self) -> None:
        SpillMachine.num_rules += 1
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()
            assert all(
                request.status is not RequestStatus.RUNNING
                for request in self.world.scheduler.requests.values()
            )
            world = self.world
            self.seen["evicted"] += world.scheduler.kv_cache.pool.num_evictions
            self.seen["spilled"] += world.num_stored
            self.seen["restored"] += world.tier.num_restored_blocks
            self.seen["copied"] += world.num_copied
            self.seen["gave way"] += world.scheduler.ladder.gave_way


def test_random_lives_of_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    """2,000 rules and more, all blocks accounted for and every slot right after each."""
    SpillMachine.num_rules = 0
    SpillMachine.seen.clear()
    kinds = {"evicted", "spilled", "restored", "copied", "gave way"}
    for _ in range(6):  # chance may leave a kind out of one round
        run_state_machine_as_test(
            SpillMachine,
            settings=settings(max_examples=60, stateful_step_count=60, deadline=None),
        )
        if all(SpillMachine.seen[kind] for kind in kinds):
            break
    with capsys.disabled():
        print(f"\n{SpillMachine.num_rules} rules; blocks: {dict(SpillMachine.seen)}")
    assert SpillMachine.num_rules >= 2000
    assert all(SpillMachine.seen[kind] for kind in kinds)

"""Equal prefixes are computed once: in blocks that are there, and in those being computed now."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_cb.core.outputs import SampledToken
from mlx_cb.core.request import Request, RequestStatus
from mlx_cb.core.scheduler import Scheduler
from mlx_cb.core.scheduler_output import SchedulerOutput
from mlx_cb.sampling_params import SamplingParams
from tests.core.test_scheduler import scheduler

BLOCK = 4


def request(name: str, prompt: list[int], output: int = 3, user: str = "ann") -> Request:
    return Request(
        request_id=name,
        token_ids=list(prompt),
        params=SamplingParams(max_tokens=output),
        max_output_tokens=output,
        eos_token_ids=frozenset(),
        seed=0,
        user=user,
        cache_salt=user.encode(),
    )


@dataclass
class Memory:
    """Stands for the model: keeps the token behind every slot, and proves what rows would read."""

    slots: dict[tuple[int, int], int] = field(default_factory=dict)
    rows: int = 0

    def run(self, s: Scheduler, plan: SchedulerOutput) -> list[SampledToken]:
        copied = [
            ((copy.target, offset), self.slots.get((copy.source, offset)))
            for copy in plan.copies
            for offset in range(BLOCK)
        ]
        for slot, token in copied:
            self.slots.pop(slot, None)
            if token is not None:
                self.slots[slot] = token
        spans = [(r, r.num_computed_tokens - 1, r.num_computed_tokens) for r in plan.decodes]
        spans += [(c.request, c.start, c.start + c.num_tokens) for c in plan.prefills]
        for r, start, stop in spans:
            for position in range(start, stop):
                self.slots[self.place(r, position)] = r.token_ids[position]
        for r, _, stop in spans:
            read = [self.slots.get(self.place(r, position)) for position in range(stop)]
            assert read == r.token_ids[:stop], f"{r.request_id} reads what is not its text"
        self.rows += plan.num_rows
        return [SampledToken(7 + r.num_tokens % 5) for r in plan.sampling()]

    def place(self, r: Request, position: int) -> tuple[int, int]:
        return r.block_table[position // BLOCK], position % BLOCK


def run(s: Scheduler, memory: Memory, steps: int = 1000) -> None:
    for _ in range(steps):
        if not s.requests:
            return
        plan = s.schedule()
        assert not plan.is_empty, "everyone waits for somebody"
        s.update(plan, memory.run(s, plan), 0.01)
        s.check_integrity()
    assert not s.requests


def test_sixteen_that_come_together_prefill_their_prefix_once() -> None:
    """G9: 512 shared tokens, 16 requests, one copy and the tails."""
    s = scheduler(num_blocks=2000, block_size=BLOCK, prefix_cache=True, max_num_batched_tokens=96)
    prefix = [n % 90 for n in range(512)]
    for index in range(16):
        s.add(request(f"r{index}", [*prefix, 100 + index, 101, 102, 103, 104], output=6))
    memory, most = Memory(), 0
    while s.requests:
        plan = s.schedule()
        s.update(plan, memory.run(s, plan), 0.01)
        most = max(most, s.kv_cache.pool.num_used)
    prefilled = sum(record.rows_prefill for record in s.journal.records)
    assert prefilled == 512 + 16 * 5
    tails = 16 * -(-11 // BLOCK)
    assert most <= 1.15 * (512 // BLOCK + tails)
    waited = [s.explain(f"r{index}")["waited_steps"] for index in range(16)]
    assert sum("shared prefix" in steps for steps in waited) == 15


def test_several_answers_fork_one_prefill() -> None:
    """n=4: the last, partly filled block is copied; only the last token is computed again."""
    s = scheduler(block_size=BLOCK, prefix_cache=True)
    prompt = list(range(1, 24))
    for index in range(4):
        s.add(request(f"r{index}", prompt, output=5))
    memory = Memory()
    run(s, memory)
    assert sum(record.rows_prefill for record in s.journal.records) == 23 + 3
    assert [s.explain(f"r{index}")["num_cached_tokens"] for index in range(4)] == [0, 22, 22, 22]


def test_a_turn_goes_on_in_the_block_where_the_last_one_ended() -> None:
    s = scheduler(block_size=BLOCK, prefix_cache=True)
    s.add(request("first", list(range(1, 8)), output=4))
    memory = Memory()
    first = s.requests["first"]
    run(s, memory)
    written = first.num_tokens - 1
    s.add(request("second", [*first.token_ids, 50, 51, 52]))
    run(s, memory)
    assert s.explain("second")["num_cached_tokens"] == written == 10
    # Texts that part inside a block share its beginning.
    s.add(request("other", [1, 2, 3, 4, 5, 60, 61, 62]))
    run(s, memory)
    assert s.explain("other")["num_cached_tokens"] == 5
    s.add(request("stranger", [1, 2, 3, 4, 5, 60, 61, 62], user="bob"))
    run(s, memory)
    assert s.explain("stranger")["num_cached_tokens"] == 0


def test_the_turn_of_who_waits_goes_to_whom_it_waits_for() -> None:
    """Shortest first would starve the long prompt; then nobody may wait for it in vain."""
    s = scheduler(block_size=BLOCK, prefix_cache=True, max_num_batched_tokens=8)
    prefix = list(range(1, 41))
    s.add(request("long", [*prefix, *range(100, 160)], output=1))
    memory = Memory()
    plan = s.schedule()
    s.update(plan, memory.run(s, plan), 0.01)
    s.add(request("short", [*prefix, 99], output=1))
    steps = 0
    while "short" in s.requests:
        plan = s.schedule()
        s.update(plan, memory.run(s, plan), 0.01)
        steps += 1
    assert steps <= (40 - 8) // 8 + 2, "no later than if it had computed all by itself"
    assert "long" in s.requests
    run(s, memory)


@pytest.mark.parametrize("ending", ["abort", "fail"])
def test_who_waits_goes_on_alone_when_the_other_ends(ending: str) -> None:
    s = scheduler(block_size=BLOCK, prefix_cache=True, max_num_batched_tokens=8)
    prefix = list(range(1, 41))
    s.add(request("first", prefix, output=1))
    s.add(request("second", prefix, output=1))
    memory = Memory()
    plan = s.schedule()
    assert [c.request.request_id for c in plan.prefills] == ["first"]
    if ending == "abort":
        s.update(plan, memory.run(s, plan), 0.01)
        s.abort("first")
    else:
        s.fail(plan, "broken")
        memory.slots.clear()
    run(s, memory)
    assert s.explain("second")["finish_reason"] == "length"
    assert s.explain("second")["num_cached_tokens"] == (8 if ending == "abort" else 0)


def test_a_fixed_batch_does_not_wait_for_prefixes() -> None:
    s = scheduler(block_size=BLOCK, prefix_cache=True, policy="static")
    for name in ("a", "b"):
        s.add(request(name, list(range(1, 30)), output=2))
    plan = s.schedule()
    assert len(plan.prefills) == 2


def test_hits_and_evictions_are_counted_by_user() -> None:
    s = scheduler(num_blocks=8, block_size=BLOCK, prefix_cache=True)
    memory = Memory()
    for name, user in (("a1", "ann"), ("b1", "bob"), ("a2", "ann"), ("b2", "bob")):
        first = 1 if user == "ann" else 60
        s.add(request(name, list(range(first, first + 13)), output=1, user=user))
        run(s, memory)
    stats = s.kv_cache.stats_by_user
    assert (stats["ann"].queries, stats["ann"].hits, stats["ann"].hit_tokens) == (2, 1, 12)
    assert stats["ann"].hit_rate == 12 / 26
    s.add(request("b3", list(range(100, 128)), output=1, user="bob"))
    run(s, memory)
    assert s.kv_cache.pool.evictions_by_user["ann"] > 0
    assert sum(s.kv_cache.pool.evictions_by_user.values()) == s.kv_cache.pool.num_evictions


TEXTS = st.sampled_from([tuple(range(1, 31)), tuple(range(1, 18)), (1, 2, 3), (9, 8, 7, 6, 5)])
ENDS = st.lists(st.integers(100, 102), max_size=9).map(tuple)


@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 12), TEXTS, ENDS, st.integers(1, 9)), min_size=1, max_size=9
    ),
    aborts=st.lists(st.tuples(st.integers(1, 14), st.integers(0, 8)), max_size=3),
    budget=st.integers(1, 40),
    num_blocks=st.integers(14, 50),
    max_num_seqs=st.integers(1, 6),
)
@settings(max_examples=120, deadline=None)
def test_nobody_ever_reads_another_text(
    arrivals: list[tuple[int, tuple[int, ...], tuple[int, ...], int]],
    aborts: list[tuple[int, int]],
    budget: int,
    num_blocks: int,
    max_num_seqs: int,
) -> None:
    """Copies, forks, waits, aborts and preemption over a pool that is nearly too small."""
    s = scheduler(
        num_blocks=num_blocks,
        block_size=BLOCK,
        prefix_cache=True,
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
    )
    requests = [
        request(f"r{i}", [*text, *end], output=output, user="ann" if i % 4 else "bob")
        for i, (_, text, end, output) in enumerate(arrivals)
    ]
    memory = Memory()
    for tick in range(2000):
        for (when, *_), r in zip(arrivals, requests, strict=True):
            if when == tick:
                s.add(r)
        for when, index in aborts:
            if when == tick:
                s.abort(f"r{index}")
        if tick > 14 and not s.requests:
            break
        plan = s.schedule()
        assert not (plan.is_empty and s.requests), "everyone waits for somebody"
        s.update(plan, memory.run(s, plan), 0.01)
        s.check_integrity()
    assert all(r.status is RequestStatus.FINISHED for r in requests)
    assert s.kv_cache.pool.num_used == 0

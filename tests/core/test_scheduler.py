"""The scheduler alone: a stand-in for the model, a clock that stands still."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_cb.config import SchedulerConfig
from mlx_cb.core.block_pool import BlockPool
from mlx_cb.core.fair import CREDIT
from mlx_cb.core.kv_cache_manager import KVCacheManager
from mlx_cb.core.outputs import FinishReason, SampledToken
from mlx_cb.core.request import Request, RequestStatus
from mlx_cb.core.scheduler import Scheduler
from mlx_cb.sampling_params import SamplingParams


def scheduler(
    *, num_blocks: int = 64, block_size: int = 4, prefix_cache: bool = False, **config: object
) -> Scheduler:
    ticks = count()
    kv_cache = KVCacheManager(BlockPool(num_blocks), block_size, prefix_cache=prefix_cache)
    settings_ = {"max_num_batched_tokens": 64} | config
    s = Scheduler(SchedulerConfig(**settings_), kv_cache, clock=lambda: next(ticks) * 1e-3)
    s.growth.output_tokens = 0.0  # lets in more than will fit, so that somebody has to give way
    return s


def request(name: str, prompt: int = 4, output: int = 3, **changes: object) -> Request:
    return Request(
        request_id=name,
        token_ids=list(range(1, prompt + 1)),
        params=SamplingParams(max_tokens=output),
        max_output_tokens=output,
        eos_token_ids=frozenset({0}),
        seed=0,
        **changes,
    )


def step(s: Scheduler, token_id: int = 7) -> list[str]:
    """One unpipelined step; ids that finished."""
    plan = s.schedule()
    sampled = [SampledToken(token_id) for _ in plan.sampling()]
    return [o.request_id for o in s.update(plan, sampled, 0.01) if o.finish_reason]


@pytest.mark.parametrize(
    ("policy", "steps_of_third", "last_step"),
    [("continuous", [3, 4, 5], 6), ("fcfs", [3, 4, 5], 6), ("static", [7, 8, 9], 9)],
)
@pytest.mark.parametrize("pipelined", [False, True])
def test_seed_example(
    policy: str, steps_of_third: list[int], last_step: int, pipelined: bool
) -> None:
    """Two places; requests of 6, 2 and 3 output tokens; the third arrives early."""
    s = scheduler(policy=policy, max_num_seqs=2)
    for name, output in (("first", 6), ("second", 2), ("third", 3)):
        s.add(request(name, output=output))
    in_flight = None
    for _ in range(20):
        plan = s.schedule()
        if not pipelined:
            s.update(plan, [SampledToken(7) for _ in plan.sampling()], 0.01)
            continue
        if in_flight is not None:
            s.update(in_flight, [SampledToken(7) for _ in in_flight.sampling()], 0.01)
        in_flight = plan
    steps = {
        name: [
            record.step
            for record in s.journal.records
            if name in record.decodes or any(c.request_id == name for c in record.prefills)
        ]
        for name in ("first", "second", "third")
    }
    assert steps["third"] == steps_of_third
    assert s.journal.records[-1].step == last_step
    assert steps["first"] == [1, 2, 3, 4, 5, 6]
    assert not s.requests
    s.check_integrity()


def test_static_batch_pays_for_its_finished_rows() -> None:
    s = scheduler(policy="static", max_num_seqs=2)
    s.add(request("long", output=5))
    s.add(request("short", output=1))
    while s.requests:
        step(s)
    assert [record.padding for record in s.journal.records] == [0, 1, 1, 1, 1]
    s.check_integrity()


def test_decode_and_prefill_share_a_step_within_the_budget() -> None:
    s = scheduler(max_num_batched_tokens=6)
    s.add(request("talker", prompt=3, output=20))
    step(s)
    s.add(request("reader", prompt=14, output=1))
    for _ in range(3):
        step(s)
    chunks = [(r.rows_decode, r.rows_prefill) for r in s.journal.records]
    assert chunks == [(0, 3), (1, 5), (1, 5), (1, 4)]


def test_a_full_house_of_decodes_leaves_a_quantum_for_those_who_wait() -> None:
    s = scheduler(max_num_batched_tokens=4, max_num_seqs=16)
    for index in range(6):
        s.add(request(f"talker{index}", prompt=1, output=50))
    for _ in range(6):
        step(s)
    s.add(request("late", prompt=8, output=1))
    step(s)
    assert s.journal.records[-1].rows_decode == 6
    assert s.journal.records[-1].rows_prefill == 4


def test_a_short_prompt_goes_before_a_long_one_but_not_for_ever() -> None:
    s = scheduler(max_num_batched_tokens=4, policy="continuous")
    s.add(request("long", prompt=40, output=1))
    step(s)
    s.add(request("short", prompt=4, output=1))
    step(s)
    assert [c.request_id for c in s.journal.records[-1].prefills] == ["short"]
    aged = s.policy.order(
        [request("new", prompt=4, arrival_time=100.0), request("old", prompt=40)],
        now=100.0,
        rows_per_s=1.0,
    )
    assert [r.request_id for r in aged] == ["old", "new"]


def test_preempts_the_youngest_and_resumes_it() -> None:
    s = scheduler(num_blocks=6, block_size=4)
    s.add(request("old", prompt=7, output=9))
    step(s)
    s.add(request("young", prompt=7, output=9))
    while s.requests:
        step(s)
        s.check_integrity()
    story = s.explain("young")
    assert story is not None
    assert story["num_preemptions"] >= 1
    assert s.explain("old")["num_preemptions"] == 0
    assert story["num_output_tokens"] == 9
    preempted = [r.preempted for r in s.journal.records if r.preempted]
    assert preempted[0] == {"young": "no block for old"}


def test_abort_frees_blocks_at_once_wherever_the_request_is() -> None:
    s = scheduler(max_num_batched_tokens=4, max_num_seqs=2)
    for name in ("decoding", "prefilling", "waiting"):
        s.add(request(name, prompt=4 if name == "decoding" else 30))
        if name != "waiting":
            step(s)
    assert [len(group) for group in (s.decoding, s.prefilling, s.waiting)] == [1, 1, 1]
    for name in ("decoding", "prefilling", "waiting"):
        output = s.abort(name)
        assert output is not None
        assert output.finish_reason is FinishReason.ABORT
        s.check_integrity()
    assert s.kv_cache.pool.num_used == 0
    assert s.abort("waiting") is None


def test_a_row_wasted_by_an_ending_is_dropped() -> None:
    """Pipelined: the request ends on a token that is read after its next row was launched."""
    s = scheduler()
    s.add(request("a", output=10))
    first = s.schedule()
    second = s.schedule()
    assert [o.finish_reason for o in s.update(first, [SampledToken(0)], 0.01)] == [
        FinishReason.STOP
    ]
    assert s.update(second, [SampledToken(5)], 0.01) == []
    s.check_integrity()
    assert s.schedule().is_empty


def test_explains_why_a_request_waits() -> None:
    s = scheduler(max_num_seqs=1)
    s.add(request("runs", output=9))
    s.add(request("waits"))
    step(s)
    step(s)
    assert s.explain("waits")["waiting_for"] == "slots"
    assert s.journal.records[-1].passed_over == {"waits": "slots"}
    assert s.explain("unknown") is None
    while s.requests:
        step(s)
    story = s.explain("waits")
    assert story["waited_steps"] == {"slots": 9}
    assert [(event["what"], event["step"]) for event in story["events"]] == [
        ("queued", 0),
        ("admitted", 10),
        ("chunk", 10),
        ("first token", 10),
        ("finished", 12),
    ]


def test_equal_prefixes_share_blocks_between_requests_of_one_user() -> None:
    s = scheduler(prefix_cache=True)
    s.add(request("first", prompt=10, output=1, cache_salt=b"ann"))
    step(s)
    s.add(request("again", prompt=10, output=1, cache_salt=b"ann"))
    s.add(request("other", prompt=10, output=1, cache_salt=b"bob"))
    step(s)
    assert s.explain("again")["num_cached_tokens"] == 9  # two blocks, and the start of a third
    assert s.explain("other")["num_cached_tokens"] == 0


def service(s: Scheduler, users: dict[str, tuple[int, int]], steps: int) -> dict[str, float]:
    """Seconds charged to users who always have twenty requests of (prompt, output) here."""
    names = count()
    for _ in range(steps):
        for user, (prompt, output) in users.items():
            have = sum(1 for r in s.requests.values() if r.user == user)
            for _ in range(20 - have):
                s.add(request(f"{user}{next(names)}", prompt=prompt, output=output, user=user))
        plan = s.schedule()
        seconds = 0.01 + 0.001 * plan.num_rows
        s.update(plan, [SampledToken(7) for _ in plan.sampling()], seconds)
    return dict(s.policy.served)


def test_backlogged_users_of_different_sizes_get_the_same_service() -> None:
    users = {"chat": (8, 12), "coder": (60, 4), "agent": (150, 20), "editor": (20, 2)}
    s = scheduler(num_blocks=4000, max_num_batched_tokens=48, max_num_seqs=64)
    served = service(s, users, 2000)
    total, squares = sum(served.values()), sum(value**2 for value in served.values())
    assert total**2 / (len(users) * squares) >= 0.97, served


def test_a_hog_does_not_hold_up_a_chat() -> None:
    s = scheduler(num_blocks=4000, max_num_batched_tokens=32, max_num_seqs=8)
    for index in range(60):
        s.add(request(f"hog{index}", prompt=400, output=40, user="hog"))
    for _ in range(20):
        step(s)
    s.add(request("chat", prompt=10, output=4, user="ann"))
    for _ in range(8):
        step(s)
    story = s.explain("chat")
    assert story is not None
    assert story["finish_reason"] == "length"
    assert sum(story["waited_steps"].values()) == 0


def test_a_user_who_was_away_has_not_saved_up() -> None:
    s = scheduler(num_blocks=4000, max_num_batched_tokens=32, max_num_seqs=8)
    service(s, {"busy": (20, 4)}, 200)
    s.add(request("back", prompt=20, output=4, user="away"))
    assert s.policy.served["away"] == pytest.approx(s.policy.served["busy"] - CREDIT)


@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 8), st.integers(1, 30), st.integers(1, 8)), min_size=1, max_size=8
    ),
    budget=st.integers(1, 24),
    max_num_seqs=st.integers(1, 5),
    num_blocks=st.integers(12, 40),
    policy=st.sampled_from(["continuous", "fcfs", "static"]),
    prefix_cache=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_random_runs_end_and_no_running_request_skips_a_step(
    arrivals: list[tuple[int, int, int]],
    budget: int,
    max_num_seqs: int,
    num_blocks: int,
    policy: str,
    prefix_cache: bool,
) -> None:
    s = scheduler(
        num_blocks=num_blocks,
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        policy=policy,
        prefix_cache=prefix_cache,
    )
    requests = [request(f"r{i}", prompt=p, output=o) for i, (_, p, o) in enumerate(arrivals)]
    finished: list[str] = []
    for tick in range(1000):
        for (when, _, _), r in zip(arrivals, requests, strict=True):
            if when == tick:
                s.add(r)
        decoding = {
            r.request_id for r in s.decoding if r.num_tokens + r.num_in_flight < r.max_num_tokens
        }
        finished += step(s)
        s.check_integrity()
        if not s.requests and tick > 8:
            break
        if not s.journal.records:
            continue  # nobody has arrived yet
        record = s.journal.records[-1]
        assert decoding <= set(record.decodes) | set(record.preempted)
        assert record.rows_prefill <= max(budget - record.rows_decode, min(budget, 4))
        assert s.num_running <= max_num_seqs
    assert sorted(finished) == sorted(r.request_id for r in requests)
    assert all(r.status is RequestStatus.FINISHED for r in requests)
    assert all(r.num_output_tokens == r.max_output_tokens for r in requests)

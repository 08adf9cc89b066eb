"""Plans are decided by parameters and seed, and are shaped as their docstrings say."""

import random
from itertools import pairwise

import pytest

from mlx_cb.bench.calls import Run
from mlx_cb.bench.compare import plan_seed
from mlx_cb.bench.distributions import MIXES, LogNormal, arrival_times
from mlx_cb.bench.workloads import WORKLOADS, Workload, make, workload
from mlx_cb.errors import InvalidRequest

from .conftest import record

NAMES = sorted(WORKLOADS)


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_decides_the_plan(name):
    load = make(name, {})
    assert load.plan(3) == load.plan(3)
    assert load.plan(3) != load.plan(4)


@pytest.mark.parametrize("name", NAMES)
def test_fresh_prompts_have_seeds_of_their_own(name):
    seeds = [call.prompt.seed for call in make(name, {}).plan(1).calls()]
    assert len(set(seeds)) == len(seeds)


@pytest.mark.parametrize("name", NAMES)
def test_every_workload_says_what_it_is_and_what_it_was_given(name):
    assert WORKLOADS[name].__doc__
    assert make(name, {}).parameters()


def test_the_issue_s_workloads_are_there():
    issue = {"steady", "churn", "skew", "longjoin", "poisson", "fim", "agent", "turns", "hog"}
    assert issue | {"static", "samplers", "many"} <= set(NAMES)


def test_runs_and_rounds_of_a_session_never_share_a_seed():
    seeds = {plan_seed(name, 1, n) for name in ("steady4", "steady16", "churn") for n in range(3)}
    assert len(seeds) == 9


def test_numbers_in_a_name_are_streams():
    assert make("steady16", {}) == make("steady", {"streams": "16"})


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("nothing", {}, "no workload"),
        ("churn", {"colour": "red"}, "no parameter 'colour'"),
        ("churn", {"calls": "many"}, "must be a int"),
        ("poisson7", {}, "no parameter 'streams'"),
    ],
)
def test_what_is_wrong_is_said(name, parameters, message):
    with pytest.raises(InvalidRequest, match=message):
        make(name, parameters)


def test_one_class_adds_a_workload():
    from dataclasses import dataclass

    @workload("mine")
    @dataclass(frozen=True)
    class Mine(Workload):
        """Mine."""

        size: int = 3

    assert make("mine", {"size": "5"}) == Mine(5)
    del WORKLOADS["mine"]


def test_steady_is_one_call_per_stream_at_once():
    plan = make("steady", {"streams": 5, "prompt": 9, "output": 7}).plan(1)
    assert [len(lane.calls) for lane in plan.lanes] == [1] * 5
    assert {(call.prompt.tokens, call.max_tokens) for call in plan.calls()} == {(9, 7)}


def test_churn_shares_one_queue_of_short_outputs():
    plan = make("churn", {"streams": 4, "calls": 200}).plan(1)
    assert len({id(lane.calls) for lane in plan.lanes}) == 1
    outputs = {call.max_tokens for call in plan.calls()}
    assert (min(outputs), max(outputs)) == (6, 20)


def test_skew_has_one_long_context_beside_the_churn():
    plan = make("skew", {"streams": 4, "calls": 10}).plan(1)
    assert [call.prompt.tokens for call in plan.lanes[0].calls] == [768]
    assert len(plan.lanes) == 4


def test_longjoin_waits_until_all_streams_decode():
    plan = make("longjoin", {"streams": 3}).plan(1)
    waiting = [lane for lane in plan.lanes if lane.starts_when]
    assert [lane.calls[0].group for lane in waiting] == ["long", "short", "long_idle"]
    assert waiting[0].starts_when.calls == 3
    assert waiting[2].starts_when.calls == 5
    assert waiting[2].starts_when.group is None


def test_longjoin_finds_the_gap_that_the_long_prompt_made():
    stream = record([1.0, 1.1, 1.2, 3.2, 3.3], group="stream")
    long = record([3.1], sent=1.15, group="long")
    short = record([2.0], sent=1.16, group="short")
    idle = record([5.5], sent=5.0, group="long_idle")
    figures = make("longjoin", {}).figures(Run([stream, long, short, idle], 0.0, 5.0))
    assert figures["disturbed"]["max"] == pytest.approx(2.0)
    assert figures["undisturbed"]["max"] == pytest.approx(0.1)
    assert figures["disturbed"]["n"] == 2  # the gap the joiners came in, and the long one
    assert figures["short_ttft"] == pytest.approx(0.84)
    assert figures["long_over_idle"] == pytest.approx(1.95 / 0.5)


def test_most_editor_calls_are_hung_up_on():
    calls = make("fim", {"users": 20, "bursts": 5, "per_burst": 10}).plan(1).calls()
    hung_up = [call for call in calls if call.cancel_after_s is not None]
    assert 0.55 < len(hung_up) / len(calls) < 0.65
    assert all(0.15 <= call.cancel_after_s <= 0.40 for call in hung_up)
    assert {call.group for call in hung_up} == {"typed_over"}


def test_turns_go_round_and_count_what_was_reused():
    load = make("turns", {"users": 2, "turns": 2})
    calls = list(load.plan(1).lanes[0].calls)
    assert [(call.user, call.group) for call in calls] == [
        ("user0", "turn1"),
        ("user1", "turn1"),
        ("user0", "turn2"),
        ("user1", "turn2"),
    ]
    first = record([1.0, 1.1, 1.2], user="u", prompt_tokens=10)
    second = record([2.0], sent=1.5, user="u", prompt_tokens=20, cached_tokens=6)
    figures = load.figures(Run([first, second], 0.0, 2.0))
    assert figures["reused_over_reusable"] == pytest.approx(6 / 12)


def test_the_hog_floods_at_once_and_the_victims_are_told_apart():
    plan = make("hog", {"hog_calls": 5, "victims": 2, "turns": 1}).plan(1)
    groups = [call.group for call in plan.calls()]
    assert groups == ["hog"] * 5 + ["victims"] * 2
    victim = record([2.0], sent=1.0, group="victims")
    hog = record([9.0], sent=1.0, group="hog")
    figures = make("hog", {}).figures(Run([victim, hog], 0.0, 1.0))
    assert figures["victims_ttft"]["max"] == pytest.approx(1.0)


def test_poisson_arrives_at_the_rate_it_was_given():
    times = [
        lane.starts_at_s for lane in make("poisson", {"rate": 2.0, "calls": 2000}).plan(1).lanes
    ]
    assert times[0] == 0.0
    assert times[-1] == pytest.approx(1000, rel=0.1)


def test_poisson_refuses_an_unknown_mix():
    with pytest.raises(InvalidRequest, match="no mix 'haiku'"):
        make("poisson", {"mix": "haiku"}).plan(1)


def test_bursts_have_the_same_rate_and_more_variance():
    def gaps(shape):
        times = arrival_times(random.Random(1), 1.0, 20_000, shape)
        return [b - a for a, b in pairwise(times)]

    def variation(values):
        mean = sum(values) / len(values)
        return sum((v - mean) ** 2 for v in values) / len(values) / mean**2

    assert variation(gaps(1.0)) == pytest.approx(1.0, rel=0.1)
    assert variation(gaps(0.25)) == pytest.approx(4.0, rel=0.15)


def test_conversation_lengths_are_the_trace_s():
    rng = random.Random(1)
    lengths = sorted(MIXES["conv"].prompt.draw(rng) for _ in range(20_000))
    assert lengths[10_000] == pytest.approx(1020, rel=0.05)
    assert lengths[18_000] == pytest.approx(2735, rel=0.08)
    assert lengths[-1] <= 8000


def test_scaling_divides_the_median_and_the_maximum():
    scaled = LogNormal(6.93, 0.77, 8000).scaled(8)
    rng = random.Random(1)
    lengths = sorted(scaled.draw(rng) for _ in range(20_000))
    assert lengths[10_000] == pytest.approx(1020 / 8, rel=0.05)
    assert scaled.high == 1000


def refused(sent, told, after=0.01):
    """A call that was answered with 429 and a Retry-After."""
    made = record([], sent=sent)
    made.failure, made.retry_after_s, made.ended_s = "http_429", told, sent + after
    return made


def test_overload_holds_retry_after_against_the_opening_of_the_door():
    runs = [
        record([1.0, 2.0], sent=0.0),
        refused(10.0, told=4.0),
        refused(13.0, told=3.0, after=0.03),
        record([16.0, 17.0], sent=15.0),
    ]
    figures = make("refusals", {"max_wait_s": 2.0}).figures(Run(runs, 0.0, 15.0))
    assert figures["refused"] == 2
    assert figures["failures"] == {}
    assert figures["refused_after"]["max"] == pytest.approx(0.03)
    # It opened between 13 and 15, so at 14: in 4 s and in 1 s.
    assert figures["retry_after_error"]["n"] == 2
    assert figures["retry_after_error"]["max"] == pytest.approx(2.0)
    assert figures["longest_wait_over_limit"] == pytest.approx(0.5)
    assert figures["unanswered"] == 0


def test_a_door_that_was_not_seen_to_open_counts_for_nothing():
    figures = make("refusals", {}).figures(Run([refused(1.0, told=4.0)], 0.0, 1.0))
    assert figures["retry_after_error"] == {"n": 0}
    cut = record([], sent=3.0)
    cut.failure = "cut"
    figures = make("refusals", {}).figures(Run([refused(1.0, told=2.0), cut], 0.0, 3.0))
    assert figures["failures"] == {"cut": 1}


def test_overload_is_one_users():
    calls = make("refusals", {"calls": 50}).plan(1).calls()
    assert {call.user for call in calls} == {"user0"}

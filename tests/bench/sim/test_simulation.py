"""The real scheduler decides, everything ends, and a seed decides everything."""

import dataclasses

import msgspec
import pytest

from mlx_cb.bench.sim.engines import ENGINES, engine, simulate
from mlx_cb.bench.sim.labelled import entry
from mlx_cb.bench.sim.machines import chip_named, model_named
from mlx_cb.bench.sim.substrate import apple
from mlx_cb.bench.sim.users import OneUser
from mlx_cb.bench.workloads import WORKLOADS, make
from mlx_cb.core.scheduler import Scheduler
from mlx_cb.errors import InvalidRequest

MAC = apple(chip_named("M4 Max"), model_named("8B"), 64)
SMALL = {
    "steady": {"streams": 6},
    "many": {"streams": 40, "output": 8},
    "samplers": {"streams": 6, "output": 16},
    "churn": {"streams": 6, "calls": 20},
    "skew": {"streams": 6, "calls": 12, "long_output": 16},
    "static": {"streams": 4, "batches": 3},
    "longjoin": {"streams": 3, "output": 40},
    "fim": {},
    "turns": {"users": 4, "turns": 3, "first": 128},
    "agent": {"agents": 3, "steps": 3},
    "poisson": {"calls": 16, "rate": 2.0, "scale": 4},
    "hog": {"hog_calls": 12, "victims": 3, "turns": 2},
    "people": {"people": 6, "turns": 3, "agents": 0.4},
    "backlog": {"users": 3, "calls": 10, "streams": 4},
    "refusals": {"calls": 60, "rate": 8.0, "scale": 2},
    "shared": {"users": 5, "shared": 128},
    "pressed": {"streams": 4, "output": 16},
}


def small(name):
    return make(name, SMALL[name])


def test_every_workload_has_a_small_form():
    assert set(SMALL) == set(WORKLOADS)


@pytest.mark.parametrize("name", sorted(SMALL))
@pytest.mark.parametrize("label", ["ours", "static", "P"])
def test_every_call_ends_and_every_token_is_counted(name, label):
    outcome = simulate(name, small(name), engine(label), MAC)
    (run,) = outcome.runs
    asked = small(name).plan(1)
    assert len(run.records) == len(asked.calls())
    for record in run.records:
        assert record.ended_s >= record.sent_s
        assert record.chunk_times_s == sorted(record.chunk_times_s)
        assert record.output_tokens == len(record.chunk_times_s)
        if record.is_complete:
            assert record.output_tokens == record.call.max_tokens
            assert record.prompt_tokens >= record.call.prompt.tokens
            assert record.cached_tokens < record.prompt_tokens
        else:
            assert record.cancelled or record.failure == "http_429"
    if label != "P":
        scheduler = outcome.server.scheduler
        assert not scheduler.requests
        assert scheduler.kv_cache.pool.num_used == len(scheduler.pad_table)
        scheduler.check_integrity()


@pytest.mark.parametrize("label", ["ours", "P"])
def test_a_seed_decides_everything(label):
    load = small("poisson")

    def report(seed):
        outcome = simulate("poisson", load, engine(label), MAC, seed=seed, rounds=2)
        return msgspec.json.encode(entry("poisson", load, MAC, [outcome], seed=seed, rounds=2))

    assert report(5) == report(5)
    assert report(5) != report(6)


def test_the_scheduler_is_the_real_one(monkeypatch):
    plans = []
    schedule = Scheduler.schedule

    def counted(self):
        plan = schedule(self)
        plans.append(plan)
        return plan

    monkeypatch.setattr(Scheduler, "schedule", counted)
    outcome = simulate("churn", small("churn"), engine("ours"), MAC)
    assert type(outcome.server.scheduler) is Scheduler
    assert sum(not plan.is_empty for plan in plans) == outcome.server.scheduler.step
    # Its cost model has learned from the simulated seconds.
    predicted = outcome.server.scheduler.cost_model.predict(6, 6 * 30)
    assert predicted == pytest.approx(MAC.ours.seconds(_decode(6, 30)), rel=0.5)


def _decode(rows, context):
    from mlx_cb.bench.sim.cost import PassShape

    return PassShape(rows, rows, context=rows * context)


def hog(settings):
    load = make("hog", {"hog_calls": 30, "hog_prompt": 2048, "victims": 3, "turns": 2, "scale": 8})
    return simulate("hog", load, engine(f"{settings},max_queue_wait_s=1e6"), MAC)


def test_the_policy_that_is_named_decides():
    fair, first = (
        hog(settings).figures["victims_ttft"]["p95"]
        for settings in ("ours:control=frozen", "fcfs:control=frozen")
    )
    assert first > 10 * fair


def test_the_control_loop_is_the_real_one_and_its_acts_are_recorded():
    frozen, acting = hog("fcfs:control=frozen"), hog("fcfs:control=auto")
    assert acting.server.governor.control.records
    p95 = [one.figures["victims_ttft"]["p95"] for one in (frozen, acting)]
    assert p95[1] < 0.5 * p95[0]


def test_memory_that_is_short_preempts_and_nothing_is_lost():
    from dataclasses import replace

    tight = replace(MAC, kv_bytes=MAC.token_bytes * 16 * 60)
    load = make("steady", {"streams": 12, "prompt": 60, "output": 400})  # longer than guessed
    outcome = simulate("steady", load, engine("ours"), tight)
    assert outcome.server.scheduler.num_preemptions > 0
    assert outcome.figures["complete"] == 12


def test_noise_spreads_the_steps_and_stays_decided_by_the_seed():
    from mlx_cb.bench.sim.cost import AppleCost

    cost = AppleCost(chip_named("M4 Max"), model_named("8B"))
    cost.spread = 0.2
    noisy = dataclasses.replace(MAC, ours=cost)
    load = make("steady", {"streams": 4})
    once, again = (simulate("steady", load, engine("ours"), noisy).figures for _ in range(2))
    assert once == again
    calm = simulate("steady", load, engine("ours"), MAC).figures
    assert once["itl"]["p99"] > 1.2 * once["itl"]["p50"]
    assert once["itl"]["p50"] == pytest.approx(calm["itl"]["p50"], rel=0.2)


def test_a_server_without_keys_sees_one_user():
    load = small("hog")
    calls = OneUser(load).plan(3).calls()
    assert {call.user for call in calls} == {"local"}
    assert [call.prompt for call in calls] == [call.prompt for call in load.plan(3).calls()]
    shared = OneUser(small("churn")).plan(1)
    assert len({id(lane.calls) for lane in shared.lanes}) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vllm", "no engine"),
        ("ours:colour=red", "no setting"),
        ("ours:max_num_seqs=many", "cannot be"),
    ],
)
def test_what_is_wrong_with_an_engine_is_said(text, message):
    with pytest.raises(InvalidRequest, match=message):
        engine(text)


def test_engines_take_settings():
    assert engine("ours:max_num_seqs=8,itl_target_ms=50").settings.max_num_seqs == 8
    assert engine("P:prefill_step_size=512").settings.prefill_step_size == 512
    assert engine("ours:max_num_batched_tokens=96").settings.max_num_batched_tokens == 96
    assert {"ours", "fcfs", "static", "one", "P", "T"} <= set(ENGINES)

"""The control loop: signs, thresholds, hysteresis, records; and the hog under fcfs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlx_cb.core.control import CALM_S, KEPT, LONGEST_S, PATIENCE_S, RULES, Action, Control
from mlx_cb.core.restraint import Restraint
from mlx_cb.core.signs import Signs
from mlx_cb.standing import Standing
from tests.core.machine import Machine, percentile
from tests.core.test_fairness import Backlog, chat_beside

WELL = Signs(
    time=0.0, gap_p99_s=0.1, gap_allowed_s=0.1, stall_s=0.1, waits={}, neglected={}, jain=1.0,
    most_served=None, preemptions_per_s=0.0, failed_steps=0, step_age_s=0.0, num_users=2,
    num_batch=0, num_prefilled=100,
)  # fmt: skip


class Story:
    """A control that is shown signs second by second."""

    def __init__(self) -> None:
        self.restraint = Restraint()
        self.control = Control(self.restraint)
        self.time = 0.0

    def shown(self, seconds: float, **changes: object) -> list[str]:
        """Actions begun and, with a minus, undone meanwhile."""
        happened = []
        for _ in range(int(seconds)):
            self.time += 1.0
            for act in self.control.look(replace(WELL, time=self.time, **changes)):
                happened.append(("-" if act.ended is not None else "") + act.action)
        return happened


def test_all_is_well() -> None:
    story = Story()
    assert story.shown(1000) == []
    assert story.restraint == Restraint()


def test_a_slow_step_is_not_yet_a_reason() -> None:
    assert Story().shown(1, gap_p99_s=0.9) == []


def test_long_gaps_make_the_quantum_smaller_step_by_step_and_then_larger_again() -> None:
    story = Story()
    quantum, pause = Action.SMALLER_QUANTUM.value, Action.PAUSE_ADMISSION.value
    assert story.shown(3, gap_p99_s=0.5) == [quantum]
    assert story.restraint.prefill_share == 0.5
    (act,) = story.control.in_force
    assert act.cause == ("token gap p99 over the allowed gap is 5 x, at or above 2 x for 2 s")
    assert "harsher" in act.alternatives[pause]
    assert story.shown(3 * PATIENCE_S, gap_p99_s=0.5) == [quantum, quantum, pause]
    assert (story.restraint.prefill_share, story.restraint.admits) == (0.125, False)
    # Between the thresholds everything stays as it is.
    assert story.shown(100, gap_p99_s=0.15) == []
    assert story.shown(5 * CALM_S) == [f"-{pause}", *[f"-{quantum}"] * 3]
    assert story.restraint == Restraint()
    assert act.ended is not None
    assert "has been at or below 1.2 x for 10 s" in act.ended_because


def test_what_comes_back_is_held_longer_every_time() -> None:
    story = Story()
    times = []
    for _ in range(4):
        assert story.shown(3, gap_p99_s=0.5)
        began = story.time
        while story.restraint.prefill_share < 1.0:
            story.shown(1)
        times.append(story.time - began)
    assert times == sorted(times)
    assert times[3] >= 6 * times[0]


def test_a_neglected_user_has_the_most_served_held_back_until_that_one_has_enough() -> None:
    story = Story()
    trouble = {"neglected": {"ann": 6.0}, "waits": {"ann": 6.0, "hog": 50.0}, "most_served": "hog"}
    assert story.shown(1, **trouble) == [Action.HOLD_USER.value]
    assert story.restraint.held_users == {"hog"}
    (act,) = story.control.in_force
    assert act.target == "hog"
    assert act.alternatives == {"batch class paused": "nothing of the batch class is here"}
    assert story.shown(100, waits={"hog": 50.0}) == [], "it still floods"
    assert story.shown(2) == [f"-{Action.HOLD_USER.value}"]


def test_batch_is_paused_before_anybody_is_held_back() -> None:
    story = Story()
    trouble = {"neglected": {"ann": 6.0}, "most_served": "hog", "num_batch": 3}
    assert story.shown(2 + PATIENCE_S, **trouble) == [
        Action.PAUSE_BATCH.value,
        Action.HOLD_USER.value,
    ]
    assert story.restraint.batch_paused


def test_failing_steps_lead_to_one_at_a_time() -> None:
    story = Story()
    assert story.shown(1, failed_steps=3) == [Action.ONE_AT_A_TIME.value]
    assert story.restraint.one_at_a_time
    assert story.shown(11) == [f"-{Action.ONE_AT_A_TIME.value}"]


def test_an_alarm_is_raised_where_nothing_can_be_done() -> None:
    story = Story()
    assert story.shown(30, jain=0.3) == ["alarm"]
    (act,) = story.control.in_force
    assert act.alternatives == {
        Action.HOLD_USER.value: "nobody has had far more than the fair share"
    }
    assert story.shown(20) == ["-alarm"]


def test_frozen_it_says_what_it_would_do_and_changes_nothing() -> None:
    story = Story()
    story.control.is_frozen = True
    assert story.shown(30, gap_p99_s=0.5) == ["alarm"]
    assert story.restraint == Restraint()
    assert story.control.in_force[0].alternatives[Action.SMALLER_QUANTUM.value] == (
        "the control is frozen"
    )
    story.control.is_frozen = False
    assert story.shown(1, gap_p99_s=0.5) == [Action.SMALLER_QUANTUM.value]
    story.control.is_frozen = True
    assert story.shown(100) == ["-alarm"]
    assert story.restraint.prefill_share == 0.5, "frozen is frozen"


def test_nothing_lasts_for_ever() -> None:
    story = Story()
    assert story.shown(1, failed_steps=3) == [Action.ONE_AT_A_TIME.value]
    happened = story.shown(LONGEST_S, failed_steps=1)
    assert happened == [f"-{Action.ONE_AT_A_TIME.value}"]
    assert not story.restraint.one_at_a_time


def test_what_is_in_force_is_told_however_much_came_after_it() -> None:
    control = Control(Restraint())
    pause = control.note("pause user", "ann", "the operator said so", now=0.0, by="root")
    for number in range(KEPT + 1):
        act = control.note("cancel request", str(number), "the operator said so", now=1.0)
        act.ended = 1.0
    assert pause not in control.records
    assert control.in_force == [pause]
    pause.ended = 2.0
    assert control.in_force == []


def test_every_rule_names_owner_and_a_gap_between_its_thresholds() -> None:
    for rule in RULES:
        assert rule.begins_at > rule.ends_at
        assert rule.ladder
        shown = rule.as_dict()
        assert shown["owner"]
        assert shown["actions"]


def test_the_hog_under_fcfs_is_noticed_acted_upon_and_explained() -> None:
    """An alarm fires, the control acts, tails return, and the record explains it."""
    left_alone = percentile(chat_beside(Machine.make(policy="fcfs"), hog=60), 0.95)
    machine = Machine.make(policy="fcfs", control=True)
    waits = chat_beside(machine, hog=60)
    held = [act for act in machine.acts if act.action == Action.HOLD_USER.value]
    assert {act.target for act in held} == {"hog"}
    first = held[0]
    assert first.began < 25.0
    assert "wait of a neglected user" in first.cause
    assert first.alternatives
    # Who came after the act waits for a step or two, and what runs to end; not for the flood.
    later = percentile(waits[len(waits) // 3 :], 0.95)
    assert percentile(waits, 0.95) < left_alone / 4
    assert later < left_alone / 8
    assert later < 15.0, "as long as eight requests of the flood that run already take to end"
    while machine.scheduler.requests:
        machine.step()
    machine.run(60.0)
    assert first.ended is not None
    assert "wait of a neglected user" in first.ended_because
    assert machine.scheduler.entrance.restraint.held_users == set()
    assert len([name for name in machine.finished if name.startswith("hog")]) == 60


def test_the_fair_policy_gives_the_control_nothing_to_do() -> None:
    machine = Machine.make(control=True)
    chat_beside(machine, hog=60)
    assert machine.acts == []


@pytest.mark.parametrize("field", ["admits", "one_at_a_time", "batch_paused", "held_users"])
def test_whatever_is_held_back_goes_on_when_nothing_else_does(field: str) -> None:
    machine = Machine.make(policy="fcfs")
    restraint = machine.scheduler.entrance.restraint
    value = {"admits": False, "held_users": {"ann"}}.get(field, True)
    setattr(restraint, field, value)
    for _ in range(4):
        machine.add("ann", 50, 10, Standing(rank=1))
    machine.run(60.0)
    assert not machine.scheduler.requests


def test_a_paused_user_stands_still_and_loses_nothing() -> None:
    machine = Machine.make()
    mine = [machine.add("ann", 60, 40) for _ in range(3)]
    machine.run(2.0)
    before = [request.num_output_tokens for request in mine]
    restraint = machine.scheduler.entrance.restraint
    restraint.paused_users.add("ann")
    machine.scheduler.preempt_paused()
    machine.scheduler.check_integrity()
    assert machine.scheduler.is_held
    machine.run(20.0, Backlog({"bob": (20, 10)}))
    assert [request.num_output_tokens for request in mine] == before
    assert {request.waiting_for for request in mine} == {"paused by the operator"}
    restraint.paused_users.clear()
    machine.run(20.0)
    assert all(request.num_output_tokens == 40 for request in mine)


def test_one_request_can_be_paused_with_all_its_choices() -> None:
    machine = Machine.make()
    machine.add("ann", 20, 10)
    request = machine.add("ann", 20, 10)
    machine.scheduler.entrance.restraint.paused_requests.add(request.request_id)
    machine.run(10.0)
    assert list(machine.scheduler.requests) == [request.request_id]

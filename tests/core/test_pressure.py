"""Who gives way when blocks run short: the youngest of who was served most, never the oldest."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_cb.core.outputs import SampledToken
from mlx_cb.core.pressure import admission_order, choose_victim
from mlx_cb.core.request import Request, RequestStatus
from mlx_cb.core.scheduler_output import SchedulerOutput
from tests.core.test_scheduler import request, scheduler


def admitted(name: str, user: str, at: float) -> Request:
    made = request(name, user=user)
    made.admitted_time = at
    return made


SERVED = {"ann": 5.0, "bob": 1.0}


def charged(user: str) -> float:
    return SERVED.get(user, 0.0)


def test_the_youngest_of_the_most_served_user_goes() -> None:
    running = [
        admitted("ann old", "ann", 1),
        admitted("ann young", "ann", 3),
        admitted("bob old", "bob", 2),
        admitted("bob young", "bob", 4),
    ]
    assert choose_victim(running, running, charged).request_id == "ann young"


def test_never_the_oldest_of_a_user_while_another_has_more() -> None:
    running = [admitted("ann", "ann", 9), admitted("bob 1", "bob", 1), admitted("bob 2", "bob", 2)]
    assert choose_victim(running, running, charged).request_id == "bob 2"


def test_the_oldest_counts_also_while_it_is_in_the_step_already() -> None:
    old, young = admitted("old", "ann", 1), admitted("young", "ann", 2)
    assert choose_victim([young], [old, young], charged) is young


def test_when_everyone_has_one_the_youngest_goes() -> None:
    running = [admitted("ann", "ann", 1), admitted("bob", "bob", 2)]
    assert choose_victim(running, running, charged).request_id == "bob"


def test_the_oldest_waits_while_those_who_should_go_are_in_the_step_already() -> None:
    """Who has his only request running is not sent away for somebody's second."""
    old, young = admitted("bob 1", "bob", 1), admitted("bob 2", "bob", 2)
    only = admitted("ann", "ann", 3)
    assert choose_victim([only], [old, young, only], charged) is None


def test_a_decode_that_has_its_row_gives_way_to_another_users_oldest() -> None:
    """Bob's two come first in the step in which ann's only one needs a block that is not there."""
    s = scheduler(num_blocks=9, block_size=4)
    for name, user, prompt in (("a", "bob", 7), ("b", "bob", 7), ("c", "ann", 10)):
        s.add(request(name, prompt=prompt, output=8, user=user))
    gone = []
    while s.requests:
        plan = s.schedule()
        gone += plan.record.preempted
        s.update(plan, [SampledToken(7) for _ in plan.sampling()], 0.01)
        s.check_integrity()
    assert set(gone) == {"b"}


LOADS = st.lists(
    st.tuples(
        st.integers(0, 12),
        st.sampled_from(["ann", "bob", "carl"]),
        st.integers(1, 20),
        st.integers(1, 16),
    ),
    min_size=3,
    max_size=12,
)


@given(
    loads=LOADS, num_blocks=st.integers(10, 16), budget=st.integers(2, 24), pipelined=st.booleans()
)
@settings(max_examples=150, deadline=None)
def test_random_runs_never_send_a_users_oldest_away(
    loads: list[tuple[int, str, int, int]], num_blocks: int, budget: int, pipelined: bool
) -> None:
    """Unless everybody who runs has but one. `request` is asked about at the moment it goes."""
    s = scheduler(num_blocks=num_blocks, block_size=4, max_num_batched_tokens=budget)
    preempt = s._preempt

    def watch(victim: Request, plan: SchedulerOutput, cause: str) -> None:
        everyone = {id(r): r for r in (*s.decoding, *s.prefilling)}.values()
        running = [r for r in everyone if r.status is RequestStatus.RUNNING]
        own = [r for r in running if r.user == victim.user]
        if min(own, key=admission_order) is victim:
            assert len({r.user for r in running}) == len(running), cause
        preempt(victim, plan, cause)

    s._preempt = watch  # type: ignore[method-assign]
    in_flight: list[SchedulerOutput] = []
    for tick in range(3000):
        for index, (when, user, prompt, output) in enumerate(loads):
            if when == tick:
                s.add(request(f"r{index}", prompt=prompt, output=output, user=user))
        if tick > 12 and not s.requests and not in_flight:
            break
        plan = s.schedule()
        s.check_integrity()
        if not plan.is_empty:
            in_flight.append(plan)
        while in_flight and (plan.is_empty or not pipelined or len(in_flight) > 1):
            done = in_flight.pop(0)
            s.update(done, [SampledToken(7) for _ in done.sampling()], 0.01)
    assert not s.requests, "requests are stuck"

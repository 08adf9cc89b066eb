"""A request's time: it ends with what it has, and what it computed stays. C095."""

from __future__ import annotations

from mlx_cb.core.outputs import FinishReason, SampledToken
from tests.core.machine import Machine


def test_ends_with_what_was_produced_and_frees_its_blocks() -> None:
    machine = Machine.make()
    request = machine.add("ann", 20, 1000, deadline=3.0)
    other = machine.add("bob", 20, 60)
    machine.run(3.5)
    assert request.finish_reason is FinishReason.DEADLINE
    assert 10 < request.num_output_tokens < 1000
    assert 3.0 <= machine.finished[request.request_id] <= 3.3
    assert not request.block_table
    machine.scheduler.check_integrity()
    while machine.scheduler.requests:
        machine.step()
    assert other.finish_reason is FinishReason.LENGTH
    assert machine.scheduler.explain(request.request_id)["finish_reason"] == "deadline"


def test_ends_while_it_waits() -> None:
    machine = Machine.make(max_num_seqs=1)
    machine.add("ann", 20, 400)
    late = machine.add("bob", 20, 5, deadline=2.0)
    machine.run(4.0)
    assert late.finish_reason is FinishReason.DEADLINE
    assert late.num_output_tokens == 0


def test_a_row_in_flight_at_the_deadline_is_dropped() -> None:
    machine = Machine.make()
    request = machine.add("ann", 4, 100, deadline=1.0)
    plan = machine.scheduler.schedule()
    machine.now = 2.0
    (output,) = machine.scheduler.expire()
    assert output.finish_reason is FinishReason.DEADLINE
    assert machine.scheduler.update(plan, [SampledToken(7)], 0.1) == []
    assert request.num_output_tokens == 0
    machine.scheduler.check_integrity()


def test_a_request_that_ended_before_is_not_ended_again() -> None:
    machine = Machine.make()
    request = machine.add("ann", 4, 1, deadline=50.0)
    machine.step()
    assert request.finish_reason is FinishReason.LENGTH
    again = machine.add("ann", 4, 1000)
    again.request_id = request.request_id
    machine.now = 60.0
    assert machine.scheduler.expire() == []


def test_c095_retries_of_an_impatient_client_get_there() -> None:
    """Every try is given up in the middle of its prefill; the next one goes on from there."""
    machine = Machine.make()
    computed = []
    prompt = [7 * index % 9973 + 1 for index in range(4000)]
    attempts = 0
    while attempts < 40:
        attempts += 1
        request = machine.add("ann", prompt, 1)
        began = machine.now
        while machine.now - began < 5.0 and request.request_id not in machine.finished:
            machine.step()
        if request.request_id in machine.finished:
            break
        computed.append(request.num_computed_tokens)
        machine.scheduler.abort(request.request_id)
        machine.scheduler.check_integrity()
    assert request.request_id in machine.finished
    assert computed == sorted(set(computed)), "each got further than the one before"
    alone = 4000 * 0.0032 + 4000 / 63 * 0.06
    assert attempts <= 2 * alone / 5.0 + 1

"""Who is let in is expected to fit to the end, from what answers were like so far."""

import pytest

from mlx_cb.core.growth import FIRST_GUESS
from tests.core.test_scheduler import request, scheduler, step


def run(s) -> int:
    """To the end; the most that ran at once."""
    most = 0
    while s.requests:
        step(s)
        s.check_integrity()
        most = max(most, s.num_running)
    return most


@pytest.mark.parametrize(("expected", "gave_way"), [(FIRST_GUESS, False), (0.0, True)])
def test_who_is_let_in_by_what_answers_will_become_never_gives_way(expected, gave_way):
    s = scheduler(num_blocks=21, block_size=4)
    s.growth.output_tokens = expected
    for number in range(6):
        s.add(request(f"r{number}", prompt=12, output=20))
    assert run(s) == (5 if gave_way else 3)  # two, and one towards their end
    assert bool(s.num_preemptions) is gave_way


def test_who_ends_soon_makes_room_for_who_joins_late():
    """Of 20 blocks two want 8 each at their end; a third one's 8 come from the first one's."""
    s = scheduler(num_blocks=21, block_size=4)
    s.growth.output_tokens = FIRST_GUESS
    s.add(request("first", prompt=12, output=20))
    for _ in range(16):
        step(s)
    s.add(request("second", prompt=12, output=20))
    s.add(request("third", prompt=12, output=20))
    step(s)
    assert s.num_running == 3
    run(s)
    assert s.num_preemptions == 0


def test_a_limit_is_believed():
    s = scheduler(num_blocks=21, block_size=4)
    s.growth.output_tokens = FIRST_GUESS
    for number in range(4):
        s.add(request(f"r{number}", prompt=12, output=4))
    assert run(s) == 4  # four times four blocks


def test_alone_it_may_try_what_is_expected_not_to_fit():
    s = scheduler(num_blocks=6, block_size=4)
    s.growth.output_tokens = FIRST_GUESS
    s.add(request("long", prompt=8, output=500))
    step(s)
    assert s.num_running == 1


def test_it_learns_from_answers_that_ended_by_themselves():
    s = scheduler()
    s.growth.output_tokens = 100.0
    s.add(request("a", output=10))
    run(s)
    assert s.growth.output_tokens == pytest.approx(91.0)
    s.add(request("b", output=10))
    step(s)
    s.abort("b")
    assert s.growth.output_tokens == pytest.approx(91.0)


def test_who_is_longer_than_expected_still_takes_a_block_at_a_time():
    s = scheduler()
    s.growth.output_tokens = 2.0
    long = request("long", prompt=4, output=50)
    s.add(long)
    for _ in range(10):
        step(s)
    assert s.growth.expected_tokens(long) == long.num_tokens + 1

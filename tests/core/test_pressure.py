"""Who gives way when blocks run short: the youngest of who was served most, never the oldest."""

from __future__ import annotations

from mlx_cb.core.pressure import choose_victim
from mlx_cb.core.request import Request
from tests.core.test_scheduler import request


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

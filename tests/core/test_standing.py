"""Weight and rank: what one user gets of a busy machine beside another."""

from __future__ import annotations

import math

import msgspec
import pytest

from mlx_cb.engine.messages import Add
from mlx_cb.sampling_params import SamplingParams
from mlx_cb.standing import EQUAL, Standing
from tests.core.test_scheduler import request, scheduler, step


def served(standings: dict[str, Standing], places: int = 1, steps: int = 120) -> dict[str, int]:
    """Requests that each backlogged user has had finished; all requests are alike."""
    s = scheduler(max_num_seqs=places, num_blocks=200)
    number = 0
    done = dict.fromkeys(standings, 0)
    for _ in range(steps):
        for user, standing in standings.items():
            while sum(r.user == user for r in s.requests.values()) < 3 * places:
                s.add(request(f"{user}-{number}", output=2, user=user, standing=standing))
                number += 1
        for finished in step(s):
            done[finished.partition("-")[0]] += 1
    return done


def test_equal_users_get_the_same() -> None:
    done = served({"a": EQUAL, "b": EQUAL})
    assert abs(done["a"] - done["b"]) <= 1


@pytest.mark.parametrize("places", [1, 12])
@pytest.mark.parametrize("weight", [2.0, 3.0])
def test_twice_the_weight_is_twice_the_machine(weight: float, places: int) -> None:
    done = served({"a": Standing(weight=weight), "b": EQUAL}, places)
    assert math.isclose(done["a"] / done["b"], weight, rel_tol=0.1)


def test_batch_goes_after_everyone_who_waits_but_for_its_floor() -> None:
    for places in (1, 8):
        done = served({"a": EQUAL, "b": Standing(weight=100.0, rank=1)}, places, steps=600)
        assert 0 < done["b"] < 0.15 * done["a"]
    assert served({"b": Standing(rank=1)})["b"] > 0


@pytest.mark.parametrize("weight", [0.0, -1.0, math.inf, math.nan])
def test_weights_that_are_none(weight: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        Standing(weight=weight)


def test_it_reaches_the_engines_process() -> None:
    sent = Add("r", [1], SamplingParams(), "u", Standing(2.0, 1))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=Add) == sent

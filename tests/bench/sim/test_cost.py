"""The cost formula gives performance.md's figures, and a fit finds what it was made from."""

import random

import numpy as np
import pytest

from mlx_cb.bench.sim.cost import (
    KNOTS,
    AppleCost,
    FittedCost,
    PassShape,
    draw_seconds,
    features,
)
from mlx_cb.bench.sim.fit import Measured, fit_cost
from mlx_cb.bench.sim.machines import CHIPS, MODELS, chip_named, kv_room, model_named
from mlx_cb.errors import InvalidRequest

DENSE, MIXED = "Llama-3.1-8B-4bit", "Qwen3-30B-A3B-4bit"

# Decode tok/s at 1k context for 1, 2, 4, 8, 16, 32 rows, and prefill tok/s (of 512 at once): the
# table of performance.md, which was made by another program from the same formula.
DECODE = {
    ("M1", DENSE): (13, 17, 19, 25, 47, 80, 112),
    ("M2 Pro", DENSE): (36, 47, 55, 64, 119, 208, 282),
    ("M2 Pro", MIXED): (52, 80, 110, 145, 191, 271, 409),
    ("M3 Max", DENSE): (68, 131, 208, 222, 276, 473, 687),
    ("M4 Max", DENSE): (93, 179, 283, 303, 342, 594, 831),
    ("M4 Max", MIXED): (114, 183, 266, 364, 494, 710, 1202),
    ("M5", DENSE): (29, 56, 86, 89, 153, 246, 817),
    ("M3 Ultra", DENSE): (117, 226, 370, 420, 548, 942, 1434),
    ("M5 Max", DENSE): (99, 191, 306, 333, 511, 849, 2725),
    ("M5 Max", MIXED): (108, 178, 269, 380, 528, 769, 3840),
}
# Step ms with 8 decodes at 1k alone, and with 24, 56 and 248 rows of a chunk behind 1k.
STEPS = {
    ("M1", DENSE): (315, 331, 630, 2425),
    ("M4 Max", DENSE): (26, 45, 85, 326),
    ("M4 Max", MIXED): (22, 40, 65, 238),
    ("M5 Max", DENSE): (24, 29, 30, 102),
}


def decode(rows):
    return PassShape(rows, rows, context=rows * 1024)


def prefill(tokens):
    return PassShape(tokens, 1, chunks=1, pairs=tokens**2 / 2, scores=tokens**2)


@pytest.mark.parametrize(("chip", "model"), list(DECODE))
def test_speeds_are_those_of_the_table(chip, model):
    cost = AppleCost(CHIPS[chip], MODELS[model])
    *speeds, prefill_speed = DECODE[chip, model]
    for rows, speed in zip((1, 2, 4, 8, 16, 32), speeds, strict=True):
        assert rows / cost.seconds(decode(rows)) == pytest.approx(speed, rel=0.04, abs=0.6)
    assert 512 / cost.seconds(prefill(512)) == pytest.approx(prefill_speed, rel=0.04)


@pytest.mark.parametrize(("chip", "model"), list(STEPS))
def test_mixed_steps_are_those_of_the_table(chip, model):
    cost = AppleCost(CHIPS[chip], MODELS[model])
    for extra, expected in zip((0, 24, 56, 248), STEPS[chip, model], strict=True):
        shape = decode(8)
        if extra:
            shape.rows += extra
            shape.context += 1024
            shape.pairs = extra * (1024 + extra / 2)
        assert cost.seconds(shape) * 1e3 == pytest.approx(expected, rel=0.05, abs=1.0)


def test_a_tile_is_paid_for_whole():
    cost = AppleCost(CHIPS["M4 Max"], MODELS[DENSE])
    assert cost.seconds(PassShape(13)) == cost.seconds(PassShape(32))
    assert cost.seconds(PassShape(33)) > 1.8 * cost.seconds(PassShape(32))


def test_names_are_found_and_unknown_ones_are_said():
    assert chip_named("m4max").name == "M4 Max"
    assert chip_named("M5").name == "M5"
    assert model_named("8b").name == DENSE
    with pytest.raises(InvalidRequest, match="M3 Ultra"):
        chip_named("M9")
    with pytest.raises(InvalidRequest, match="does not fit"):
        kv_room(MODELS[MIXED], 16)


def test_a_fit_finds_the_cost_that_made_the_steps():
    rng = random.Random(3)
    slopes = [3e-3, 3e-3, 2e-3, 2e-3, 2e-3, 2e-3, 2e-3, 2e-3, 2e-3, 2e-3]
    true = FittedCost((0.06, *slopes, 8e-3, 4e-4, 0.0, 2e-6, 3e-8, 1e-6, 0.02))
    steps = []
    for _ in range(300):
        decodes, tokens, start = (
            rng.randint(0, 32),
            rng.choice((0, 16, 64, 512)),
            rng.randint(0, 500),
        )
        shape = PassShape(
            max(1, decodes + tokens),
            decodes,
            context=decodes * 200 + start,
            chunks=int(tokens > 0),
            scores=tokens * (start + tokens),
            copied=rng.choice((0, 200, 8000)),
        )
        noise = rng.lognormvariate(0.0, 0.05)
        steps.append(Measured([shape], true.seconds(shape) * noise))
    found = fit_cost([steps]).cost
    errors = [abs(found.seconds(s.shapes[0]) / true.seconds(s.shapes[0]) - 1) for s in steps]
    assert np.mean(errors) < 0.03
    assert found.spread == pytest.approx(0.05, rel=0.3)
    assert all(value >= 0 for value in found.coefficients)
    assert found.coefficients[-1] == pytest.approx(0.02, rel=0.3)  # to begin to move


def test_a_fit_of_noisy_steps_is_their_mean():
    """Errors relative to what was measured would find 0.92 of it."""
    rng = random.Random(4)
    shapes = [PassShape(1 + number % 16) for number in range(2000)]
    steps = [Measured([s], (0.1 + 0.01 * s.rows) * rng.lognormvariate(-0.02, 0.2)) for s in shapes]
    found = fit_cost([steps]).cost
    assert sum(map(found.seconds, shapes)) == pytest.approx(
        sum(step.seconds for step in steps), rel=0.01
    )
    assert found.spread == pytest.approx(0.2, rel=0.1)


def test_each_probe_has_a_pace_of_its_own():
    shapes = [PassShape(rows) for rows in range(1, 33)]
    probes = [
        [Measured([shape], pace * (0.05 + 0.003 * shape.rows)) for shape in shapes]
        for pace in (0.8, 1.0, 1.2)
    ]
    found = fit_cost(probes)
    assert found.paces == pytest.approx([0.8, 1.0, 1.2])
    assert found.cost.seconds(PassShape(8)) == pytest.approx(0.074, rel=0.01)
    assert found.cost.spread < 0.01


def test_drawn_times_have_the_predicted_mean():
    cost = FittedCost((1.0,) + (0.0,) * (len(KNOTS) + 7), spread=0.3)
    rng = random.Random(5)
    drawn = [draw_seconds(cost, PassShape(1), rng) for _ in range(20_000)]
    assert np.mean(drawn) == pytest.approx(1.0, rel=0.01)
    assert np.std(np.log(drawn)) == pytest.approx(0.3, rel=0.02)


def test_one_stall_does_not_bend_a_fit():
    shapes = [PassShape(rows, rows, context=100 * rows) for rows in range(1, 33)]
    steps = [Measured([shape], 0.05 + 0.003 * shape.rows) for shape in shapes]
    steps[20].seconds = 5.0
    found = fit_cost([steps]).cost
    assert found.seconds(PassShape(8, 8, context=800)) == pytest.approx(0.074, rel=0.02)


def test_beyond_what_was_measured_rows_cost_what_they_cost_before():
    steps = [Measured([PassShape(rows)], 0.05 + 0.002 * rows) for rows in range(1, 130)]
    found = fit_cost([steps]).cost
    assert found.seconds(PassShape(2000)) == pytest.approx(0.05 + 0.002 * 2000, rel=0.05)


def test_coefficients_must_be_those_of_the_features():
    assert len(features(PassShape(5))) == len(KNOTS) + 8
    with pytest.raises(ValueError, match="coefficients"):
        FittedCost((1.0, 2.0))
    with pytest.raises(ValueError, match="too few"):
        fit_cost([[Measured([PassShape(1)], 1.0)]])

"""The cost model finds the line behind noisy steps and never gives a useless budget."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_cb.core.cost_model import StepCostModel


def test_finds_base_rows_and_context() -> None:
    rng = random.Random(0)
    model = StepCostModel()
    for _ in range(400):
        rows = rng.choice([1, 2, 4, 8, 16, 24, 48, 64, 96])
        context = rows * rng.randint(10, 400)
        seconds = 0.060 + 0.0032 * rows + 2e-6 * context
        model.observe(rows, context, seconds * rng.uniform(0.97, 1.03))
    for rows, context in ((1, 100), (16, 3000), (64, 9000)):
        wanted = 0.060 + 0.0032 * rows + 2e-6 * context
        assert abs(model.predict(rows, context) - wanted) < 0.1 * wanted
    assert 45 <= model.rows_within(0.060 + 0.0032 * 50, 0) <= 55


def test_one_stall_does_not_change_the_plan() -> None:
    model = StepCostModel()
    for _ in range(50):
        for rows in (1, 8, 32):
            model.observe(rows, 0, 0.05 + 0.003 * rows)
    before = model.rows_within(0.2, 0)
    model.observe(8, 0, 30.0)
    assert model.rows_within(0.2, 0) > 0.6 * before


def test_an_hour_of_equal_steps_does_not_wash_out_the_others() -> None:
    model = StepCostModel()
    for rows in (1, 8, 64):
        for _ in range(5):
            model.observe(rows, 0, 0.05 + 0.003 * rows)
    for _ in range(5000):
        model.observe(8, 0, 0.05 + 0.003 * 8)
    assert abs(model.predict(64, 0) - (0.05 + 0.003 * 64)) < 0.01


def test_each_number_of_rows_is_predicted_by_its_own_steps():
    """Small products and large ones do not cost the same per row; no line goes through all."""
    seconds = {1: 0.11, 4: 0.12, 8: 0.13, 16: 0.19, 32: 0.3, 64: 0.42, 128: 0.7, 512: 2.5}
    model, rng = StepCostModel(), random.Random(0)
    for _ in range(60):
        for rows, taken in seconds.items():
            model.observe(rows, 0, taken * rng.uniform(0.95, 1.05))
    assert model.base + 8 * model.per_row > 0.15
    for rows, taken in seconds.items():
        assert model.predict(rows, 0) == pytest.approx(taken, rel=0.06)
    assert model.predict(24, 0) == pytest.approx(0.245, rel=0.06)
    assert model.predict(768, 0) > 1.3 * model.predict(512, 0)
    assert 60 <= model.rows_within(0.42, 0) <= 68


def test_few_steps_of_a_size_hardly_count_against_the_line_through_the_others():
    model = StepCostModel()
    for _ in range(50):
        for rows in (1, 8, 32, 128):
            model.observe(rows, 0, 0.05 + 0.003 * rows)
    model.observe(64, 0, 3 * 0.242)
    assert model.predict(64, 0) < 1.8 * 0.242
    assert model.predict(128, 0) < 1.8 * 0.434


@given(st.lists(st.tuples(st.integers(1, 600), st.integers(0, 10**6), st.floats(1e-5, 50.0))))
def test_budgets_stay_sane(steps: list[tuple[int, int, float]]) -> None:
    model = StepCostModel()
    for rows, context, seconds in steps:
        model.observe(rows, context, seconds)
        assert model.base > 0
        assert model.per_row > 0
        assert model.per_context >= 0
        assert 1 <= model.rows_within(0.1, context) <= 4096
        costs = [model.predict(rows, 0) for rows in (1, 7, 33, 100, 601, 4096)]
        assert costs[0] > 0
        assert costs == sorted(costs)


@pytest.mark.parametrize("per_pair", [0.0, 2e-6, 5e-6])
def test_a_long_prompt_s_chunks_cost_more_the_longer_it_has_become(per_pair):
    """Two prompts of 2000 tokens beside 8 streams: the second one's steps are predicted."""
    model, rng, errors = StepCostModel(), random.Random(3), []
    for prompt in range(2):
        for step in range(60):
            rows, context = 8 + 20 * (step % 3 == 0), 8 * 100
            model.observe(rows, context, 0.06 + 0.003 * rows)
        for start in range(0, 2000, 40):
            pairs, context = 40 * start + 820, 8 * 100 + start
            seconds = 0.06 + 0.003 * 48 + per_pair * pairs
            if prompt:
                errors.append(abs(model.predict(48, context, pairs) / seconds - 1))
            model.observe(48, context, seconds * rng.uniform(0.97, 1.03), pairs)
    assert sum(errors) / len(errors) < 0.08
    assert abs(model.per_pair - per_pair) < 0.4e-6 + 0.2 * per_pair


def test_rows_of_a_chunk_behind_a_long_prefix_cost_more_each():
    model = StepCostModel(base=0.05, per_row=0.002)
    assert model.rows_within(0.25, 0, 8, 1000) == 100
    model.per_pair = 2e-6
    chunk = model.rows_within(0.25, 0, 8, 1000) - 8
    assert 40 < chunk < 46
    within, beyond = (
        model.predict(8 + rows, 0, rows * 1000 + rows * rows // 2) for rows in (chunk, chunk + 1)
    )
    assert within <= 0.25 < beyond

"""sample_rows against the oracle, against sorting, and against the product's own host sampler."""

from __future__ import annotations

import logging

import mlx.core as mx
import numpy as np
import pytest

from mlx_cb.attention.kernels import KernelCall
from mlx_cb.attention.oracle import draw, lowest_kept
from mlx_cb.core.request import Request
from mlx_cb.model.metal_cases import FILTERS, SampleCase, filters_of
from mlx_cb.model.metal_ops import sample_rows, sample_rows_call
from mlx_cb.model.metal_sampler import MetalSampler
from mlx_cb.model.sampler import SampleRow, choose_on_device, choose_on_host
from mlx_cb.sampling_params import SamplingParams

from .checks import assert_checked, assert_clean_text, assert_correct, launcher
from .emulator import Report, Schedule, emulate


def check_row(logits: np.ndarray, cut: float, token: int, row: tuple) -> None:
    """Right, except where float32 lies within rounding of a boundary of the distribution."""
    k, p, min_p, uniform = row
    expected, above = lowest_kept(logits, k, p, min_p)
    kept, wanted = logits >= cut, logits >= expected - 1e-6
    assert kept[token]
    assert np.isfinite(logits[token])
    if not np.array_equal(kept & np.isfinite(logits), wanted & np.isfinite(logits)):
        mass = np.exp(logits - logits.max())
        if 0 < k < len(logits):
            mass = np.where(logits >= np.sort(logits)[-k], mass, 0)
        mass /= mass.sum()
        tiny = mass[kept ^ wanted].max() < 1e-9
        assert tiny or abs(mass[kept].sum() - p) < 1e-4 or abs(above - p) < 1e-4
    chosen, distance = draw(logits, cut, uniform)
    assert token == chosen or distance < 1e-5


@pytest.mark.parametrize("vocabulary", [40, 1000])
@pytest.mark.parametrize("shape", ["normal", "flat", "peaked", "ties", "banned"])
def test_rows_agree_with_the_oracle(vocabulary: int, shape: str) -> None:
    rng = np.random.default_rng(vocabulary)
    logits = (rng.standard_normal((len(FILTERS), vocabulary)) * 3).astype(np.float32)
    if shape == "flat":
        logits *= 1e-3
    elif shape == "peaked":
        logits *= 20
    elif shape == "ties":
        logits = np.rint(logits).astype(np.float32)
    elif shape == "banned":
        logits[:, ::2] = -np.inf
    answers = []
    for schedule in Schedule:
        reports: list[Report] = []
        launch = launcher(reports, schedule, check=schedule is Schedule.RANDOM)
        cut, token = sample_rows(mx.array(logits), filters_of(FILTERS), launch)
        assert reports[0].findings == []
        answers.append((np.array(cut), np.array(token)))
    for other in answers[1:]:
        assert np.array_equal(answers[0][0], other[0])
        assert np.array_equal(answers[0][1], other[1])
    for index, row in enumerate(FILTERS):
        check_row(logits[index], float(answers[0][0][index]), int(answers[0][1][index]), row)


def test_draws_follow_the_distribution() -> None:
    """256 random numbers over eight tokens land where the CDF says."""
    logits = np.array([0.5, 2.0, -1.0, 2.0, 1.0, 0.0, -3.0, 1.5], np.float32)
    steps = 256
    rows = [(0, 1.0, 0.0, (i + 0.5) / steps) for i in range(steps)]
    _, token = sample_rows(mx.array(np.tile(logits, (steps, 1))), filters_of(rows), emulate)
    expected = [draw(logits, -np.inf, row[3])[0] for row in rows]
    assert np.array(token).tolist() == expected


def sample_row(index: int, **settings: float) -> SampleRow:
    request = Request(
        request_id=str(index),
        token_ids=[1],
        params=SamplingParams(**settings),
        max_output_tokens=1,
        eos_token_ids=frozenset(),
        seed=11 * index,
    )
    return SampleRow(request, 1)


SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
]


def test_same_tokens_as_the_host_sampler() -> None:
    """The product's sampler sorts; a request must get the same text with and without."""
    rows = [sample_row(i, **SETTINGS[i % len(SETTINGS)]) for i in range(36)]
    rng = np.random.default_rng(3)
    logits = (rng.standard_normal((len(rows), 500)) * 3).astype(np.float32)
    token = MetalSampler(emulate).choose(mx.array(logits), rows)
    assert np.array(token).tolist() == choose_on_host(logits, rows).tolist()


def test_a_wrong_kernel_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    def wrong(call: KernelCall) -> list[mx.array]:
        threshold, token = emulate(call)
        return [threshold, (token + 1) % 40]

    def broken(call: KernelCall) -> list[mx.array]:
        raise RuntimeError("Unable to build metal library")

    rows = [sample_row(i, **settings) for i, settings in enumerate(SETTINGS)]
    logits = mx.array(np.random.default_rng(4).standard_normal((len(rows), 40)).astype(np.float32))
    expected = np.array(choose_on_device(logits, rows)).tolist()
    for launch in (wrong, broken):
        caplog.clear()
        chooser = MetalSampler(launch)
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                assert np.array(chooser.choose(logits, rows)).tolist() == expected
        assert caplog.text.count("sample_rows is switched off") == 1


def test_a_row_of_nan_gives_a_token_of_the_vocabulary() -> None:
    logits = mx.full((1, 40), float("nan"))
    _, token = sample_rows(logits, filters_of([(5, 0.9, 0.1, 0.5)]), emulate)
    assert 0 <= int(token[0]) < 40


def test_text_and_vectors() -> None:
    assert_clean_text(sample_rows_call(mx.zeros((2, 40)), filters_of(FILTERS[:2])))
    problem = SampleCase(300).build()
    assert_correct(problem)
    assert_checked(problem)

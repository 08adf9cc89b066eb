"""Our power of two is right everywhere, and SwiGLU over it is mlx-lm's."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_cb.attention.exponential import MIN_SIZE, exp2, is_worthwhile


def powers(values: np.ndarray) -> np.ndarray:
    """exp2 of a few values, by the loops that only many get."""
    x = mx.array(np.resize(values.astype(np.float32), MIN_SIZE))
    assert is_worthwhile(x)
    return np.array(exp2(x))[: len(values)]


@pytest.mark.parametrize(("low", "high"), [(-1, 0), (-0.5, 0.5), (-30, 0), (-126, 128)])
def test_within_one_part_in_ten_million(low, high):
    x = np.random.default_rng(1).uniform(low, high, 1 << 18).astype(np.float32)
    error = np.array(exp2(mx.array(x))) / np.exp2(x.astype(np.float64)) - 1
    assert np.abs(error).max() < 1.2e-7


def test_whole_numbers_are_exact():
    x = np.arange(-126, 128)
    assert np.array_equal(powers(x), np.exp2(x.astype(np.float64)))


def test_what_is_masked_counts_nothing():
    assert powers(np.array([-127.0, -1e4, -1e30, -np.inf])).tolist() == [0, 0, 0, 0]
    between = powers(np.linspace(-127, -126, 1000))
    assert between.min() >= 0
    assert between.max() < 1.2e-38


def test_what_is_too_large_is_infinite():
    assert powers(np.array([128.0, 1e4, np.inf])).tolist() == [np.inf] * 3


def test_what_is_no_number_stays_none():
    assert np.isnan(powers(np.array([np.nan, 0.0]))).tolist() == [True, False]


def test_few_numbers_and_halves_go_mlx_s_way():
    for x in (mx.zeros(MIN_SIZE - 1), mx.zeros(MIN_SIZE, dtype=mx.float16)):
        assert not is_worthwhile(x)
        assert exp2(x).dtype == x.dtype
        assert bool((exp2(x) == 1).all())

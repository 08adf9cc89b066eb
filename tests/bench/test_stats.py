"""Order statistics, fairness and fits against known answers."""

import pytest

from mlx_cb.bench.stats import jain, linear_fit, median, summarize


def test_percentiles_of_a_hundred_and_one_values():
    summary = summarize([float(value) for value in range(101)])
    assert summary == {"n": 101, "p50": 50.0, "p95": 95.0, "p99": 99.0, "max": 100.0}


def test_percentiles_interpolate_between_neighbours():
    assert summarize([1.0, 2.0])["p50"] == 1.5


def test_nothing_has_only_a_count():
    assert summarize([]) == {"n": 0}


@pytest.mark.parametrize(
    ("shares", "expected"),
    [([5, 5, 5, 5], 1.0), ([1, 0, 0, 0], 0.25), ([1, 2, 3], 36 / 42), ([7], None), ([0, 0], None)],
)
def test_jain(shares, expected):
    assert jain(shares) == (None if expected is None else pytest.approx(expected))


def test_median_of_an_even_number_lies_between():
    assert median([4.0, 1.0, 3.0, 2.0]) == 2.5


def test_linear_fit_finds_the_line_it_was_made_from():
    rows, context = [1, 8, 16, 32, 8], [10, 900, 50, 3000, 20]
    target = [3 + 2 * r + 0.5 * c for r, c in zip(rows, context, strict=True)]
    fit = linear_fit([rows, context], target)
    assert fit.coefficients == pytest.approx([3, 2, 0.5])
    assert fit.r2 == pytest.approx(1.0)


def test_linear_fit_knows_when_there_is_no_line():
    assert linear_fit([[1, 2, 3, 4]], [1, -1, -1, 1]).r2 == pytest.approx(0.0)

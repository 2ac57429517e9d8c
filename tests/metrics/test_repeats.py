"""Means and differences over rounds."""

import math
from typing import Any

import pytest

from paceline.metrics.repeats import MEASURES, difference, estimate, mean_summary

A, L, T = MEASURES


@pytest.fixture
def stats() -> Any:
    """SciPy's, whose import takes a second of those who run other tests."""
    from scipy import stats

    return stats


def test_the_interval_is_students(stats: Any) -> None:
    found = estimate([1.0, 2.0, 4.0])
    low, high = stats.t.interval(0.95, 2, loc=7 / 3, scale=stats.sem([1.0, 2.0, 4.0]))
    assert (found.mean, found.standard_error) == pytest.approx((7 / 3, math.sqrt(7 / 3 / 3)))
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-4)


@pytest.mark.parametrize("rounds", [*range(2, 33), 100])
def test_the_quantiles_are_right_and_never_too_narrow_beyond_the_table(stats: Any, rounds: int) -> None:
    found = estimate([0.0] * (rounds - 1) + [1.0])
    assert found.high is not None
    assert found.standard_error is not None
    quantile = (found.high - found.mean) / found.standard_error
    true = stats.t.ppf(0.975, rounds - 1)
    assert quantile == pytest.approx(true, abs=6e-5) if rounds <= 31 else true < quantile < 2.0424


def test_one_round_tells_no_spread() -> None:
    found = estimate([0.25])
    assert (found.mean, found.standard_error, found.low, found.high, found.rounds) == (0.25, None, None, None, 1)


def test_differences_are_paired_by_round() -> None:
    ours = [{A: 0.9, L: 0.2, T: 0.1}, {A: 0.5, L: 1.2, T: 1.1}]
    theirs = [{A: 0.8, L: 0.3, T: 0.3}, {A: 0.4, L: 1.3, T: 1.3}]
    found = difference(ours, theirs)
    assert list(found) == [A, L, T]
    # Rounds differ by far more than the strategies do: unpaired, the error would be 0.28.
    accuracy, loss = found[A], found[T]
    assert accuracy is not None
    assert (accuracy.mean, accuracy.standard_error) == pytest.approx((0.1, 0.0), abs=1e-12)
    assert loss is not None
    assert loss.mean == pytest.approx(-0.2)


def test_a_round_that_one_side_lacks_is_left_out() -> None:
    found = difference([{A: 0.9}, {A: 0.1}], [{A: 0.8}], [A])[A]
    assert found is not None
    assert (found.mean, found.rounds) == (pytest.approx(0.1), 1)


def test_a_round_without_the_figure_leaves_no_difference() -> None:
    assert difference([{A: 0.9}, {A: None}], [{A: 0.8}, {A: 0.7}], [A]) == {A: None}
    assert difference([], [], [A]) == {A: None}
    assert difference([{}], [{}], [A]) == {A: None}


def test_the_mean_summary_keeps_numbers_and_lists_of_them() -> None:
    first = {"updates": 3, "loss": 1.0, "busy": [0.5, None], "staleness": {"0": 3}, "interrupted": False, "note": "x"}
    second = {"updates": 4, "loss": None, "busy": [1.0, 0.2], "staleness": {"1": 3}, "interrupted": False, "note": "x"}
    assert mean_summary([first, second]) == {"updates": 3.5, "loss": None, "busy": [0.75, None]}
    assert mean_summary([]) == {}

"""The mean over the interval against closed forms."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.metrics.repeats import interval_mean, weighted_mean

FINITE = st.floats(-1e6, 1e6)


def times(count: int) -> st.SearchStrategy[list[float]]:
    return st.lists(st.floats(0, 1e4), min_size=count, max_size=count, unique=True).map(sorted)


def test_a_straight_line_has_the_mean_of_its_ends_wherever_its_points_lie() -> None:
    at = [0.0, 0.1, 0.15, 3.0, 7.7, 10.0]
    assert interval_mean(at, [2 + 3 * t for t in at]) == pytest.approx(2 + 3 * 5.0, rel=1e-15)


def test_a_parabola_converges_to_its_integral() -> None:
    at = [k / 1000 for k in range(1001)]
    # The trapezoid rule overestimates a convex function by h²/12 · (f'(1) - f'(0)).
    assert interval_mean(at, [t * t for t in at]) == pytest.approx(1 / 3 + 1e-6 / 6, rel=1e-12)


def test_a_long_plateau_outweighs_many_early_points() -> None:
    assert interval_mean([0, 1, 2, 3, 100], [0, 0, 0, 1, 1]) == pytest.approx((0.5 + 97) / 100)


def test_what_was_not_scored_is_bridged_by_a_straight_line() -> None:
    assert interval_mean([0, 1, 4], [0.0, None, 4.0]) == 2.0


def test_unscored_ends_shorten_the_interval() -> None:
    assert interval_mean([0, 1, 3, 9], [None, 2.0, 4.0, None]) == 3.0


@pytest.mark.parametrize(("values", "mean"), [([], None), ([None], None), ([5.0], 5.0), ([1.0, 2.0], 1.5)])
def test_points_without_an_interval(values: list[float | None], mean: float | None) -> None:
    assert interval_mean([3.0] * len(values), values) == mean


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_run_that_diverged_has_no_mean(bad: float) -> None:
    assert interval_mean([0, 1, 2], [1.0, 0.5, bad]) is None


@given(times(5), st.lists(FINITE, min_size=5, max_size=5), st.floats(-10, 10), FINITE)
def test_the_mean_is_linear_and_within_the_extremes(
    at: list[float], values: list[float], scale: float, shift: float
) -> None:
    mean = interval_mean(at, values)
    assert mean is not None
    slack = 1e-6 * (1 + max(map(abs, values)))
    assert min(values) - slack <= mean <= max(values) + slack
    moved = interval_mean(at, [scale * v + shift for v in values])
    assert moved == pytest.approx(scale * mean + shift, rel=1e-6, abs=1e-2)


@given(times(6), st.lists(FINITE, min_size=2, max_size=2))
def test_points_on_the_line_between_two_change_nothing(at: list[float], ends: list[float]) -> None:
    first, last = at[0], at[-1]
    line = [ends[0] + (ends[1] - ends[0]) * (t - first) / (last - first) for t in at]
    assert interval_mean(at, line) == pytest.approx(sum(ends) / 2, rel=1e-6, abs=1e-3)


def test_a_histogram_has_a_mean_unless_empty() -> None:
    assert weighted_mean([(0, 1), (10, 4)]) == 8.0
    assert weighted_mean([]) is None
    assert weighted_mean([(3, 0)]) is None

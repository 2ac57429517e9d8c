"""The estimator against its own algebra, and the figures made of it against the papers' forms."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import InputError
from paceline.core.noise_scale import Averages, Observation, Part, differenced, observation
from paceline.metrics.efficiency import efficiency, gain, verdict
from tests.formulas import examples_factor, goodput, steps_factor

ROUNDING = 1e-9
"""Sums of a few numbers of like size, then one difference of them."""

PHI = st.floats(0.01, 1e6)
BATCH = st.integers(1, 100_000)


def expected(samples: list[int], weights: list[float], noise: float, signal: float) -> tuple[list[Part], float]:
    """What an update of these gradients shows in the mean."""
    parts = [Part(b, w, signal + noise / b) for b, w in zip(samples, weights, strict=True)]
    total = sum(weights)
    return parts, total**2 * signal + noise * sum(w**2 / b for b, w in zip(samples, weights, strict=True))


@given(st.lists(st.tuples(st.integers(1, 500), st.floats(0.1, 5.0)), min_size=2, max_size=9), PHI)
def test_any_batches_and_weights_give_back_what_was_put_in(batches: list[tuple[int, float]], noise: float) -> None:
    samples, weights = [b for b, _ in batches], [w for _, w in batches]
    parts, square = expected(samples, weights, noise, signal=2.0)
    seen = observation(parts, square)
    assert seen is not None
    # The difference that is divided by loses digits where one weight outweighs all others, at most 0.1 against 45.
    assert seen.noise == pytest.approx(noise, rel=1e-7)
    assert seen.signal == pytest.approx(2.0, rel=1e-6, abs=1e-7 * noise)
    assert seen.samples == sum(samples)


def test_mcclandlish_two_batches_are_the_case_of_equal_parts() -> None:
    small, large, b, n = 7.0, 3.0, 16, 4
    seen = observation([Part(b, 1 / n, small)] * n, large)
    assert seen is not None
    assert seen.signal == pytest.approx((n * b * large - b * small) / (n * b - b), rel=ROUNDING)
    assert seen.noise == pytest.approx((small - large) / (1 / b - 1 / (n * b)), rel=ROUNDING)


def test_micro_steps_of_one_gradient_tell_as_replicas_do() -> None:
    squares, total = [4.0, 1.0, 6.0], 2.5
    replicas = observation([Part(8, 1 / 3, square) for square in squares], total)
    micro_steps = observation([Part(24, 1.0, sum(squares) / 3, pieces=3)], total)
    assert replicas is not None
    assert micro_steps is not None
    assert micro_steps[:3] == pytest.approx(replicas[:3], rel=ROUNDING)


def test_one_gradient_tells_nothing() -> None:
    assert observation([Part(8, 1.0, 4.0)], 4.0) is None
    assert observation([Part(8, 1.0, 4.0), Part(0, 0.0, 0.0)], 4.0) is None
    assert observation([], 0.0) is None
    assert differenced(Part(8, 1.0, 4.0), Part(0, 1.0, 0.0), 4.0) is None


def test_a_difference_is_that_of_two_replicas_and_says_that_it_is_biased() -> None:
    pair = differenced(Part(6, 0.1, 4.0), Part(2, 9.0, 8.0), 3.0)
    both = observation([Part(6, 0.75, 4.0), Part(2, 0.25, 8.0)], 3.0)
    assert pair is not None
    assert both is not None
    assert pair[:2] == both[:2]
    assert (pair.samples, pair.biased, both.biased) == (4, True, False)


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=1, max_size=20), st.floats(0.1, 1.0))
def test_averages_are_weighted_means_from_the_first_one_on(values: list[tuple[float, float]], decay: float) -> None:
    averages = Averages(decay)
    for noise, signal in values:
        averages = averages.add(Observation(noise, signal, 4))
    weights = [decay ** (len(values) - 1 - k) for k in range(len(values))]
    signal = sum(w * s for w, (_, s) in zip(weights, values, strict=True))
    noise = sum(w * n for w, (n, _) in zip(weights, values, strict=True))
    assert averages.weight == pytest.approx(sum(weights), rel=ROUNDING)
    assert averages.batch == pytest.approx(4, rel=ROUNDING)
    assert averages.signal == pytest.approx(signal, abs=1e-9)
    if signal > 1e-6:
        assert averages.noise_scale == pytest.approx(max(0.0, noise) / signal, rel=1e-6, abs=1e-6)
    elif signal < -1e-6:
        assert averages.noise_scale is None


def test_a_mean_of_ratios_would_be_something_else() -> None:
    averages = Averages().add(Observation(4.0, 1.0, 8)).add(Observation(4.0, 3.0, 8))
    assert averages.noise_scale == pytest.approx(2.0)  # the mean of 4 and 4/3 is 2.67


def test_the_standard_error_is_how_far_estimates_scatter() -> None:
    draw, estimates, told = random.Random(7), [], []
    for _ in range(300):
        averages = Averages()
        for _ in range(100):
            averages = averages.add(Observation(draw.gauss(10.0, 4.0), draw.gauss(1.0, 0.5), 8))
        assert averages.noise_scale is not None
        assert averages.relative_error is not None
        estimates.append(averages.noise_scale)
        told.append(averages.relative_error)
    mean = sum(estimates) / len(estimates)
    scatter = math.sqrt(sum((e - mean) ** 2 for e in estimates) / (len(estimates) - 1)) / mean
    # Of 300 estimates the scatter is known to 1 / √600 = 4 %; the delta method leaves terms of 1/100.
    assert sum(told) / len(told) == pytest.approx(scatter, rel=0.15)


def test_nothing_seen_is_nothing_known() -> None:
    empty = Averages()
    assert (empty.noise_scale, empty.relative_error, empty.batch, empty.biased_share) == (None,) * 4


@given(PHI, BATCH, BATCH)
def test_efficiency_is_adaptdls_gain_by_scale(noise_scale: float, batch: int, reference: int) -> None:
    scale, var, sqr = batch / reference, noise_scale / reference, 1.0  # of a gradient of reference samples
    adaptdl = (var + sqr) / (var / scale + sqr)
    assert gain(noise_scale, batch, reference) == pytest.approx(adaptdl, rel=ROUNDING)
    assert efficiency(noise_scale, batch, reference) == pytest.approx(adaptdl / scale, rel=ROUNDING)
    assert goodput(50.0, noise_scale, batch, reference) == pytest.approx(50.0 * adaptdl / scale, rel=ROUNDING)


@given(PHI, BATCH)
def test_steps_and_examples_trade_off(noise_scale: float, batch: int) -> None:
    steps, examples = steps_factor(noise_scale, batch), examples_factor(noise_scale, batch)
    # Each factor is 1 plus something down to 1e-7, and so known to 1e-9 of that.
    assert (steps - 1) * (examples - 1) == pytest.approx(1.0, rel=1e-6)


def test_without_noise_all_but_one_sample_are_too_many() -> None:
    assert (steps_factor(0.0, 8), examples_factor(0.0, 8)) == (1.0, math.inf)
    assert "useful batch ≤ 1; beyond it each doubling wastes 50 %" in str(verdict({"noise_scale_mean": 0.0}))


@pytest.mark.parametrize(("noise_scale", "batch"), [(10.0, 0), (10.0, -4), (-1.0, 8), (math.inf, 8), (math.nan, 8)])
def test_what_is_no_batch_or_no_noise_scale_is_refused(noise_scale: float, batch: float) -> None:
    with pytest.raises(InputError, match="write noise_scale=500"):
        gain(noise_scale, batch, 8)

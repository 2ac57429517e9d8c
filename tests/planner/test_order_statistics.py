"""Equations of stragglers: beside each other, beside integrals, and beside figures that others published."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.clock import Distribution, parse
from paceline.clock.distributions import Constant, Exponential, ShiftedExponential
from paceline.core.errors import InputError
from paceline.core.types import Seconds
from paceline.planner.order_statistics import erlang, expected_s, identical, integral
from paceline.planner.policy_pace import stale_synchronous
from tests.planner.equations import equations

KINDS = (
    "0.3",
    "exponential:mean=2",
    "shifted-exponential:shift=0.5,mean=2",
    "pareto:scale=0.1,shape=3",
    "pareto:scale=0.1,shape=1.2",
    "normal:mean=1,std=0.25",
    "normal:mean=0,std=0.25",
    "normal:mean=0.2,std=0.25,negative=abs",
    "normal:mean=-1,std=0,negative=abs",
    "normal:mean=100,std=0.001",
    "lognormal:median=0.1,sigma=0.5",
    "lognormal:median=0.1,sigma=3",
    "lognormal:median=2,sigma=0",
)
CLOSED = KINDS[1:5]

INTEGRATED = 1e-8
"""The integral is refined until a piece changes by less than 1e-10 of the whole, and there are at most a few dozen."""


def integrated_s(distribution: Distribution, k: int, replicas: int) -> Seconds:
    return expected_s(k, [identical(replicas, distribution)])


# -------------------------------------------------------------------------------------------------- order statistics


@pytest.mark.parametrize("kind", CLOSED)
@pytest.mark.parametrize(("k", "replicas"), [(1, 1), (1, 16), (8, 16), (16, 16), (999, 1000), (1000, 1000)])
def test_equations_are_what_integrals_are(kind: str, k: int, replicas: int) -> None:
    distribution = parse(kind)
    assert equations.order_statistic_s(distribution, k, replicas) == pytest.approx(
        integrated_s(distribution, k, replicas), rel=INTEGRATED
    )


@pytest.mark.parametrize("kind", KINDS)
def test_one_replica_takes_the_mean(kind: str) -> None:
    assert integrated_s(parse(kind), 1, 1) == pytest.approx(parse(kind).mean_s, rel=INTEGRATED)


@pytest.mark.parametrize("kind", KINDS)
def test_all_together_take_what_their_times_add_up_to(kind: str) -> None:
    """Σ_k X_{k:P} = Σ X, so Σ_k E[X_{k:P}] = P · E[X]."""
    each = [integrated_s(parse(kind), k, 7) for k in range(1, 8)]
    assert each == sorted(each)
    assert sum(each) == pytest.approx(7 * parse(kind).mean_s, rel=INTEGRATED)


def test_a_trace_takes_what_its_values_take(tmp_path: Path) -> None:
    (tmp_path / "seconds").write_text("3\n1\n2\n2\n", encoding="utf-8")
    trace = parse(f"trace:path={tmp_path / 'seconds'}")
    # The larger of two draws from 1, 2, 2, 3: 1 in 1 of 16, 2 in 8, 3 in 7.
    assert integrated_s(trace, 2, 2) == pytest.approx((1 + 16 + 21) / 16, rel=INTEGRATED)


def test_two_kinds_of_replicas_are_what_drawing_them_shows() -> None:
    rng = np.random.default_rng(0)
    drawn = np.full((200_000, 7), 0.1)
    drawn[:, :3] += np.maximum(0, rng.normal(0, 0.25, (200_000, 3)))
    means, errors = np.sort(drawn).mean(axis=0), np.sort(drawn).std(axis=0) / math.sqrt(200_000)
    groups = [identical(4, Constant(0.1)), identical(3, parse("normal:mean=0,std=0.25"), 0.1)]
    for k in range(1, 8):
        assert abs(expected_s(k, groups) - means[k - 1]) <= 4 * errors[k - 1] + 1e-9


def test_kinds_of_replicas_come_in_any_order_and_may_have_nobody() -> None:
    quick, slow, nobody = identical(3, Constant(0.1)), identical(2, Exponential(1.0)), identical(0, Exponential(9.0))
    assert expected_s(4, [quick, slow]) == pytest.approx(expected_s(4, [nobody, slow, quick]), rel=1e-12)


@pytest.mark.parametrize(("shape", "k", "infinite"), [(1.0, 4, True), (1.0, 3, False), (0.5, 3, True), (0.4, 1, False)])
def test_tails_too_heavy_for_a_mean_have_none(shape: float, k: int, infinite: bool) -> None:
    pareto = parse(f"pareto:scale=1,shape={shape}")
    assert math.isinf(equations.order_statistic_s(pareto, k, 4)) is infinite
    assert math.isinf(integrated_s(pareto, k, 4)) is infinite


def test_many_replicas_are_no_harder() -> None:
    exponential = Exponential(1.0)
    assert integrated_s(exponential, 10_000, 10_000) == pytest.approx(equations.harmonic(10_000), rel=INTEGRATED)


def test_integrals_that_are_known() -> None:
    known: list[tuple[Callable[..., object], list[float], float]] = [
        (lambda x: np.exp(-x), [1.0], 1.0),
        (lambda x: (1 + x) ** -2.0, [1.0], 1.0),
        (lambda x: (x < 0.7).astype(float), [0.7], 0.7),
        (lambda x: (x < 0.7).astype(float), [], 0.7),  # without a mark it is found by halving
        (lambda x: np.exp(-x / 1e6), [1e-6], 1e6),
    ]
    for function, marks, value in known:
        assert integral(function, marks) == pytest.approx(value, rel=INTEGRATED)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------- policies


@given(st.integers(1, 12), st.floats(0.1, 10))
def test_waiting_for_all_and_for_one(replicas: int, mean: float) -> None:
    exponential = Exponential(mean)
    assert equations.k_sync_s(exponential, 1, replicas) == pytest.approx(mean / replicas)
    assert equations.k_async_s(exponential, 1, replicas) == pytest.approx(
        equations.asynchronous_s(exponential, replicas)
    )
    assert equations.synchronous_s(exponential, replicas) == equations.k_sync_s(exponential, replicas, replicas)
    assert equations.backups_s(exponential, 0, replicas) == pytest.approx(
        equations.synchronous_s(exponential, replicas)
    )


@given(st.integers(2, 12), st.integers(1, 11))
def test_who_cancels_is_quicker_than_who_lets_late_ones_finish(replicas: int, backups: int) -> None:
    backups = min(backups, replicas - 1)
    exponential = Exponential(1.0)
    cancelled = equations.k_sync_s(exponential, replicas - backups, replicas)
    finished = equations.backups_s(exponential, backups, replicas)
    assert cancelled < finished < equations.synchronous_s(exponential, replicas - backups) + 1.0


def test_two_replicas_with_a_backup_by_hand() -> None:
    """One late, one at work: 1/2 until one is done; half the time it is the late one, and then two are at work: 1/2."""
    assert equations.backups_s(Exponential(1.0), 1, 2) == pytest.approx(0.5 + 0.5 * 0.5)


def test_published_times_for_sixteen_replicas() -> None:
    """1803.01113's model, P = 16: K-sync waits H_16 - H_8 for 8 of them, K-async of shifted times less than that."""
    assert equations.k_sync_s(Exponential(1.0), 8, 16) == pytest.approx(0.662872, abs=1e-6)
    assert equations.k_sync_s(ShiftedExponential(1.0, 0.5), 8, 16) == pytest.approx(1.331436, abs=1e-6)
    assert equations.k_batch_async_s(ShiftedExponential(1.0, 0.5), 8, 16) == 0.75
    assert equations.k_batch_sync_s(Exponential(1.0), 8, 16) == 0.5


def test_equal_times_go_in_step() -> None:
    equal = Constant(2.0)
    assert [equations.k_async_s(equal, k, 8) for k in (1, 2, 3, 5, 8)] == [0.25, 0.5, 1.0, 2.0, 2.0]
    assert [equations.k_batch_sync_s(equal, k, 8) for k in (1, 8, 9, 17)] == [2.0, 2.0, 4.0, 6.0]


@pytest.mark.parametrize("period", [1, 4, 32])
def test_own_steps_even_times_out(period: int) -> None:
    exponential = Exponential(1.0)
    found = equations.local_steps_s(exponential, period, 8)
    drawn = np.random.default_rng(0).exponential(1.0, (40_000, 8, period)).sum(axis=2).max(axis=1)
    assert abs(found - drawn.mean()) <= 4 * drawn.std() / math.sqrt(len(drawn))
    assert period <= found <= period * equations.synchronous_s(exponential, 8) * (1 + 1e-9)


def test_a_shift_is_taken_once_a_step() -> None:
    without, shifted = (equations.local_steps_s(d, 5, 4) for d in (Exponential(1.0), ShiftedExponential(0.5, 1.0)))
    assert shifted == pytest.approx(without + 5 * 0.5)
    assert expected_s(4, [erlang(4, 0.0, 1.0, 1)]) == pytest.approx(equations.harmonic(4))


@given(st.integers(1, 20), st.integers(1, 20))
def test_staleness_and_freshness_meet_at_their_ends(k: int, replicas: int) -> None:
    k = min(k, replicas)
    assert equations.k_async_staleness(replicas, replicas) == 0
    assert equations.k_async_staleness(1, replicas) == equations.k_batch_async_staleness(1, replicas) == replicas - 1
    assert equations.k_async_fresh(replicas, replicas) == 1
    assert equations.k_async_staleness(k, replicas) <= equations.k_batch_async_staleness(k, replicas)


# -------------------------------------------------------------------------------------------------- stale-synchronous


@settings(max_examples=30)
@given(st.integers(1, 5), st.integers(0, 4), st.integers(0, 10**6))
def test_nobody_is_further_ahead_than_the_bound(replicas: int, bound: int, seed: int) -> None:
    times = np.random.default_rng(seed).exponential(1.0, (30, replicas))
    end_s = stale_synchronous(times, bound)
    begin_s = end_s - times + 1e-12  # rounded: ends are sums of up to 30 times
    for clock in range(bound + 1, 30):
        assert (begin_s[clock] >= end_s[clock - 1 - bound].max()).all()
    assert (begin_s[1:] >= end_s[:-1]).all()


def test_bounds_go_from_lockstep_to_free_running() -> None:
    times = np.random.default_rng(0).exponential(1.0, (50, 6))
    lockstep, free = (stale_synchronous(times, bound) for bound in (0, 50))
    assert lockstep[-1].max() == pytest.approx(times.max(axis=1).sum())
    assert np.allclose(free, np.cumsum(times, axis=0))
    ends = [stale_synchronous(times, bound)[-1].max() for bound in range(8)]
    assert ends == sorted(ends, reverse=True)


# ------------------------------------------------------------------------------------------------ how many to wait for


def test_backups_pay_where_a_few_are_very_late() -> None:
    assert equations.best_backups(Constant(1.0), 16)[0] == 0
    assert equations.best_backups(ShiftedExponential(1.0, 0.02), 16)[0] == 0
    late = [equations.best_backups(ShiftedExponential(1.0, mean), 16)[0] for mean in (0.1, 0.5, 2.0)]
    assert late == sorted(late)
    assert late[-1] > late[0] >= 1


def test_backups_are_the_best_of_all_choices() -> None:
    distribution, noise = parse("lognormal:median=1,sigma=0.7"), 20
    backups, update_s = equations.best_backups(distribution, 12, lambda k: 1 + noise / k)
    whole = {b: equations.order_statistic_s(distribution, 12 - b, 12) * (1 + noise / (12 - b)) for b in range(12)}
    assert backups == min(whole, key=lambda b: whole[b])
    assert update_s == equations.order_statistic_s(distribution, 12 - backups, 12)


@given(st.integers(1, 8), st.integers(1, 10**6))
def test_adasync_solves_its_equation_and_never_waits_for_fewer(initial: int, ratio: int) -> None:
    k = equations.adasync_k(initial, ratio, 8)
    assert initial <= k <= 8
    if initial < k < 7:  # the root lies between k and k + 1
        wanted = initial**2 / (8 - initial) * ratio
        assert k**2 / (8 - k) <= wanted * (1 + 1e-9)
        assert (k + 1) ** 2 / (8 - (k + 1)) > wanted * (1 - 1e-9)
    by_batches = equations.adasync_k(initial, ratio, 8, batches=True)
    assert by_batches == max(initial, min(8, math.isqrt(initial**2 * ratio)))


@pytest.mark.parametrize(
    "call",
    [
        lambda: equations.order_statistic_s(Constant(1.0), 0, 4),
        lambda: equations.order_statistic_s(Constant(1.0), 5, 4),
        lambda: expected_s(3, [identical(2, Constant(1.0))]),
        lambda: equations.k_batch_sync_s(Exponential(1.0), 0, 4),
        lambda: equations.k_batch_sync_s(ShiftedExponential(1.0, 1.0), 2, 4),
        lambda: equations.k_async_s(ShiftedExponential(1.0, 1.0), 2, 4),
        lambda: equations.local_steps_s(parse("normal:mean=1,std=1"), 2, 4),
        lambda: equations.backups_s(ShiftedExponential(1.0, 1.0), 2, 4),
        lambda: equations.backups_s(Exponential(1.0), 4, 4),
        lambda: stale_synchronous(np.ones(3), 1),
        lambda: stale_synchronous(np.ones((3, 2)), -1),
        lambda: equations.adasync_k(2, 0.0, 4),
        lambda: equations.adasync_k(5, 1.0, 4),
    ],
)
def test_what_has_no_answer_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(InputError, match="write"):
        call()

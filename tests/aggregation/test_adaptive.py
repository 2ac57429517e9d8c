"""Thresholds that choose K by what they see."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.aggregation import Adaptive, Plateau, SmoothSwitch, Threshold, Throughput, parse
from paceline.aggregation.base import Arrival, Combine
from paceline.core.errors import InputError

P = 10


def of(threshold: Threshold[Any], combine: Combine = "sum") -> Threshold[Any]:
    return threshold.resolved(learning_rate=0.1, combine=combine, replicas=P)


def paces(threshold: Threshold[Any], seconds_of: Callable[[int], float], arrivals: int = 5000) -> list[int]:
    """K after each Δ, where one takes ``seconds_of(K)``."""
    memory, now, ks = threshold.start(), 0.0, []
    for clock in range(1, arrivals + 1):
        ks.append(int(threshold.at(memory, clock)))
        now += seconds_of(ks[-1])
        memory = threshold.observe(memory, Arrival(0, 0, clock, 1, now))
    return ks


def often(ks: list[int]) -> int:
    """The K that was in force most of the time, in the second half."""
    half = ks[len(ks) // 2 :]
    return max(set(half), key=half.count)


@pytest.mark.parametrize(
    ("seconds_of", "best"),
    [
        (lambda k: 0.01 / k, P),  # an update takes as long whatever is in it
        (lambda k: 0.01, 1),  # the server is free
        (lambda k: 0.001 * k, 1),  # stragglers
        (lambda k: 0.01 / min(k, 5) + (k > 5) * 0.1, 5),  # both: half of the replicas are quick
    ],
)
def test_throughput_finds_the_k_of_most_deltas_per_second(seconds_of: Callable[[int], float], best: int) -> None:
    assert often(paces(of(Throughput()), seconds_of)) == best


def test_throughput_follows_a_server_that_becomes_free() -> None:
    clock = itertools.count()
    ks = paces(of(Throughput()), lambda k: 0.01 / k if next(clock) < 3000 else 0.001 * k, 40_000)
    assert ks[2900:3000].count(P) > 50
    assert often(ks) == 1


def test_throughput_measures_only_what_was_computed_under_its_k() -> None:
    ks = paces(of(Throughput()), lambda k: 0.01 / k, 90)
    assert ks == [1] * 30 + [2] * 30 + [3] * 30  # P that are not measured, 2·P that are


def test_throughput_tries_less_and_less_often() -> None:
    ks = paces(of(Throughput()), lambda _: 0.01, 20_000)
    assert ks[:2000].count(1) < ks[-2000:].count(1)
    assert ks[-2000:].count(1) > 1900


def test_all_at_the_same_time_is_no_error() -> None:
    assert set(paces(of(Throughput()), lambda _: 0.0, 500)) <= set(range(1, P + 1))


def watched(losses: Iterable[float], threshold: Threshold[Any] | None = None) -> list[int]:
    threshold = of(threshold or Plateau(), "mean")
    memory, ks = threshold.start(), []
    for clock, loss in enumerate(losses):
        memory = threshold.observe(memory, Arrival(0, 0, clock + 1, 1, 0.0, loss=loss))
        ks.append(int(threshold.at(memory, clock)))
    return ks


def noisy(values: Iterable[float]) -> list[float]:
    rng = np.random.default_rng(0)
    return [value * float(rng.uniform(0.7, 1.3)) for value in values]


def test_plateau_stays_while_the_loss_falls() -> None:
    assert set(watched(noisy(10 / (1 + u / 100) for u in range(20_000)))) == {1}


def test_plateau_grows_to_p_when_nothing_is_gained_any_more() -> None:
    ks = watched(noisy(max(0.5, 2 - u / 500) for u in range(50_000)))
    assert ks[900] == 1
    assert ks[-1] == P
    assert ks == sorted(ks)


def test_plateau_answers_a_rise_at_once() -> None:
    ks = watched(noisy([1.0] * 100 + [3.0] * 20))
    assert ks[99] == 1
    assert ks[-1] == 2


def test_plateau_lets_a_slow_start_be() -> None:
    assert set(watched(noisy([2.3] * 5000))) == {1}


def test_plateau_is_not_led_by_noise() -> None:
    rng = np.random.default_rng(1)
    assert set(watched(float(v) for v in rng.exponential(1.0, 300))) == {1}


def test_plateau_overlooks_what_has_no_loss() -> None:
    threshold = of(Plateau(), "mean")
    memory = threshold.start()
    assert threshold.observe(memory, Arrival(0, 0, 1, 0, 0.0, loss=9.0)) == memory
    assert threshold.observe(memory, Arrival(0, 0, 1, 4, 0.0, loss=None)) == memory


@given(st.lists(st.floats(0, 1e300), max_size=400))
def test_plateau_keeps_within_its_bounds(losses: list[float]) -> None:
    ks = watched(losses, Plateau(factor=3))
    assert ks == sorted(ks)
    assert all(1 <= k <= P for k in ks)


@pytest.mark.parametrize(("combine", "rules"), [("sum", (Throughput(), Plateau())), ("mean", (Plateau(),))])
def test_adaptive_takes_the_largest_k_of_its_rules(combine: Combine, rules: tuple[Threshold[Any], ...]) -> None:
    adaptive, rules = of(Adaptive(), combine), tuple(of(rule, combine) for rule in rules)
    assert adaptive.needs == {"loss"}
    memory, memories = adaptive.start(), [rule.start() for rule in rules]
    seen = set()
    for clock, loss in enumerate(noisy(max(0.5, 2 - u / 500) for u in range(6000))):
        arrival = Arrival(clock % P, 0, clock, 1, 0.01 * clock, loss=loss)
        memory = adaptive.observe(memory, arrival)
        memories = [rule.observe(m, arrival) for rule, m in zip(rules, memories, strict=True)]
        ks = tuple(rule.at(m, clock) for rule, m in zip(rules, memories, strict=True))
        assert adaptive.at(memory, clock) == max(ks)
        seen.add(ks.index(max(ks)))
    assert len(seen) == len(rules)


def test_adaptive_is_told_of_its_policy() -> None:
    policy = SmoothSwitch(threshold=Adaptive(), combine="sum").resolved(learning_rate=None, replicas=3)
    assert policy.threshold == Adaptive(combine="sum", replicas=3)


def test_adaptive_has_a_short_name() -> None:
    assert parse("smooth-switch:adaptive,combine=sum") == SmoothSwitch(threshold=Adaptive(), combine="sum")
    assert str(parse("smooth-switch:threshold=adaptive")) == str(parse("smooth-switch:adaptive"))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Throughput(ratio=1),
        lambda: Throughput(margin=-0.1),
        lambda: Throughput(largest=0),
        lambda: Plateau(factor=1),
        lambda: Plateau(rise=-1),
        lambda: Plateau(gain=1),
        lambda: Plateau(growth=1),
        lambda: Plateau(largest=0),
        lambda: Adaptive(replicas=0),
    ],
)
def test_refused(make: Callable[[], Threshold[Any]]) -> None:
    with pytest.raises(InputError, match="it must be a"):
        make()

"""K as a function of u, or of losses."""

import math
from typing import Any

import pytest

from paceline.aggregation import Exponential, Linear, LossDriven, PerLearningRate, SmoothSwitch, Step, Threshold
from paceline.aggregation.base import Arrival, Buffer
from paceline.aggregation.loss_driven import Losses
from paceline.aggregation.smooth_switch import Switch
from paceline.aggregation.thresholds import Function
from paceline.core.errors import InputError

VALUES = [
    (Step(500), {0: 1, 499: 1, 500: 2, 999: 2, 1000: 3}),
    (Step(2.5), {2: 1, 3: 2, 5: 3}),
    (Linear(slope=0.5), {0: 1, 1: 1, 2: 2, 10: 6}),
    (Linear(slope=0, initial=4), {0: 4, 10**9: 4}),
    (Exponential(doubling=10), {0: 1, 9: 1, 10: 2, 19: 3, 20: 4, 30: 8}),
    (Exponential(doubling=10, initial=3), {0: 3, 10: 6}),
    (Function(lambda u: 2 + u / 2), {0: 2, 3: 3, 4: 4}),
]


@pytest.mark.parametrize(("threshold", "expected"), VALUES, ids=lambda v: type(v).__name__)
def test_values(threshold: Threshold[Any], expected: dict[int, int]) -> None:
    assert {u: math.floor(threshold.at(threshold.start(), u)) for u in expected} == expected
    assert threshold.needs == set()


def k(policy: SmoothSwitch, alive: int, u: int) -> int:
    """K as a policy shows it with so many alive after u Δs."""
    return policy.waits_for(Switch(Buffer(frozenset(range(alive))), u, u, policy.start(1).memory))


@pytest.mark.parametrize(
    "threshold", [Step(1), Linear(slope=5), Exponential(doubling=1e-3), lambda u: u**3 - 5, lambda _: math.inf]
)
def test_k_is_clipped_to_those_who_are_there(threshold: Any) -> None:
    policy = SmoothSwitch(threshold=threshold)
    assert k(policy, alive=7, u=10**6) == 7
    assert k(policy, alive=1, u=10**6) == 1
    assert k(policy, alive=0, u=10**6) == 1
    assert 1 <= k(policy, alive=7, u=0) <= 7


def losses(threshold: LossDriven, *values: float) -> Losses:
    memory = threshold.start()
    for clock, loss in enumerate(values):
        memory = threshold.observe(memory, Arrival(0, 0, clock + 1, 1, 0.0, loss=loss))
    return memory


def test_loss_driven_grows_with_the_root_of_the_loss_ratio() -> None:
    threshold = LossDriven(initial=2, window=1)
    assert [threshold.at(losses(threshold, *[4.0, 1.0, 0.25][:n]), 0) for n in range(4)] == [2, 2, 4, 8]
    assert threshold.needs == {"loss"}


def test_loss_driven_never_decreases() -> None:
    threshold = LossDriven(window=1)
    assert threshold.at(losses(threshold, 4.0, 1.0, 9.0), 0) == 2


def test_loss_driven_waits_for_its_window_and_smooths_over_it() -> None:
    threshold = LossDriven(window=2)
    assert threshold.at(losses(threshold, 9.0), 0) == 1
    assert losses(threshold, 9.0, 7.0) == Losses(2, 8.0, 8.0, 8.0)
    assert losses(threshold, 9.0, 7.0, 2.0) == Losses(3, 5.0, 8.0, 5.0)


def test_loss_driven_overlooks_what_has_no_loss() -> None:
    threshold = LossDriven(window=2)
    memory = losses(threshold, 9.0)
    assert threshold.observe(memory, Arrival(0, 0, 2, 0, 0.0, loss=0.0)) == memory
    assert threshold.observe(memory, Arrival(0, 0, 2, 8, 0.0, loss=None)) == memory


def test_loss_driven_with_a_loss_of_nothing_waits_for_all() -> None:
    threshold = LossDriven(window=1)
    assert threshold.at(losses(threshold, 1.0, 0.0), 0) == math.inf
    assert threshold.at(losses(threshold, 0.0), 0) == 1


@pytest.mark.parametrize(("multiple", "rate", "every"), [(5, 0.01, 500), (3, 0.1, 30), (0.3, 0.1, 3)])
def test_multiples_of_the_reciprocal_learning_rate(multiple: float, rate: float, every: float) -> None:
    assert Step(PerLearningRate(multiple)).resolved(learning_rate=rate, combine="mean", replicas=3) == Step(every)


@pytest.mark.parametrize("rate", [None, 0.0])
def test_multiples_need_a_learning_rate(rate: float | None) -> None:
    with pytest.raises(InputError, match=r"every=5/lr needs a learning rate above 0, .* write every=500"):
        Step(PerLearningRate(5)).resolved(learning_rate=rate, combine="mean", replicas=3)
    with pytest.raises(InputError, match="needs a learning rate"):
        Step(PerLearningRate(5)).of(1)


def test_a_function_that_fails_later_is_named() -> None:
    threshold = Function(lambda u: 1 if u < 5 else math.nan)
    with pytest.raises(InputError, match="gave nan for u=5"):
        threshold.of(5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Step(0),
        lambda: Linear(slope=-1),
        lambda: Linear(initial=0),
        lambda: Exponential(doubling=0),
        lambda: LossDriven(window=0),
        lambda: LossDriven(initial=math.inf),
    ],
)
def test_refused(make: Any) -> None:
    with pytest.raises(InputError, match="it must be a"):
        make()

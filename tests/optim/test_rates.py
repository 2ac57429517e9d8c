"""Learning rates for large batches, and warm-up."""

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR

from paceline import scaled_learning_rate, warmup
from paceline.core.errors import InputError

CHECK = settings(max_examples=50, deadline=None, derandomize=True)

EXACT = 1e-12
"""A scheduler multiplies the rate of the step before, at most some hundred times, by a factor rounded at 1e-16."""


def rates(make: Any, updates: int, lr: float = 2.0) -> list[float]:
    """The learning rate of each update."""
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = make(optimizer)
    seen = []
    for _ in range(updates):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


@CHECK
@given(st.integers(1, 60), st.integers(0, 20))
def test_equal_parts_up_to_the_whole_rate_and_no_further(steps: int, more: int) -> None:
    expected = [2.0 * min(1.0, update / steps) for update in range(1, steps + more + 1)]
    assert rates(functools.partial(warmup, steps=steps), steps + more) == pytest.approx(expected, rel=EXACT)


@pytest.mark.parametrize("steps", [1, 2, 7])
@pytest.mark.parametrize(
    "then", [functools.partial(CosineAnnealingLR, T_max=10), functools.partial(ExponentialLR, gamma=0.9)]
)
def test_what_comes_then_begins_at_its_own_first_step(steps: int, then: Any) -> None:
    found = rates(functools.partial(warmup, steps=steps, then=then), steps + 10)
    assert found[:steps] == pytest.approx([2.0 * (k + 1) / steps for k in range(steps)], rel=EXACT)
    assert found[steps:] == pytest.approx(rates(then, 10), rel=EXACT)


def test_groups_keep_their_proportion() -> None:
    optimizer = SGD([{"params": nn.Parameter(torch.zeros(1)), "lr": lr} for lr in (1.0, 0.1)])
    scheduler = warmup(optimizer, 4)
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.5, 0.05], rel=EXACT)


@pytest.mark.parametrize("cut", [2, 6])
def test_it_goes_on_from_its_state(cut: int) -> None:
    make = functools.partial(warmup, steps=4, then=functools.partial(ExponentialLR, gamma=0.9))
    first, second = (SGD([nn.Parameter(torch.zeros(1))], lr=2.0) for _ in range(2))
    one, other = make(first), make(second)
    for _ in range(cut):
        first.step()
        one.step()
    other.load_state_dict(one.state_dict())
    second.load_state_dict(first.state_dict())
    for _ in range(4):
        assert second.param_groups[0]["lr"] == first.param_groups[0]["lr"]
        for optimizer, scheduler in ((first, one), (second, other)):
            optimizer.step()
            scheduler.step()


@pytest.mark.parametrize("steps", [0, -1, 2.5, True, "4"])
def test_a_number_of_steps_that_is_none_is_refused(steps: Any) -> None:
    with pytest.raises(
        InputError, match=f"steps={steps}, but it must be a whole number of at least 1; write steps=500"
    ):
        rates(functools.partial(warmup, steps=steps), 1)


@pytest.mark.parametrize(("rule", "expected"), [("linear", 0.4), ("sqrt", 0.2)])
def test_a_batch_four_times_as_large(rule: Any, expected: float) -> None:
    assert scaled_learning_rate(0.1, 1024, 256, rule=rule) == pytest.approx(expected, rel=1e-15)
    assert scaled_learning_rate(expected, 256, 1024, rule=rule) == pytest.approx(0.1, rel=1e-15)


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ((0.1, 0, 256), "batch_size=0, but it must be above 0"),
        ((0.1, 256, -1), "base_batch_size=-1"),
        ((float("nan"), 256, 256), "base=nan"),
        ((0.1, 256, 256, "linaer"), "unknown rule 'linaer'; did you mean 'linear'"),
    ],
)
def test_what_scales_nothing_is_refused(given_: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        scaled_learning_rate(*given_)

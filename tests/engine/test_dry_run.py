"""The step before the start, where a few samples of a batch stand for all."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline import InputError, Program
from paceline.engine.dry_run import FEW, dry_run
from paceline.replica.base import Batch
from tests.engine import programs

BATCH = Batch(torch.randn(8, 6, dtype=torch.float64), torch.zeros(8, dtype=torch.int64), 8)


class Seeing(nn.Module):
    """Notes how many samples it is given; takes no others than ``only``."""

    def __init__(self, seen: list[int], only: int | None = None) -> None:
        super().__init__()
        self.inner, self.seen, self.only = programs.mlp(), seen, only

    def forward(self, x: Tensor) -> Any:
        self.seen.append(len(x))
        if self.only not in (None, len(x)):
            raise ValueError("too few")
        return self.inner(x)


def program(seen: list[int], only: int | None = None) -> Program:
    return programs.program(model=lambda: Seeing(seen, only))


@pytest.mark.parametrize(("few", "expected"), [(False, [8]), (True, [FEW])])
def test_a_few_samples_do_where_that_is_said(few: bool, expected: list[int]) -> None:
    seen: list[int] = []
    found = dry_run(program(seen), BATCH, few=few)
    assert seen == expected
    assert list(found.metrics) == ["accuracy"]
    assert found == dry_run(program([]), BATCH)


def test_what_takes_whole_batches_alone_is_given_one() -> None:
    seen: list[int] = []
    dry_run(program(seen, only=8), BATCH, few=True)
    assert seen == [FEW, 8]


def test_what_is_wrong_is_said_of_the_batch() -> None:
    with pytest.raises(
        InputError, match=r"a batch of the training set \(input float64 \[8, 6\]\): ValueError: too few"
    ):
        dry_run(program([], only=3), BATCH, few=True)


@pytest.mark.parametrize(
    ("optimizer", "what"),
    [
        (lambda parameters: torch.optim.SGD(list(parameters)[:2]), "has no 2.weight"),
        (lambda parameters: torch.optim.SGD([*parameters, nn.Parameter(torch.zeros(2))]), "has parameters that it was"),
    ],
)
def test_an_optimizer_of_other_parameters_is_refused(optimizer: Any, what: str) -> None:
    with pytest.raises(InputError, match=f"the optimizer {what}.* or set requires_grad=False on what is not"):
        dry_run(programs.program(optimizer=optimizer), BATCH)


def test_what_is_frozen_needs_no_optimizer() -> None:
    groups = dry_run(programs.program(model=programs.frozen, optimizer=in_groups), BATCH)
    assert groups.learning_rate == 0.5


class Weighted(nn.Module):
    """A loss with a weight, counts and a running mean of its own."""

    def __init__(self, *, trained: bool = False) -> None:
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.ones(3), requires_grad=trained), 0
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(output * self.weight, target)
        self.calls += 1
        self.mean.add_(loss.detach())
        return loss


def test_a_loss_with_parameters_of_its_own_is_refused() -> None:
    loss = Weighted(trained=True)
    for given in (loss, lambda output, target: 2.0 * loss(output, target)):
        with pytest.raises(
            InputError, match=r"its own, of shapes \[3\].* write loss='model'; or requires_grad_\(False\)"
        ):
            dry_run(programs.program(loss=given), BATCH)
    with pytest.raises(InputError, match="parameters of its own"):  # where a loop gives its steps their data
        dry_run(programs.program(loss=loss), None)


@pytest.mark.parametrize("model", [programs.mlp, lambda: Seeing([])], ids=["in one call", "one at a time"])
def test_training_alone_moves_the_state_of_a_loss(model: Any) -> None:
    loss = Weighted()
    program = programs.program(model=model, loss=loss)
    dry_run(program, BATCH)
    assert loss.calls == 0
    assert loss.mean == 0.0
    paceline.train(program, "replicas=1", engine="virtual", steps=3, evaluate_every=1)
    assert loss.calls == 3


def in_groups(parameters: Any) -> torch.optim.Optimizer:
    weight, bias = parameters
    return torch.optim.SGD([{"params": [weight], "lr": 0.5}, {"params": [bias]}], lr=0.1)

"""An optimizer that goes on from a checkpoint makes the steps that it would have made."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from paceline.checkpoint.base import TensorChunk
from paceline.checkpoint.reader import Checkpoint
from paceline.checkpoint.writer import CheckpointWriter
from paceline.core.errors import InputError
from paceline.optim import Lamb, Lars
from paceline.replica.flat_optimizer import FlatOptimizer
from paceline.replica.flat_state import FlatLayout, FlatState, read

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": partial(torch.optim.Adam, lr=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "amsgrad": partial(torch.optim.AdamW, lr=0.01, amsgrad=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "nadam": partial(torch.optim.NAdam, lr=0.01),
    "radam": partial(torch.optim.RAdam, lr=0.01),
    "asgd": partial(torch.optim.ASGD, lr=0.01),
    "rprop": partial(torch.optim.Rprop, lr=0.01),
    "adadelta": partial(torch.optim.Adadelta, lr=0.5),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "adafactor": partial(torch.optim.Adafactor, lr=0.1),
    "lamb": partial(Lamb, lr=0.01),
    "lars": partial(Lars, lr=0.1),
}

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.2, total_steps=20),
    "function": partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 1.0 / (1 + step)),
    "milestones": partial(lr_scheduler.MultiStepLR, milestones=[3, 6, 9]),
    "restarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=3),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[4],
    ),
}


def grouped(parameters: Any) -> torch.optim.Optimizer:
    weights, biases = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() < 2]
    return torch.optim.AdamW([{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.2}], lr=0.01)


class Steps:
    """A model's parameters under an optimizer, with gradients that depend on the number of the step alone."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer], schedule: Any = None) -> None:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3, dtype=torch.float64))
        module.scale = nn.Parameter(torch.tensor(1.5))  # its state has no dims, as counts of steps
        layout = FlatLayout.of(module)
        self.state: FlatState = read(module, layout.new())
        self.gradient = layout.new()
        self.optimizer = FlatOptimizer(make, schedule, self.state, self.gradient)

    def make(self, first: int, last: int) -> None:
        for number in range(first, last):
            torch.manual_seed(number)
            for vector in self.gradient.parameters:
                vector.normal_()
            self.optimizer.step(self.gradient.parameters)

    def save(self, folder: Path) -> dict[str, Any]:
        parameters = [TensorChunk.whole(name, tensor) for name, tensor in self.state.named()]
        writer = CheckpointWriter(folder, run="test", keep=1, timeout_s=60.0)
        try:
            writer.begin(1, [*parameters, *self.optimizer.chunks()], {})
            result = writer.wait(60.0)
        finally:
            writer.close()
        assert result is not None
        assert result.error is None
        return self.optimizer.state_json()

    def load(self, folder: Path, saved: dict[str, Any], *, options: bool = True) -> None:
        checkpoint = Checkpoint.open(folder / "step-1")
        checkpoint.verify()
        checkpoint.read_into(TensorChunk.whole(name, tensor) for name, tensor in self.state.named())
        self.optimizer.restore(saved, checkpoint, options=options)


def goes_on(tmp_path: Path, make: Callable[[Any], torch.optim.Optimizer], schedule: Any = None) -> None:
    whole, before, after = Steps(make, schedule), Steps(make, schedule), Steps(make, schedule)
    whole.make(0, 10)
    before.make(0, 5)
    after.load(tmp_path, before.save(tmp_path))
    assert all(torch.equal(x, y) for x, y in zip(before.state.vectors, after.state.vectors, strict=True))
    after.make(5, 10)
    assert all(torch.equal(x, y) for x, y in zip(whole.state.vectors, after.state.vectors, strict=True))
    assert after.optimizer.state_json() == whole.optimizer.state_json()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_its_steps_are_the_same_bits(tmp_path: Path, name: str) -> None:
    goes_on(tmp_path, OPTIMIZERS[name])


@pytest.mark.parametrize("name", SCHEDULERS)
def test_its_learning_rates_go_on(tmp_path: Path, name: str) -> None:
    goes_on(tmp_path, OPTIMIZERS["momentum"], SCHEDULERS[name])


def test_groups_keep_their_options(tmp_path: Path) -> None:
    goes_on(tmp_path, grouped, SCHEDULERS["restarts"])


def test_before_its_first_step_it_has_nothing(tmp_path: Path) -> None:
    before, after = Steps(OPTIMIZERS["momentum"]), Steps(OPTIMIZERS["momentum"])
    after.load(tmp_path, before.save(tmp_path))
    before.make(0, 3)
    after.make(0, 3)
    assert all(torch.equal(x, y) for x, y in zip(before.state.vectors, after.state.vectors, strict=True))


@pytest.mark.parametrize("to", ["kernel", "torch"])
def test_a_kernel_and_torch_read_each_others_state(tmp_path: Path, to: str) -> None:
    kernel, plain = partial(torch.optim.Adam, lr=0.01), partial(torch.optim.Adam, lr=0.01, foreach=True)
    before, after = (Steps(kernel), Steps(plain)) if to == "torch" else (Steps(plain), Steps(kernel))
    assert before.optimizer.has_kernel != after.optimizer.has_kernel
    before.make(0, 4)
    after.load(tmp_path, before.save(tmp_path))
    chunks = zip(before.optimizer.chunks(), after.optimizer.chunks(), strict=True)
    assert all(x.name == y.name and torch.equal(x.tensor, y.tensor) for x, y in chunks)
    assert before.optimizer.state_json()["scalars"] == after.optimizer.state_json()["scalars"]


def test_the_programs_own_learning_rate_stays_where_it_is_asked(tmp_path: Path) -> None:
    schedule = partial(lr_scheduler.StepLR, step_size=2, gamma=0.5)
    before, after = (
        Steps(OPTIMIZERS["momentum"], schedule),
        Steps(partial(torch.optim.SGD, lr=8.0, momentum=0.9), schedule),
    )
    before.make(0, 4)
    after.load(tmp_path, before.save(tmp_path), options=False)
    assert after.optimizer.state_json()["groups"][0]["lr"] == 8.0 * 0.25


def test_momentum_that_is_new_begins_with_the_first_gradient(tmp_path: Path) -> None:
    before, after = Steps(OPTIMIZERS["sgd"]), Steps(OPTIMIZERS["momentum"])
    before.make(0, 4)
    after.load(tmp_path, before.save(tmp_path), options=False)
    torch.manual_seed(9)
    after.make(4, 5)
    first = after.optimizer.chunks()[0].tensor
    assert torch.isfinite(first).all()
    assert first.abs().sum() > 0


def test_state_that_is_no_number_is_refused() -> None:
    class Odd(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 1.0})

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["seen"] = {"a", "set"}

    steps = Steps(Odd)
    steps.make(0, 1)
    with pytest.raises(InputError, match="a set, which a checkpoint can't hold"):
        steps.optimizer.state_json()

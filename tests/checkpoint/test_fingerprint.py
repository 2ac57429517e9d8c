"""A program's fingerprint is the same in every process, and differs where training would."""

import functools
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline import InputError, Program
from paceline.checkpoint.code_digest import code_digest, value_text
from paceline.checkpoint.fingerprint import differences
from paceline.engine.dry_run import dry_run
from paceline.replica.base import Batch
from tests.engine import programs

SCALE = 2.0


def scaled(output: Tensor, target: Tensor) -> Tensor:
    return SCALE * nn.functional.cross_entropy(output, target)


def fields(program: Program) -> dict[str, str]:
    inputs, targets = programs.data()
    return dict(dry_run(program, Batch(inputs[:4], targets[:4], 4)).fingerprint)


def changed(**other: Any) -> list[str]:
    """Return the fields in which a program differs from the usual one."""
    usual, this = fields(programs.program()), fields(programs.program(**other))
    return [name for name in usual.keys() | this.keys() if usual.get(name) != this.get(name)]


def adam(**options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return functools.partial(torch.optim.Adam, lr=0.1, **options)


def sgd(**options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return functools.partial(torch.optim.SGD, **{"lr": 0.1} | options)


@pytest.mark.parametrize(
    ("other", "field"),
    [
        ({"seed": 1}, "seed"),
        ({"batch_size": 8}, "batch size"),
        ({"batch_size": None, "global_batch_size": 4}, "batch size"),
        ({"clip_norm": 1.0}, "clip_norm"),
        ({"optimizer": sgd(lr=0.2)}, "lr of the optimizer"),
        ({"optimizer": sgd(momentum=0.9)}, "momentum of the optimizer"),
        ({"optimizer": adam()}, "optimizer"),
        ({"loss": nn.functional.multi_margin_loss}, "loss"),
        ({"loss": functools.partial(nn.functional.cross_entropy, label_smoothing=0.1)}, "loss"),
        ({"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}, "loss"),
        ({"model": programs.wide}, "0.weight"),
        ({"model": programs.dropout}, "layers"),
        ({"model": programs.frozen}, "0.weight"),
        ({"scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 5)}, "scheduler"),
        ({"train": programs.data(samples=49)}, "training set"),
        ({"train": (programs.data()[0] + 1, programs.data()[1])}, "training set"),
    ],
)
def test_it_differs_where_a_program_does(other: dict[str, Any], field: str) -> None:
    assert field in changed(**other)


def test_it_is_the_same_for_the_same_program_made_again() -> None:
    assert changed() == []
    assert changed(name="another", test=programs.data(samples=10)) == []


def test_the_number_of_a_rank_makes_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts print in one rank alone, and models know which they are in."""

    class Told(nn.Linear):
        def __init__(self, rank: int) -> None:
            super().__init__(6, 3, dtype=torch.float64)
            self.rank = rank

    def losing(rank: int) -> Callable[[Tensor, Tensor], Tensor]:
        def loss(output: Tensor, target: Tensor) -> Tensor:
            if rank == 0:
                print(output)
            return scaled(output, target)

        return loss

    first, second = (fields(programs.program(model=lambda n=n: Told(n), loss=losing(n))) for n in (0, 1))
    assert first == second


@pytest.mark.parametrize("first", [1.0, 2.0, 3.0])
def test_values_that_a_function_uses_count(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    def times(factor: float) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda output, target: factor * scaled(output, target)

    assert code_digest(times(first)) == code_digest(times(first)) != code_digest(times(first + 1.0))
    before = code_digest(times(first))
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 3.0)
    assert code_digest(times(first)) != before, "of a global that a function names that it calls"


def test_schedulers_by_their_functions() -> None:
    def warm(steps: int) -> Any:
        return lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: min(1.0, step / steps))

    one, same, other = (fields(programs.program(scheduler=warm(steps))) for steps in (5, 5, 6))
    assert one == same
    assert differences(one, other, ("a", "b")).startswith("scheduler is LambdaLR (digest ")


def test_groups_of_the_optimizer_have_a_value_each() -> None:
    assert fields(programs.program(optimizer=programs.half_decayed))["weight_decay of the optimizer"] == "0.1, 0.0"


class Augmented:
    """Samples that are drawn anew at each read, with generators that a program can seed or with one that it can't."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self.draw = draw
        self.inputs, self.targets = programs.data()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index] + self.draw(), self.targets[index]


@pytest.mark.parametrize(
    "draw",
    [random.random, np.random.rand, lambda: torch.rand(()).item(), np.random.default_rng().random],
    ids=["python", "numpy", "torch", "own"],
)
def test_samples_that_are_drawn_anew(draw: Callable[[], float]) -> None:
    generators = random.getstate(), torch.random.get_rng_state()
    first, second = (fields(programs.program(train=Augmented(draw)))["training set"] for _ in range(2))
    assert first == second
    assert first.startswith("50 samples (digest ")
    assert random.getstate() == generators[0]
    assert torch.equal(torch.random.get_rng_state(), generators[1])


class TooLong(list[Any]):
    """Has a sample less than its length says."""

    def __len__(self) -> int:
        return super().__len__() + 1


def test_a_sample_that_cannot_be_read_is_named() -> None:
    samples = [(torch.zeros(6, dtype=torch.float64), torch.tensor(0))] * 8
    with pytest.raises(InputError, match=r"sample 8 of a data set of 9, TooLong, .*IndexError.*correct its __len__"):
        dry_run(programs.program(train=TooLong(samples)), None)


def test_only_so_many_differences_are_told() -> None:
    one, other = ({str(n): str(n + shift) for n in range(9)} for shift in (0, 1))
    assert differences(one, other, ("a", "b")).endswith("4 is 4 in a, but 5 in b; and 4 more")


def test_a_value_that_contains_itself() -> None:
    values: list[Any] = [1]
    values.append(values)
    assert value_text(values).startswith("(1, (1, ")


def test_another_process_has_the_same(tmp_path: Path) -> None:
    """Hashes of texts are salted, sets are ordered and addresses lie otherwise there."""
    code = (
        "import json; from tests.checkpoint.test_fingerprint import fields; from tests.engine import programs;"
        "print(json.dumps(fields(programs.program(model=programs.Tied, optimizer=programs.half_decayed))))"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == fields(programs.program(model=programs.Tied, optimizer=programs.half_decayed))

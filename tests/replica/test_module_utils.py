"""A model made on disk is the model."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline import Program
from paceline.comm.shared_memory import SpillAllocator
from paceline.core.errors import InputError
from paceline.replica.capture.capture import capture
from paceline.replica.capture.verify import check
from paceline.replica.flat_state import FlatLayout, digest_of
from paceline.replica.module_utils import materialize, tensors_of

WIDTH = 512
"""A weight of this many rows and columns is as large as what may lie on disk has to be."""


class Model(nn.Module):
    """A tied weight, a buffer, a parameter that somebody else holds too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight
        raw = torch.randn(WIDTH, WIDTH)
        self.aliases = [raw]
        self.third = nn.Parameter(raw)
        self.register_buffer("mask", torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.second(self.first(x).relu()) @ self.third) * self.mask[0]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Program:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    pair = torch.zeros(4, WIDTH), torch.zeros(4, WIDTH)
    return Program(model=Model, loss=nn.functional.mse_loss, optimizer=torch.optim.SGD, train=pair, seed=3)


def mapped() -> int:
    """How many files without a name this process has mapped, of those of this test: what others left goes any time."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum(os.environ["TMPDIR"] in line and line.endswith("(deleted)") for line in maps)


def test_it_has_the_same_bits_and_ties(program: Program) -> None:
    module, plain = materialize(program, SpillAllocator(budget_bytes=0)), program.build()
    assert mapped() == 2, "the tied weight and the mask; a third tensor is somebody else's as well"
    layout = FlatLayout.of(plain, ("mask",))
    assert digest_of(module, layout) == digest_of(plain, layout)
    assert isinstance(module, Model)
    assert module.second.weight is module.first.weight
    assert module.aliases[0].data_ptr() == module.third.data_ptr()


def test_nothing_is_left_behind(program: Program) -> None:
    module = materialize(program, SpillAllocator(budget_bytes=0))
    assert mapped() == 2
    del module
    assert mapped() == 0
    program.build()
    assert mapped() == 0, "the next model is an ordinary one"


def test_gradients_are_compared_one_by_one_on_disk_too(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.replica.capture.verify.SpillAllocator", lambda: SpillAllocator(budget_bytes=0))
    module, inputs = materialize(program, SpillAllocator(budget_bytes=0)), torch.randn(4, WIDTH)
    module.first.weight.grad = mine = torch.ones_like(module.first.weight)
    captured = capture(module, inputs)
    assert module.first.weight.grad is mine, "what was there is there again"

    def wrong(given: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = captured.rebuild(captured.module(given))
        return output + (0 * module.third).sum() + 1e-3 * (module.third - module.third.detach()).sum()

    with pytest.raises(InputError, match="the gradient of parameter 'third' differs"):
        check(module, wrong, lambda: tensors_of(module), inputs)

"""Weights that forward transposes, reshapes or computes before it uses them are divided as those of layers are."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.replica.tensor.placements import Shard
from tests.replica.tensor.shard_harness import divided

Form = Callable[["Block", Tensor], Tensor]


class Block(nn.Module):
    """Two products beside a skip, of weights held by themselves."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=draw, dtype=torch.float64) / 4)

        self.form, self.up, self.down = form, weight(32, 16), weight(16, 32)
        if form is folded:
            self.up = nn.Parameter(self.up.detach().view(4, 8, 16))
        if form is adapted:
            self.first, self.second = weight(32, 4), weight(4, 16)
        self.register_buffer("mask", (torch.rand(32, 16, generator=draw) > 0.3).double())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.form(self, x)


def turned(block: Block, x: Tensor) -> Tensor:
    return torch.relu(x @ block.up.t()) @ block.down.T


def exchanged(block: Block, x: Tensor) -> Tensor:
    return torch.matmul(torch.relu(x @ block.up.transpose(0, 1)), block.down.mT)


def masked(block: Block, x: Tensor) -> Tensor:
    return F.linear(torch.relu(F.linear(x, block.up * block.mask)), block.down)


def shrunk(block: Block, x: Tensor) -> Tensor:
    return F.linear(torch.tanh(F.linear(x, torch.sign(block.up) * F.relu(block.up.abs() - 0.1))), block.down * 0.5)


def folded(block: Block, x: Tensor) -> Tensor:
    return F.linear(torch.relu(F.linear(x, block.up.view(32, 16))), block.down)


def adapted(block: Block, x: Tensor) -> Tensor:
    return F.linear(torch.relu(F.linear(x, block.up + block.first @ block.second)), block.down)


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("form", [turned, exchanged, masked, shrunk, folded, adapted])
def test_both_weights_are_divided(form: Form, k: int) -> None:
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = divided(Block(form), (x,), k)
    assert all(isinstance(found.plan.parameters[name], Shard) for name in ("up", "down"))

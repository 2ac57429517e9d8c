"""Reductions, cat and slice, each strategy × k in 2..4."""

import pytest
import torch
from torch import Tensor, nn

from paceline.replica.tensor.placements import Shard
from paceline.replica.tensor.rules.reduce_cat_slice import concatenation, slice_dim, sum_mean
from tests.replica.tensor.cases import SHARDS, Case, every_way, planned, same


def summed(x: Tensor) -> Tensor:
    return x.sum(1)


def kept(x: Tensor) -> Tensor:
    return x.sum((1, -1), keepdim=True)


def mean(x: Tensor) -> Tensor:
    return x.mean((2, 3))


def mean_of_all(x: Tensor) -> Tensor:
    return x.mean()


def sum_of_all(x: Tensor) -> Tensor:
    return x.sum()


def joined(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([x, y], 1)


def twice(x: Tensor) -> Tensor:
    return torch.cat([x, x], -1)


def selected(x: Tensor) -> Tensor:
    return x[:, 2]


def sliced(x: Tensor) -> Tensor:
    return x[:, 1:5]


def every_second(x: Tensor) -> Tensor:
    return x[..., ::2]


def narrowed(x: Tensor) -> Tensor:
    return x.narrow(1, 2, 3)


CASES = (
    Case("sum", sum_mean, summed, [(5, 6, 7)]),
    Case("sum, kept", sum_mean, kept, [(5, 6, 4, 7)]),
    Case("mean", sum_mean, mean, [(5, 6, 7, 4)]),
    Case("mean of all", sum_mean, mean_of_all, [(5, 6, 7)]),
    Case("sum of all", sum_mean, sum_of_all, [(5, 6, 7)]),
    Case("cat", concatenation, joined, [(5, 6, 7), (5, 4, 7)]),
    Case("cat with itself", concatenation, twice, [(5, 6, 7)]),
    Case("select", slice_dim, selected, [(5, 6, 7)]),
    Case("slice", slice_dim, sliced, [(5, 6, 7)]),
    Case("every second", slice_dim, every_second, [(5, 6, 8)]),
    Case("narrow", slice_dim, narrowed, [(5, 6, 7)]),
)


@pytest.mark.parametrize("shards", SHARDS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_way(case: Case, shards: tuple[int, ...]) -> None:
    every_way(case, shards)


class Joined(nn.Module):
    """Two layers side by side, and one of both."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 16), nn.Linear(6, 16), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.cat([self.a(x).relu(), self.b(x).tanh()], -1))


@pytest.mark.parametrize("k", [2, 3])
def test_what_is_put_together_need_not_be_gathered(k: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model = Joined().double()
    x = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    made = planned(model, x, k)
    assert same(made, model, x, f"k = {k}") == {"all_reduce": 1}
    layout = made.parameters["c.weight"]
    assert isinstance(layout, Shard)
    assert layout.blocks == 2

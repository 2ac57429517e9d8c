"""Reductions, cat and slice, each way × k in 2..4."""

import pytest
import torch
from torch import Tensor

from paceline.replica.tensor.rules.along import Concatenation, Reduction, Slice
from tests.replica.tensor.cases import Case, every_way


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
    Case("sum", Reduction, summed, [(5, 6, 7)]),
    Case("sum, kept", Reduction, kept, [(5, 6, 4, 7)]),
    Case("mean", Reduction, mean, [(5, 6, 7, 4)]),
    Case("mean of all", Reduction, mean_of_all, [(5, 6, 7)]),
    Case("sum of all", Reduction, sum_of_all, [(5, 6, 7)]),
    Case("cat", Concatenation, joined, [(5, 6, 7), (5, 4, 7)]),
    Case("cat with itself", Concatenation, twice, [(5, 6, 7)]),
    Case("select", Slice, selected, [(5, 6, 7)]),
    Case("slice", Slice, sliced, [(5, 6, 7)]),
    Case("every second", Slice, every_second, [(5, 6, 8)]),
    Case("narrow", Slice, narrowed, [(5, 6, 7)]),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_way(case: Case) -> None:
    every_way(case)

"""Normalisations by channel, running statistics included, each strategy × k in 2..4."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.replica.tensor.rules.batch_norm import batch_norm, group_norm
from tests.replica.tensor.cases import SHARDS, Case, every_way


def running(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    return F.batch_norm(x, mean, variance, weight, bias, training=True)


def as_they_run(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    return F.batch_norm(x, mean, variance, weight, bias)


def quick(x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    return F.batch_norm(x, mean, variance, training=True, momentum=0.7, eps=0.1)


def of_batch(x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, training=True)


def by_instance(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.instance_norm(x, weight=weight, bias=bias)


def groups(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.group_norm(x, 5, weight, bias)


def of_one(x: Tensor) -> Tensor:
    return F.group_norm(x, 6)


STATISTICS = [torch.linspace(0.5, 1.5, 7, dtype=torch.float64), torch.linspace(2, 1, 7, dtype=torch.float64)]

CASES = (
    Case("running", batch_norm, running, [(5, 7, 4, 5)], [(7,), (7,)], STATISTICS, ("channels", "space")),
    Case("as they run", batch_norm, as_they_run, [(5, 7, 4, 4)], [(7,), (7,)], STATISTICS, ("channels", "space")),
    Case("quick", batch_norm, quick, [(5, 7, 5)], [], STATISTICS, ("channels", "space")),
    Case("features", batch_norm, running, [(5, 7)], [(7,), (7,)], STATISTICS, ("channels",)),
    Case("of the batch", batch_norm, of_batch, [(5, 8, 6)], names=("channels", "space")),
    Case("instance", batch_norm, by_instance, [(5, 7, 6, 4)], [(7,), (7,)], names=("channels", "space")),
    Case("groups", group_norm, groups, [(6, 10, 3)], [(10,), (10,)], names=("channels", "samples")),
    Case("groups of one", group_norm, of_one, [(5, 6, 4, 3)], names=("channels", "samples")),
)


@pytest.mark.parametrize("shards", SHARDS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_way(case: Case, shards: tuple[int, ...]) -> None:
    every_way(case, shards)

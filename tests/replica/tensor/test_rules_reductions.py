"""Norms, variances and extremes, along the sharded dim too, each strategy × k in 2..4."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from paceline.replica.tensor.placements import Shard
from paceline.replica.tensor.rules.reductions import statistic
from tests.replica.tensor.cases import SHARDS, Case, every_way
from tests.replica.tensor.shard_harness import divided

ACROSS = ("across",)


def along(function: Callable[..., Tensor], **options: object) -> Callable[[Tensor], Tensor]:
    return lambda x: function(x, **options)


def norm(order: float, dim: object, *, keepdim: bool = False) -> Callable[[Tensor], Tensor]:
    return partial(torch.linalg.vector_norm, ord=order, dim=dim, keepdim=keepdim)


def values(x: Tensor) -> Tensor:
    return x.max(1).values


def places(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x.argmax(-1)


def any_of(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, (x > 1).any(1)


CASES = (
    Case("norm", statistic, norm(2, -1, keepdim=True), [(5, 6, 7)], names=ACROSS),
    Case("norm of two dims", statistic, norm(2, (1, 3)), [(5, 6, 4, 7)], names=ACROSS),
    Case("norm of all", statistic, torch.linalg.vector_norm, [(5, 6, 7)], names=ACROSS),
    Case("1-norm", statistic, norm(1, 1), [(5, 6, 7)], names=ACROSS),
    Case("3-norm", statistic, norm(3, 1), [(5, 6, 7)]),
    Case("norm of zeros", statistic, lambda x: torch.linalg.vector_norm(x * 0, dim=1), [(5, 6, 7)], names=ACROSS),
    Case("variance", statistic, along(torch.var, dim=-1), [(5, 6, 7)], names=ACROSS),
    Case("variance, uncorrected", statistic, along(torch.var, dim=(1, 2), correction=0), [(5, 6, 7)], names=ACROSS),
    Case("variance of all", statistic, torch.var, [(5, 6, 7)], names=ACROSS),
    Case("deviation", statistic, along(torch.std, dim=1, keepdim=True), [(5, 6, 7)], names=ACROSS),
    Case("deviation of equals", statistic, lambda x: (x * 0).std(1), [(5, 6, 7)], names=ACROSS),
    Case("amax", statistic, along(torch.amax, dim=1), [(5, 6, 7)], names=ACROSS),
    Case("amin, kept", statistic, along(torch.amin, dim=(1, 2), keepdim=True), [(5, 6, 7)], names=ACROSS),
    Case("equally large", statistic, lambda x: x.clamp(-0.3, 0.3).amax(1), [(5, 6, 7)], names=ACROSS),
    Case("largest of all", statistic, torch.max, [(5, 6, 7)], names=ACROSS),
    Case("logsumexp", statistic, along(torch.logsumexp, dim=1), [(5, 6, 7)], names=ACROSS),
    Case("logsumexp of large ones", statistic, lambda x: (x * 500).logsumexp(-1), [(5, 6, 7)], names=ACROSS),
    Case("logsumexp of nothing", statistic, lambda x: (x - torch.inf).logsumexp(-1), [(5, 6, 7)], names=ACROSS),
    Case("max and where", statistic, values, [(5, 6, 7)]),
    Case("argmax", statistic, places, [(5, 6, 7)]),
    Case("product", statistic, along(torch.prod, dim=1), [(5, 6, 7)]),
    Case("any", statistic, any_of, [(5, 6, 7)]),
)


@pytest.mark.parametrize("shards", SHARDS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_way(case: Case, shards: tuple[int, ...]) -> None:
    every_way(case, shards)


class Normalised(torch.nn.Module):
    """Features of length 1, as for cosine similarities."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(64, 128), torch.nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).tanh()
        return self.b(y / y.norm(dim=-1, keepdim=True))


@pytest.mark.parametrize("k", [2, 3])
def test_features_stay_divided_where_they_are_normalised(k: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(10)
        model = Normalised().double()
    x = torch.randn(16, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(11))
    found = divided(model, x, k)
    assert isinstance(found.plan.parameters["a.weight"], Shard)
    assert found.strategy("norm") == "across"

"""Products of two computed tensors, each strategy × k in 2..4."""

import pytest
import torch
from torch import Tensor

from paceline.replica.tensor.rules.matmul import matmul
from tests.replica.tensor.cases import SHARDS, Case, every_way

ALL = ("heads", "samples", "row", "column")


def by_itself(x: Tensor) -> Tensor:
    return torch.matmul(x, x)


CASES = (
    Case("matmul", matmul, torch.matmul, [(5, 4, 6, 7), (5, 4, 7, 9)], names=ALL),
    Case("matmul, broadcast", matmul, torch.matmul, [(5, 4, 6, 7), (5, 1, 7, 9)], names=ALL),
    Case("bmm", matmul, torch.bmm, [(5, 6, 7), (5, 7, 9)], names=ALL),
    Case("weight", matmul, torch.matmul, [(5, 6, 7)], [(7, 9)], names=("samples", "row", "column")),
    Case("mm", matmul, torch.mm, [(5, 7)], [(7, 10)], names=("samples", "row", "column")),
    Case("vector", matmul, torch.matmul, [(5, 6)], [(6,)], whole=True),
    Case("squared", matmul, by_itself, [(5, 6, 6)], whole=True),
)


@pytest.mark.parametrize("shards", SHARDS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_way(case: Case, shards: tuple[int, ...]) -> None:
    every_way(case, shards)

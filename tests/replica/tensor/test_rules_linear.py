"""Linear layers, each strategy × k in 2..4."""

import pytest
import torch
import torch.nn.functional as F

from paceline.replica.tensor.rules.linear import addmm, linear
from tests.replica.tensor.cases import SHARDS, Case, every_way

CASES = (
    Case("bias", linear, F.linear, [(5, 7)], [(10, 7), (10,)], names=("column", "row", "samples")),
    Case("no bias", linear, F.linear, [(5, 8)], [(9, 8)], names=("column", "row", "samples")),
    Case("sequence", linear, F.linear, [(5, 6, 9)], [(7, 9), (7,)], names=("column", "row", "samples")),
    Case("addmm", addmm, lambda x, w, b: torch.addmm(b, x, w), [(5, 7)], [(7, 10), (10,)], names=("column", "row")),
    Case(
        "addmm with factors", addmm, lambda x, w, b: torch.addmm(b, x, w, beta=2, alpha=3),
        [(5, 7)], [(7, 10), (10,)], whole=True,
    ),
)  # fmt: skip


@pytest.mark.parametrize("shards", SHARDS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_way(case: Case, shards: tuple[int, ...]) -> None:
    every_way(case, shards)

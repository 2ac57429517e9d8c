"""Embeddings, each strategy × k in 2..4, with rows and columns that k does not divide."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from paceline.replica.tensor.rules.embedding import embedding
from tests.replica.tensor.cases import SHARDS, Case, every_way

TOKENS = torch.randint(11, (5, 6), generator=torch.Generator().manual_seed(4))


def looked_up(tokens: torch.Tensor, table: torch.Tensor, **options: object) -> torch.Tensor:
    return F.embedding(tokens, table, **options)  # type: ignore[arg-type]


CASES = (
    Case("table", embedding, looked_up, [TOKENS], [(11, 7)], names=("column", "row", "samples")),
    Case(
        "first is padding",
        embedding,
        partial(looked_up, padding_idx=0),
        [TOKENS],
        [(11, 7)],
        names=("column", "row"),
    ),
    Case(
        "last is padding",
        embedding,
        partial(looked_up, padding_idx=10),
        [TOKENS],
        [(11, 8)],
        names=("column", "row"),
    ),
    Case("frequency", embedding, partial(looked_up, scale_grad_by_freq=True), [TOKENS], [(11, 7)], whole=True),
)


@pytest.mark.parametrize("shards", SHARDS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_way(case: Case, shards: tuple[int, ...]) -> None:
    every_way(case, shards)

"""Operators that mix along some dims and leave others apart, each strategy × k in 2..4."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.replica.tensor.rules.batched import batched, gather, indexing, prelu, repeat, stack
from tests.replica.tensor.cases import SHARDS, Case, every_way

ROWS = torch.tensor([3, 0, 3, 5])
PLACES = torch.tensor([[0, 1, 2], [5, 4, 4]])
LOOKED_UP = torch.arange(5 * 6 * 3).reshape(5, 6, 3) % 7


def rolled(x: Tensor) -> Tensor:
    return torch.roll(x, (1, -2), (1, 3))


def rolled_over_all(x: Tensor) -> Tensor:
    return torch.roll(x, 3)


def flipped(x: Tensor) -> Tensor:
    return x.flip(-1)


def summed_up(x: Tensor) -> Tensor:
    return x.cumsum(1)


def multiplied_up(x: Tensor) -> Tensor:
    return x.cumprod(-1)


def largest(x: Tensor) -> tuple[Tensor, Tensor]:
    values, places = x.topk(3, 1)
    return values, places


def ordered(x: Tensor) -> Tensor:
    return x.sort(-1).values


def gated(x: Tensor) -> Tensor:
    return F.glu(x, -1)


def below(x: Tensor) -> Tensor:
    return x.tril()


def again(x: Tensor) -> Tensor:
    return x.repeat(1, 2, 3)


def again_in_a_new_dim(x: Tensor) -> Tensor:
    return x.repeat(2, 1, 1, 2)


def stacked(x: Tensor, y: Tensor) -> Tensor:
    return torch.stack([x, y, x], 1)


def stacked_last(x: Tensor, y: Tensor) -> Tensor:
    return torch.stack([x, y], -1)


def selected(x: Tensor, index: Tensor) -> Tensor:
    return x.index_select(1, index)


def indexed(x: Tensor, index: Tensor) -> Tensor:
    return x[:, index]


def from_table(index: Tensor, table: Tensor) -> Tensor:
    return table[index]


def gathered(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(2, index)


CASES = (
    Case("roll", batched, rolled, [(5, 4, 6, 7)]),
    Case("roll of all", batched, rolled_over_all, [(5, 4, 6)]),
    Case("flip", batched, flipped, [(5, 6, 7)]),
    Case("cumsum", batched, summed_up, [(5, 6, 7)]),
    Case("cumprod", batched, multiplied_up, [(5, 6, 4)]),
    Case("topk", batched, largest, [(5, 6, 7)]),
    Case("sort", batched, ordered, [(5, 6, 7)]),
    Case("glu", batched, gated, [(5, 6, 8)]),
    Case("tril", batched, below, [(5, 6, 7, 7)]),
    Case("repeat", repeat, again, [(5, 6, 8)]),
    Case("repeat in a new dim", repeat, again_in_a_new_dim, [(5, 6, 8)]),
    Case("stack", stack, stacked, [(5, 6, 8), (5, 6, 8)]),
    Case("stack, last", stack, stacked_last, [(5, 6, 8), (5, 6, 8)]),
    Case("index select", indexing, selected, [(5, 6, 8), ROWS]),
    Case("index", indexing, indexed, [(5, 6, 8), PLACES]),
    Case("rows of a table", indexing, from_table, [PLACES], [(6, 8)], names=("column",)),
    Case("gather", gather, gathered, [(5, 6, 7), LOOKED_UP]),
    Case("prelu", prelu, F.prelu, [(5, 6, 7)], [(6,)]),
    Case("prelu, one for all", prelu, F.prelu, [(5, 6, 7)], [(1,)]),
)


@pytest.mark.parametrize("shards", SHARDS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_way(case: Case, shards: tuple[int, ...]) -> None:
    every_way(case, shards)

"""Operators that treat each element alone, broadcasting and sums of terms included, each strategy × k in 2..4."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.replica.tensor.rules.elementwise import elementwise
from tests.replica.tensor.cases import SHARDS, Case, every_way

MASK = torch.arange(30).reshape(5, 6) % 3 == 0


def subtracted(x: Tensor, y: Tensor) -> Tensor:
    return torch.sub(x, y, alpha=3)


def masked(x: Tensor, mask: Tensor) -> Tensor:
    return x.masked_fill(mask, 2.0)


def chosen(mask: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return torch.where(mask, x, y)


def quotient(x: Tensor, y: Tensor) -> Tensor:
    return x / y


def product(x: Tensor, y: Tensor) -> Tensor:
    return x * y


def squared(x: Tensor) -> Tensor:
    return x * x


def by_itself(x: Tensor) -> Tensor:
    return x / x


def doubled(x: Tensor) -> Tensor:
    return x + x


def halved(x: Tensor) -> Tensor:
    return x / 2


def reciprocal(x: Tensor) -> Tensor:
    return 2 / (x * x + 1)


def shifted(x: Tensor) -> Tensor:
    return x + 2.5


def compared(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x > 0


CASES = (
    Case("gelu", elementwise, F.gelu, [(5, 10)]),
    Case("relu", elementwise, F.relu, [(5, 6, 7)]),
    Case("negative", elementwise, torch.neg, [(5, 7)]),
    Case("sum", elementwise, torch.add, [(5, 7), (5, 7)]),
    Case("difference", elementwise, subtracted, [(5, 7), (5, 7)]),
    Case("sum, broadcast", elementwise, torch.add, [(5, 6, 7), (5, 1, 7)]),
    Case("sum with a parameter", elementwise, torch.add, [(5, 6, 7)], [(6, 1)]),
    Case("product", elementwise, product, [(5, 7), (5, 7)]),
    Case("product with a parameter", elementwise, product, [(5, 6, 7)], [(7,)]),
    Case("quotient", elementwise, quotient, [(5, 7), (5, 7)]),
    Case("halved", elementwise, halved, [(5, 7)]),
    Case("reciprocal", elementwise, reciprocal, [(5, 7)]),
    Case("shifted", elementwise, shifted, [(5, 7)]),
    Case("squared", elementwise, squared, [(5, 7)]),
    Case("by itself", elementwise, by_itself, [(5, 7)]),
    Case("doubled", elementwise, doubled, [(5, 7)]),
    Case("masked", elementwise, masked, [(5, 6), MASK]),
    Case("chosen", elementwise, chosen, [MASK, (5, 6), (5, 6)]),
    Case("power", elementwise, torch.square, [(5, 7)]),
    Case("compared", elementwise, compared, [(5, 7)]),
)


@pytest.mark.parametrize("shards", SHARDS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_way(case: Case, shards: tuple[int, ...]) -> None:
    every_way(case, shards)

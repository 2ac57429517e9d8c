"""Operators that move elements, each strategy × k in 2..4."""

import pytest
import torch
from torch import Tensor

from paceline.replica.tensor.rules.views import expand, pieces, reshape, transpose, unsqueeze
from tests.replica.tensor.cases import SHARDS, Case, every_way


def heads(x: Tensor) -> Tensor:
    return x.view(x.shape[0], 7, 6, 4)


def features(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], 7, 24)


def samples_and_heads(x: Tensor) -> Tensor:
    return x.reshape(-1, 7, 3)


def rows(x: Tensor) -> Tensor:
    return x.view(-1, 9)


def flat(x: Tensor) -> Tensor:
    return x.flatten(1)


def apart(x: Tensor) -> Tensor:
    return x.unflatten(2, (6, -1))


def ordered(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1)


def exchanged(x: Tensor) -> Tensor:
    return x.transpose(1, -1)


def turned(x: Tensor) -> Tensor:
    return x.t()


def one_more(x: Tensor) -> Tensor:
    return x.unsqueeze(2)


def one_less(x: Tensor) -> Tensor:
    return x.squeeze(2)


def repeated(x: Tensor) -> Tensor:
    return x.expand(-1, 4, -1, 7)


def not_less(x: Tensor) -> Tensor:
    return x.squeeze((1, 2))


def repeated_as(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x.expand_as(y), y


def fewer(x: Tensor) -> tuple[Tensor, ...]:
    return x.chunk(5, 2)


def thirds(x: Tensor) -> tuple[Tensor, ...]:
    return x.split(8, -1)


def chunks(x: Tensor) -> tuple[Tensor, ...]:
    return x.chunk(3, -1)


def uneven(x: Tensor) -> tuple[Tensor, ...]:
    return x.split([5, 7], 1)


def even(x: Tensor) -> tuple[Tensor, ...]:
    return x.split([12, 12], -1)


def unbound(x: Tensor) -> tuple[Tensor, ...]:
    return x.unbind(1)


CASES = (
    Case("heads of features", reshape, heads, [(5, 7, 24)]),
    Case("features of heads", reshape, features, [(5, 7, 6, 4)]),
    Case("samples and heads", reshape, samples_and_heads, [(5, 4, 7, 3)]),
    Case("samples and sequence", reshape, rows, [(5, 8, 9)]),
    Case("flat", reshape, flat, [(5, 4, 3, 2)]),
    Case("apart", reshape, apart, [(5, 7, 24)]),
    Case("permute", transpose, ordered, [(5, 4, 6, 7)]),
    Case("transpose", transpose, exchanged, [(5, 4, 6, 7)]),
    Case("t", transpose, turned, [(5, 7)]),
    Case("unsqueeze", unsqueeze, one_more, [(5, 4, 6)]),
    Case("squeeze", unsqueeze, one_less, [(5, 4, 1, 6)]),
    Case("squeeze that does nothing", unsqueeze, not_less, [(5, 4, 1, 6)]),
    Case("expand as", expand, repeated_as, [(5, 1, 6), (5, 4, 6)]),
    Case("expand", expand, repeated, [(5, 4, 6, 1)]),
    Case("split", pieces, thirds, [(5, 7, 24)]),
    Case("chunk", pieces, chunks, [(5, 7, 24)]),
    Case("fewer chunks", pieces, fewer, [(5, 7, 12)]),
    Case("uneven pieces", pieces, uneven, [(5, 12, 8)]),
    Case("even pieces", pieces, even, [(5, 7, 24)]),
    Case("unbind", pieces, unbound, [(5, 3, 6, 8)]),
)


@pytest.mark.parametrize("shards", SHARDS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_way(case: Case, shards: tuple[int, ...]) -> None:
    every_way(case, shards)


def test_of_the_transposed() -> None:
    every_way(Case("", reshape, lambda x: torch.relu(x.transpose(1, 2)).reshape(x.shape[0], 6, 24), [(5, 24, 6)]))

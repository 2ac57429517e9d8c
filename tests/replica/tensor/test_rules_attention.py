"""Scaled dot-product attention by heads and by samples, each strategy × k in 2..4."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.replica.tensor.rules.attention import sdpa
from tests.replica.tensor.cases import SHARDS, Case, every_way

attention = F.scaled_dot_product_attention

QUERIES, KEYS = (5, 6, 7, 8), (5, 6, 9, 8)
ALLOWED = torch.rand(5, 1, 7, 9, generator=torch.Generator().manual_seed(7)) < 0.7


def of_itself(x: Tensor) -> Tensor:
    return attention(x, x, x)


def of_pooled(q: Tensor, x: Tensor) -> Tensor:
    return attention(q, x, x)


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return attention(q, k, v, bias)


def grouped_and_biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return attention(q, k, v, bias, enable_gqa=True)


CASES = (
    Case("heads", sdpa, attention, [QUERIES, KEYS, KEYS], names=("heads",)),
    Case("causal", sdpa, partial(attention, is_causal=True, scale=0.3), [QUERIES] * 3, names=("heads",)),
    Case("masked", sdpa, attention, [QUERIES, KEYS, KEYS, ALLOWED], names=("heads",)),
    Case("biased by head", sdpa, biased, [QUERIES, KEYS, KEYS, (5, 6, 7, 9)], names=("heads",)),
    Case("a bias for all", sdpa, biased, [QUERIES, KEYS, KEYS], [(7, 9)], names=("heads",)),
    Case("of itself", sdpa, of_itself, [QUERIES], names=("heads",)),
    Case("of pooled", sdpa, of_pooled, [QUERIES, KEYS], names=("heads",)),
    Case(
        "grouped", sdpa, partial(attention, enable_gqa=True),
        [(5, 8, 7, 6), (5, 4, 7, 6), (5, 4, 7, 6)], names=("heads",),
    ),
    Case(
        "grouped, biased by head", sdpa, grouped_and_biased,
        [(5, 8, 7, 6), (5, 4, 7, 6), (5, 4, 7, 6), (5, 8, 7, 7)], names=("heads",),
    ),
)  # fmt: skip


@pytest.mark.parametrize("shards", SHARDS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_way(case: Case, shards: tuple[int, ...]) -> None:
    every_way(case, shards)

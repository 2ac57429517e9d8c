"""Products written with letters, each strategy × k in 2..4."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.replica.tensor.rules.einsum import einsum
from tests.replica.tensor.cases import SHARDS, Case, every_way, planned, same, split_share


def product(equation: str) -> Callable[..., Tensor]:
    return lambda *tensors: torch.einsum(equation, *tensors)


def by_itself(x: Tensor) -> Tensor:
    return torch.einsum("bij,bkj->bik", x, x)


CASES = (
    Case("scores", einsum, product("bqhd,bkhd->bhqk"), [(5, 4, 6, 3), (5, 7, 6, 3)]),
    Case("a layer", einsum, product("bi,oi->bo"), [(5, 6)], [(8, 6)], names=("column", "row")),
    Case("a layer of heads", einsum, product("bti,ihd->bhtd"), [(5, 4, 6)], [(6, 4, 3)], names=("column", "row")),
    Case("nothing said of the result", einsum, product("bi, bij"), [(5, 6), (5, 6, 7)]),
    Case("three", einsum, product("bi,bj,ij->b"), [(5, 6), (5, 7)], [(6, 7)], names=("row",)),
    Case("all summed up", einsum, product("bij->"), [(5, 6, 7)]),
    Case("other order", einsum, product("bij->jib"), [(5, 6, 7)]),
    Case("dots", einsum, product("...ij,...jk->...ik"), [(5, 4, 6), (5, 6, 7)]),
    Case("more dots", einsum, product("...i,oi->...o"), [(5, 4, 6)], [(8, 6)], names=("column", "row")),
    Case("dots of one", einsum, product("...i,...i->..."), [(5, 1, 6), (5, 4, 6)]),
    Case("a diagonal", einsum, product("bii->bi"), [(5, 6, 6)], whole=True),
    Case("by itself", einsum, by_itself, [(5, 6, 7)], whole=True),
)


@pytest.mark.parametrize("shards", SHARDS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_way(case: Case, shards: tuple[int, ...]) -> None:
    every_way(case, shards)


class Attention(torch.nn.Module):
    """Of plain layers, heads by letters."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        width = 3 * heads
        self.heads, self.out = heads, torch.nn.Linear(width, width)
        self.q, self.k, self.v = (torch.nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.heads, 3)) for layer in (self.q, self.k, self.v))
        weights = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
        return self.out(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2))


@pytest.mark.parametrize("k", [2, 3])
def test_attention_is_divided_by_heads(k: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(10)
        model = Attention(5).double()
    x = torch.randn(4, 7, 15, dtype=torch.float64, generator=torch.Generator().manual_seed(11))
    made = planned(model, x, k)
    assert split_share(made, model) == 1
    assert same(made, model, x, f"k = {k}") == {"all_reduce": 1}

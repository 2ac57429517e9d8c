"""Count the collectives of a block: one all-reduce forward and one backward for each column-row pair.

What is put into the first block has no gradient, so that one has one less backward.
"""

import pytest
import torch
from torch import Tensor, nn

from tests.replica.tensor.cases import planned, same


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.block_size = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block_size(x)


def seeded(make: object) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(13)
        return make().double()  # type: ignore[operator, no-any-return]


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def collectives(model: nn.Module, x: Tensor, k: int) -> tuple[int, int]:
    """All that are made, and all-reduces among them."""
    calls = same(planned(model, x, k), model, x, f"k = {k}")
    return calls.total(), calls["all_reduce"]


@pytest.mark.parametrize("k", [2, 3, 4])
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_a_pair_of_layers_takes_one_each_way(k: int, blocks: int) -> None:
    model = seeded(lambda: nn.Sequential(*(Residual(8) for _ in range(blocks))))
    assert collectives(model, numbers(5, 8), k) == (2 * blocks - 1, 2 * blocks - 1)


@pytest.mark.parametrize("layers", [1, 2])
def test_a_layer_of_a_transformer_takes_two_each_way(layers: int) -> None:
    def layer() -> nn.Module:
        return nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)

    model = seeded(lambda: nn.Sequential(*(layer() for _ in range(layers))))
    assert collectives(model, numbers(5, 7, 16), 2) == (4 * layers - 1, 4 * layers - 1)


def test_what_is_not_divided_takes_none() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    assert collectives(model, numbers(5, 3), 4) == (0, 0)

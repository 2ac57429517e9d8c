"""Units in which the dims of a model can be sharded."""

import pytest
import torch
from torch import Tensor, nn

from paceline.replica.tensor.graph_ops import matching_dims
from paceline.replica.tensor.placements import Shard
from tests.replica.tensor.cases import looked_at, planned, same
from tests.replica.tensor.test_models import ByHand, Fused, Grouped


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def seeded(make: type[nn.Module], *args: object) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(14)
        return make(*args).double()


def splits(model: nn.Module, x: Tensor, k: int, length: int) -> list[Shard]:
    asked = next(iter(looked_at(model, x, k).calls.values()))
    return list(asked.shardings(length, -1))


def test_one_product_of_queries_keys_and_values_has_three_blocks_of_heads() -> None:
    found = splits(seeded(Fused, 5), numbers(3, 7, 20), 2, 60)
    assert Shard(-1, (12, 8), blocks=3) in found


def test_what_is_viewed_as_heads_is_divided_by_heads() -> None:
    found = splits(seeded(ByHand, 5), numbers(3, 7, 20), 3, 20)
    assert found[0] == Shard(-1, (8, 8, 4))


@pytest.mark.parametrize(
    ("heads", "count", "k", "queries", "keys"), [(6, 3, 2, (16, 8), (8, 4)), (8, 2, 2, (16, 16), (4, 4))]
)
def test_queries_stay_with_their_keys(
    heads: int, count: int, k: int, queries: tuple[int, ...], keys: tuple[int, ...]
) -> None:
    model, x = seeded(Grouped, heads, count), numbers(3, 7, 4 * heads)
    parameters = planned(model, x, k).parameters
    assert parameters["q.weight"] == Shard(-2, queries)
    assert parameters["k.weight"] == parameters["v.weight"] == Shard(-2, keys)


def test_three_shards_of_two_heads_leave_attention_whole() -> None:
    model, x = seeded(ByHand, 2), numbers(5, 7, 8)
    plan = planned(model, x, 3)
    products = [step for step in plan.steps if "matmul" in str(step.call.target)]
    assert len(products) == 2
    assert not any(
        isinstance(layout, Shard) and layout.dim == -3 for step in products for layout in step.strategy.inputs
    )
    same(plan, model, x)


def test_channels_that_are_grouped_stay_together() -> None:
    model = seeded(lambda: nn.Sequential(nn.Conv2d(3, 10, 1), nn.GroupNorm(5, 10), nn.Conv2d(10, 15, 1, groups=5)))  # type: ignore[arg-type]
    x = numbers(4, 3, 6, 6)
    plan = planned(model, x, 2)
    assert plan.parameters["0.weight"] == Shard(-4, (6, 4))
    assert plan.parameters["2.weight"] == Shard(-4, (9, 6))
    assert same(plan, model, x) == {"all_gather": 1}


@pytest.mark.parametrize(
    ("apart", "together", "found"),
    [
        ((2, 3, 4), (6, 4), [([0], [0, 1]), ([1], [2])]),
        ((2, 3), (2, 1, 3), [([0], [0]), ([1, 2], [1])]),
        ((2, 3), (2, 3, 1), [([0], [0]), ([1], [1]), ([2], [])]),
        ((4, 6), (3, 8), [([0, 1], [0, 1])]),
        ((), (1,), [([0], [])]),
    ],
)
def test_dims_that_have_the_same_elements(
    apart: tuple[int, ...], together: tuple[int, ...], found: list[tuple[list[int], list[int]]]
) -> None:
    assert matching_dims(apart, together) == found

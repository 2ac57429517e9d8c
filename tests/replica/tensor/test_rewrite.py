"""The graph of a shard: what is sent for outputs, and what one tensor as two arguments does."""

from operator import getitem

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.replica.tensor.placements import PARTIAL, PARTIAL_GRAD, Shard
from paceline.replica.tensor.sharding_plan import ShardingPlan
from tests.replica.tensor.cases import forced, looked_at, planned, possible, same


class Two(nn.Module):
    """Both layers' results are given out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8).double(), nn.Linear(8, 7).double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        value = self.first(x)
        return value, self.second(value)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def seeded(make: type[nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(15)
        return make()


def by_columns(model: nn.Module, x: Tensor, k: int) -> ShardingPlan:
    found = looked_at(model, x, k)
    layers = [call for call in found.calls.values() if "linear" in str(call.target)]
    return forced(found, k, {c.node: next(w for w in possible(c) if w.name == "column") for c in layers})


@pytest.mark.parametrize("k", [2, 3])
def test_an_output_that_was_gathered_is_not_gathered_again(k: int) -> None:
    model, x = seeded(Two), numbers(5, 6)
    calls = same(by_columns(model, x, k), model, x)
    assert calls == {"all_gather": 2, "reduce_scatter": 1}


class OfItself(nn.Module):
    """A sum of terms that is squared, and attention of a tensor to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8).double(), nn.Linear(8, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        value = self.second(F.relu(self.first(x)))
        heads = (value * value).unflatten(-1, (3, 2)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads)


@pytest.mark.parametrize("k", [2, 3])
def test_a_tensor_may_be_two_arguments(k: int) -> None:
    model, x = seeded(OfItself), numbers(5, 4, 6)
    plan = planned(model, x, k)
    same(plan, model, x)
    assert isinstance(plan.parameters["first.weight"], Shard)


class Weights(nn.Module):
    """Layers without nn.Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.v, self.w = nn.Parameter(numbers(6, 9)), nn.Parameter(numbers(9, 7))

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x @ self.v) @ self.w


@pytest.mark.parametrize("k", [2, 3, 4])
def test_a_product_with_a_parameter_is_a_layer(k: int) -> None:
    model, x = seeded(Weights), numbers(5, 4, 6)
    plan = planned(model, x, k)
    assert same(plan, model, x) == {"all_reduce": 1}
    assert all(isinstance(layout, Shard) for layout in plan.parameters.values())


class Gated(nn.Module):
    """Terms of a sum in two pieces, of which one is needed whole and the other is added up."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8).double(), nn.Linear(8, 12).double()

    def forward(self, x: Tensor) -> Tensor:
        residual, skip = self.second(torch.relu(self.first(x))).chunk(2, -1)
        return torch.tanh(x + residual) + skip


@pytest.mark.parametrize("k", [2, 3])
def test_one_of_several_results_is_redistributed_by_itself(k: int) -> None:
    model, x = seeded(Gated), numbers(5, 6)
    found = looked_at(model, x, k)
    row = next(call for call in found.calls.values() if "linear" in str(call.target) and call.inputs[1].shape[0] == 12)
    chunk = next(call for call in found.calls.values() if "chunk" in str(call.target))
    terms = next(way for way in possible(chunk) if PARTIAL in way.inputs)
    item = next(call for call in found.calls.values() if call.target is getitem)
    whole = next(way for way in possible(item) if way.inputs == (PARTIAL_GRAD,))
    by_row = next(way for way in possible(row) if way.name == "row")
    made = forced(found, k, {row.node: by_row, chunk.node: terms, item.node: whole})
    same(made, model, x, "gated")

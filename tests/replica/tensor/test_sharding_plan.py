"""The plan costs no more than any other: against all of them, one by one, on graphs of a few operators."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

from paceline.replica.tensor import redistribute
from paceline.replica.tensor.base import GraphTensor
from paceline.replica.tensor.branches import place_branches
from paceline.replica.tensor.graph_ops import OperatorGraph
from paceline.replica.tensor.placements import REPLICATE, Placement
from paceline.replica.tensor.redistribute import Placements, PlanCost, ValueKey
from paceline.replica.tensor.sharding_plan import NO_RULES, UserRules, op_choices, plan_sharding
from tests.replica.tensor.cases import looked_at, same


class Of(nn.Module):
    """A function of an input and of some parameters."""

    def __init__(self, function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self._function = function
        self.weights = nn.ParameterList(torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x, *self.weights)


linear, relu = torch.nn.functional.linear, torch.relu


def chain(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return linear(relu(linear(x, v)), w)


def chain_of_three(x: Tensor, u: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return linear(linear(linear(x, u), v), w)


def diamond(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    value = linear(x, v)
    return linear(relu(value) + torch.tanh(value), w)


def tied(x: Tensor, v: Tensor) -> Tensor:
    return linear(relu(linear(x, v)), v)


def sum_used_twice(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    value = linear(linear(x, v), w)
    return torch.neg(value) * relu(value)


def pieces(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    first, second = linear(x, v).chunk(2, -1)
    return linear(first * second, w)


def residual(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return x + linear(relu(linear(x, v)), w)


def smaller(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return linear(linear(x, v).sum(1), w)


def selected(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    both = linear(x, v).unflatten(-1, (2, 4))
    return linear(relu(both.select(1, 0)) * both.select(1, 1), w)


def two_joined(x: Tensor, u: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return linear(torch.cat([relu(linear(x, u)), torch.tanh(linear(x, v))], -1), w)


def two_summed(x: Tensor, u: Tensor, v: Tensor, w: Tensor, z: Tensor) -> Tensor:
    return linear(relu(linear(x, u)), w) + linear(torch.tanh(linear(x, v)), z)


def two_multiplied(x: Tensor, u: Tensor, v: Tensor) -> Tensor:
    return linear(x, u) * linear(x, v)


MODELS = {
    "chain": (Of(chain, (9, 6), (7, 9)), (5, 6)),
    "chain of three": (Of(chain_of_three, (6, 6), (6, 6), (6, 6)), (5, 6)),
    "diamond": (Of(diamond, (9, 6), (7, 9)), (5, 6)),
    "tied": (Of(tied, (6, 6)), (5, 6)),
    "sum used twice": (Of(sum_used_twice, (9, 6), (7, 9)), (5, 6)),
    "pieces": (Of(pieces, (8, 6), (7, 4)), (5, 6)),
    "residual": (Of(residual, (9, 6), (6, 9)), (5, 6)),
    "selected": (Of(selected, (8, 6), (7, 4)), (5, 6)),
    "two joined": (Of(two_joined, (4, 6), (5, 6), (7, 9)), (5, 6)),
    "two summed": (Of(two_summed, (8, 6), (8, 6), (6, 8), (6, 8)), (5, 6)),
    "two multiplied": (Of(two_multiplied, (6, 6), (6, 6)), (5, 6)),
    "smaller": (Of(smaller, (9, 6), (7, 9)), (5, 4, 6)),
}


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_none_is_cheaper(name: str, k: int) -> None:
    model, shape = MODELS[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    found = looked_at(model, x, k)
    made, best = plan_sharding(found, k), cheapest(found, k)
    assert made.cost[:3] == (best.whole, best.sent_bytes / k, best.collectives)
    calls = same(made, model, x, name)
    converting = sum(_collectives(v, a, b, k) for step in made.steps for v, a, b in step.redistributions)
    assert calls.total() <= made.cost.collectives
    assert calls.total() >= converting


def _collectives(value: GraphTensor, before: Placement, after: Placement, k: int) -> int:
    made = redistribute.redistribution_cost(before, after, k, differentiable=value.differentiable)
    assert made is not None
    return made.number


def cheapest(found: OperatorGraph, k: int) -> PlanCost:
    """Of all plans that there are, each tried."""
    override = UserRules(NO_RULES, found.captured.owners, tuple(found.calls.values()))
    open_ = op_choices(found, override, place_branches(found, k))
    tried: list[PlanCost] = []

    def onward(index: int, there: Mapping[ValueKey, Placements], alone: Mapping[int, bool], cost: PlanCost) -> None:
        if tried and cost[:3] > min(tried)[:3]:
            return
        if index == len(open_):
            ended = _whole(found, there, k)
            if ended is not None:
                tried.append(cost + ended)
            return
        each = open_[index]
        modes = [each.region is not None and alone.get(each.region, mode) for mode in (False, True)]
        for mode in dict.fromkeys(modes):
            for strategy in each.alone if mode else each.strategies:
                taken = redistribute.input_cost(each.call, strategy, there)
                if taken is not None:
                    own = PlanCost(0, round(strategy.sent_bytes * k), strategy.collectives)
                    outputs = {
                        v.key: frozenset((layout,))
                        for v, layout in zip(each.call.outputs, strategy.outputs, strict=True)
                    }
                    begun = alone if each.region is None else {**alone, each.region: mode}
                    onward(index + 1, {**there, **taken[2], **outputs}, begun, cost + taken[0] + own)

    onward(0, {}, {}, PlanCost())
    return min(tried)


def _whole(found: OperatorGraph, there: Mapping[ValueKey, Placements], k: int) -> PlanCost | None:
    cost = PlanCost()
    for value in found.outputs():
        if REPLICATE not in there[value.key]:
            made = redistribute.cheapest_redistribution(value, there[value.key], REPLICATE, k)
            if made is None:
                return None
            cost += made[1]
    return cost


def test_equal_costs_are_equal_whatever_they_are_sums_of() -> None:
    """A third and a third of a byte are two thirds, so that fewer collectives win."""
    model, shape = MODELS["residual"]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    assert same(plan_sharding(looked_at(model, x, 3), 3), model, x) == {"all_reduce": 1}


def test_the_plan_is_the_same_each_time() -> None:
    model, shape = MODELS["diamond"]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    first, second = (plan_sharding(looked_at(model, x, 3), 3) for _ in range(2))
    assert first.parameters == second.parameters
    assert [step.strategy.name for step in first.steps] == [step.strategy.name for step in second.steps]

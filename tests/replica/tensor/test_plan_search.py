"""The search finds the least cost: against every state, on random graphs and on small models."""

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.replica.tensor.graph_ops import OperatorGraph
from paceline.replica.tensor.plan_search import cheapest_steps, follow
from paceline.replica.tensor.redistribute import PlanCost
from paceline.replica.tensor.sharding_plan import ShardingPlan, plan_sharding
from paceline.replica.tensor.sharding_report import sharding_report
from paceline.shard_rules import ShardRules
from tests.replica.tensor.cases import looked_at
from tests.replica.tensor.plain_search import choices_of, least_cost
from tests.replica.tensor.test_vision_models import Mobile, Responses


class Drawn(nn.Module):
    """Operators on tensors of one shape that are drawn among all that are there, so that some have several users."""

    def __init__(self, seed: int, length: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterList(torch.randn(6, 6, generator=generator) for _ in range(3))
        self.scale = nn.Parameter(torch.randn(6, generator=generator))
        self.wide = nn.Parameter(torch.randn(6, 12, generator=generator))
        self._seed, self._length = seed, length

    def forward(self, x: Tensor) -> Tensor:
        draw = random.Random(self._seed)
        values, unused = [x], list[Tensor]()
        operators: list[Callable[[Tensor, Tensor], Tensor]] = [
            lambda a, _: F.linear(a, draw.choice(list(self.weights))),
            lambda a, _: torch.relu(a),
            lambda a, b: a + b,
            lambda a, b: a * b,
            lambda a, _: F.layer_norm(a, (6,), self.scale),
            lambda a, b: F.linear(torch.cat([a, b], -1), self.wide),
            lambda a, b: torch.cat([a.chunk(2, -1)[0], b.chunk(2, -1)[1]], -1),
            lambda a, _: a.softmax(-1),
        ]
        for _ in range(self._length):
            a, b = draw.choice(values), draw.choice(values[-3:])
            unused = [value for value in unused if value is not a and value is not b]
            made = draw.choice(operators)(a, b)
            values.append(made)
            unused.append(made)
        return torch.stack(unused).sum(0)


def same_cost(found: OperatorGraph, k: int) -> PlanCost:
    """Assert that the search finds the least cost, which its steps have."""
    choices = choices_of(found, k)
    made, least = cheapest_steps(found, choices, k), least_cost(found, choices, k)
    assert made is not None
    assert least is not None
    assert made.bound is None
    assert made.cost[:3] == least[:3]
    # Work is compared in whole operations: each operator's is rounded.
    assert abs(made.cost.work - least.work) <= len(choices)
    strategies = [step.strategy for step in made.steps]
    assert follow(found, [choice.call for choice in choices], strategies, k) == (made.steps, made.cost)
    return made.cost


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("seed", range(12))
def test_random_graphs(seed: int, k: int) -> None:
    same_cost(looked_at(Drawn(seed, 7), torch.zeros(4, 6), k), k)


@pytest.mark.parametrize("model", [Mobile(6), Responses(12)], ids=["mobile", "responses"])
def test_blocks_of_vision_models(model: nn.Module) -> None:
    same_cost(looked_at(model, torch.zeros(4, 3, 8, 8), 2), 2)


class Decoder(nn.Module):
    """Layers that all read one tensor and one table, as a decoder's layers read what the encoder made."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.memory = nn.Parameter(torch.randn(6, 6, generator=generator))
        self.table = nn.Parameter(torch.randn(4, 4, generator=generator))
        self.weights = nn.ParameterList(torch.randn(4, 6, 6, generator=generator) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        memory, table = F.linear(x, self.memory), self.table * 2
        for weights in self.weights:
            q, k, v = F.linear(x, weights[0]), F.linear(memory, weights[1]), F.linear(memory, weights[2])
            x = x + F.linear((q @ k.transpose(-2, -1) + table).softmax(-1) @ v, weights[3])
        return x


def decoder(layers: int, k: int = 2) -> OperatorGraph:
    return looked_at(Decoder(layers), torch.zeros(3, 4, 6), k)


def test_layers_that_read_one_tensor() -> None:
    same_cost(decoder(1), 2)


def test_a_search_that_is_cut_short_says_what_it_may_have_missed() -> None:
    found = decoder(3)
    choices = choices_of(found, 2)
    best, early = cheapest_steps(found, choices, 2), cheapest_steps(found, choices, 2, 40, 1)
    assert best is not None
    assert early is not None
    assert early.bound is not None
    assert early.bound[:2] <= best.cost[:2] < early.cost[:2]
    again = cheapest_steps(found, choices, 2, 40, 1)
    assert again == early, "all shards find the same"


def test_the_report_says_how_far_from_the_cheapest_it_may_be() -> None:
    made = plan_sharding(decoder(1), 2)
    assert made.bound is None
    assert "cheapest" not in str(sharding_report(made, ShardRules()))

    def last_line(bound: PlanCost) -> str:
        cost = PlanCost(10, 200.0, 3, 1.0)
        plan = ShardingPlan(made.graph, 2, made.steps, made.parameters, cost, bound)
        return str(sharding_report(plan, ShardRules())).splitlines()[-1]

    unknown = "not known to be the cheapest plan: at most,"
    assert last_line(PlanCost(10, 150.0, 3, 1.0)) == f"{unknown} another may send 25.0% less"
    assert last_line(PlanCost(10, 200.0, 2, 1.0)) == f"{unknown} another may have fewer collectives, or less to compute"
    assert last_line(PlanCost(4, 300.0, 3, 1.0)) == f"{unknown} another may leave 6 parameters fewer whole"

"""The plan keeps shard_rules; what can't be done is refused, with what can."""

import functools
import re

import pytest
import torch
from torch import nn

from paceline.core.errors import InputError
from paceline.replica.capture.capture import Captured, capture
from paceline.replica.tensor.graph_ops import operator_graph
from paceline.replica.tensor.placements import PARTIAL_GRAD, REPLICATE
from paceline.replica.tensor.sharding_plan import ShardingPlan, module_of, plan_sharding
from paceline.shard_rules import ShardRules
from tests.replica.tensor.cases import rules, same

__all__ = ["rules"]


class Block(nn.Module):
    """Attention, which reaches into its output's layer, and layers around it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        made: torch.Tensor = self.head(self.norm(self.down(self.up(x).relu())))
        return made


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.second(self.first(x).relu())
        return made


INPUTS = torch.randn(4, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@functools.cache
def captured(model: type[nn.Module]) -> tuple[Captured, nn.Module]:
    """A model of this kind as a graph, and the model; for all tests, which change neither."""
    torch.manual_seed(0)
    made = model().double()
    return capture(made, INPUTS, operators=True), made


def planned(model: type[nn.Module], k: int, asked: dict[str, str]) -> ShardingPlan:
    return plan_sharding(operator_graph(captured(model)[0], k), k, ShardRules(asked))


def chosen(made: ShardingPlan) -> dict[str, set[str]]:
    """Module -> names of its operators' ways."""
    owners = made.graph.captured.owners
    found: dict[str, set[str]] = {}
    for step in made.steps:
        found.setdefault(module_of(step.call, owners), set()).add(step.strategy.name)
    return found


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize(
    ("asked", "module", "name"),
    [
        ({"up": "row"}, "up", "row"),
        ({"up": "column"}, "up", "column"),
        ({"down": "column"}, "down", "column"),
        ({"down": "row"}, "down", "row"),
        ({"attention.out_proj": "column"}, "attention.out_proj", "column"),
        ({"*": "whole", "do*": "column"}, "down", "column"),
    ],
)
def test_an_operator_is_divided_as_asked_and_the_model_stays_the_same(
    asked: dict[str, str], module: str, name: str, k: int
) -> None:
    made = planned(Block, k, asked)
    assert chosen(made)[module] == {name}
    same(made, captured(Block)[1], INPUTS)


def test_whole_leaves_a_module_whole_and_the_others_to_the_plan() -> None:
    made = planned(Block, 2, {"up": "whole", "attention*": "whole"})
    layouts = {name: layout for name, layout in made.parameters.items() if name.startswith(("up", "attention"))}
    assert len(layouts) == 6
    assert all(layout in (REPLICATE, PARTIAL_GRAD) for layout in layouts.values())
    assert chosen(made)["down"] != {""}
    same(made, made.graph.captured.module, INPUTS)


def test_of_patterns_that_match_the_last_counts() -> None:
    first = planned(Block, 2, {"up": "row", "*up": "column"})
    second = planned(Block, 2, {"*up": "column", "up": "row"})
    assert (chosen(first)["up"], chosen(second)["up"]) == ({"column"}, {"row"})


def test_attention_is_known_by_its_own_name_and_its_output_by_that_of_its_layer() -> None:
    assert chosen(planned(Block, 2, {"attention": "heads"}))["attention"] >= {"heads"}


@pytest.mark.parametrize(
    ("asked", "k", "said"),
    [
        ({"upp": "column"}, 2, "unknown module in shard_rules 'upp'; did you mean 'up'?"),
        ({"up": "column", "[0-9]*": "row"}, 2, "unknown module in shard_rules '[0-9]*'"),
        ({"up": "colum"}, 2, "shard_rules={'up': 'colum'}: up (linear"),
        ({"up": "colum"}, 2, "has no way 'colum'; write one of: column, row, whole"),
        ({"d*": "filters"}, 2, "shard_rules={'d*': 'filters'}: down"),
        (
            {"head": "column"},
            3,
            "shards=3, but head can be divided by column among 2 at most; write shards=2, or whole in place of column",
        ),
    ],
)
def test_what_does_not_fit_is_refused(asked: dict[str, str], k: int, said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        planned(Block, k, asked)


def test_a_weight_of_two_modules_can_lie_in_one_way_alone() -> None:
    with pytest.raises(InputError, match="divide a parameter that several modules have in more than one way"):
        planned(Tied, 2, {"first": "column", "second": "row"})
    made = planned(Tied, 2, {"*": "column"})
    same(made, made.graph.captured.module, INPUTS)

"""Branches: which there are, their owners, and that shards compute the model whatever the owners."""

import time
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node

from paceline.core.errors import InputError
from paceline.replica.capture.capture import capture
from paceline.replica.tensor.base import OpCall
from paceline.replica.tensor.branch_on_rank import StandIn
from paceline.replica.tensor.branches import PlacedRegion, branch_regions, place_branches
from paceline.replica.tensor.graph_ops import operator_graph
from paceline.replica.tensor.op_times import measure_op_times
from paceline.replica.tensor.placements import OnRank, Shard
from paceline.replica.tensor.rewrite import rewrite_for_shard
from paceline.replica.tensor.sharding_plan import plan_sharding
from paceline.replica.tensor.tp_group import TPCollectives
from paceline.shard_rules import ShardRules
from tests.replica.tensor.cases import holds_its_part, looked_at, same
from tests.replica.tensor.threads import together


def convolution(inputs: int, outputs: int, size: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, size, padding=size // 2), nn.BatchNorm2d(outputs), nn.ReLU())


class Inception(nn.Module):
    """Four branches, one of them a pool and a layer, joined channel by channel."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = convolution(3, 8, 3)
        self.b1 = convolution(8, 4, 1)
        self.b2 = nn.Sequential(convolution(8, 4, 1), convolution(4, 6, 3))
        self.b3 = nn.Sequential(convolution(8, 3, 1), convolution(3, 5, 5))
        self.b4 = nn.Sequential(nn.MaxPool2d(3, 1, 1), convolution(8, 4, 1))
        self.head = nn.Linear(19 * 16, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(torch.cat([self.b1(x), self.b2(x), self.b3(x), self.b4(x)], 1).flatten(1))


class Summed(nn.Module):
    """So many branches, summed one after the other."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.b = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(count))
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        total = self.b[0](x)
        for branch in self.b[1:]:
            total = total + branch(x)
        return self.head(total)


class Towers(nn.Module):
    """One for each input, multiplied: nothing is before both."""

    def __init__(self) -> None:
        super().__init__()
        self.b1 = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))
        self.b2 = nn.Sequential(nn.Linear(3, 9), nn.ReLU(), nn.Linear(9, 5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.b1(x) * self.b2(y.reshape(y.shape[0], -1))).sum(-1)


class Beside(nn.Module):
    """The trunk is joined as well, and gives an output; a weight of it is used in both branches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.b1, self.b2, self.head = nn.Linear(6, 6), nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(28, 4)
        self.common = nn.Parameter(torch.ones(6, 6) / 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x)
        second = self.b2(x @ self.common).view(x.shape[0], 2, 4).transpose(1, 2).flatten(1)
        return self.head(torch.cat([x, self.b1(x @ self.common), second, x + 1], -1)), x.sum(-1)


class Nested(nn.Module):
    """A branch that forks again."""

    def __init__(self) -> None:
        super().__init__()
        self.b1, self.b2, self.b21, self.b22 = nn.Linear(6, 20), nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.sin()
        forked = torch.relu(self.b2(x))
        return torch.cat([self.b1(x), torch.cat([self.b21(forked), self.b22(forked)], -1)], -1)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b1, self.b2 = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b2(torch.relu(self.b1(x)))


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


MODELS = {
    "inception": (Inception, (numbers(4, 3, 4, 4),), 4),
    "two summed": (lambda: Summed(2), (numbers(4, 6),), 2),
    "five summed": (lambda: Summed(5), (numbers(4, 6),), 5),
    "towers": (Towers, (numbers(4, 6), numbers(4, 3)), 2),
    "beside": (Beside, (numbers(4, 6),), 3),
    "nested": (Nested, (numbers(4, 6),), 2),
}


def built(name: str) -> tuple[nn.Module, tuple[Tensor, ...], int]:
    torch.manual_seed(11)
    make, inputs, count = MODELS[name]
    return make().double(), inputs, count


ASKED = ShardRules({"b*": "branch"})


@pytest.mark.parametrize("k", [2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_branches_are_the_model(name: str, k: int) -> None:
    """Also on more shards than there are branches, and where the trunk goes on beside them."""
    model, inputs, _ = built(name)
    made = plan_sharding(looked_at(model, inputs, k), k, ASKED)
    owned = {layout.shard for layout in made.parameters.values() if isinstance(layout, OnRank)}
    assert len(owned) > 1
    holds_its_part(made, model)
    assert same(made, model, inputs, name).total() == made.cost.collectives


@pytest.mark.parametrize("name", MODELS)
def test_how_many_there_are(name: str) -> None:
    model, inputs, count = built(name)
    assert max(len(region.branches) for region in branch_regions(looked_at(model, inputs, 2))) == count


def test_a_residual_is_no_fork() -> None:
    assert not branch_regions(looked_at(Residual().double(), (numbers(4, 6),), 2))


def test_what_others_take_too_is_of_the_trunk() -> None:
    class Tapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.b1, self.b2, self.b3 = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(6, 5)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            tapped = self.b1(x)
            return self.b2(tapped) + self.b3(x), tapped

    found = looked_at(Tapped().double(), (numbers(4, 6),), 2)
    (region,) = branch_regions(found)
    inside = {str(value.parameter) for b in region.branches for node in b for value in found.calls[node].inputs}
    assert {"b2.weight", "b3.weight"} <= inside
    assert "b1.weight" not in inside


# ------------------------------------------------------------------------------------------------------- who has what


def by_width(calls: Sequence[OpCall]) -> Mapping[Node, float]:
    """A linear layer of n outputs takes n, all else nothing."""
    return {call.node: float(call.outputs[0].shape[-1]) if "linear" in str(call.target) else 0.0 for call in calls}


def of_widths(*widths: int) -> nn.Module:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.b = nn.ModuleList(nn.Linear(6, width) for width in widths)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([branch(x) for branch in self.b], -1)

    return Wide().double()


def by_owner(region: PlacedRegion) -> list[int]:
    return [owner.shard for owner in region.owners]


def test_the_longest_goes_to_the_shard_that_has_least() -> None:
    found = looked_at(of_widths(7, 6, 4, 3, 2), (numbers(4, 6),), 2)
    (region,) = place_branches(found, 2, by_width)
    assert by_owner(region) == [0, 1, 1, 0, 0]
    assert region.share == 12 / 22


def test_uneven_branches_are_not_worth_it_unless_asked_for() -> None:
    found = looked_at(of_widths(9, 3), (numbers(4, 6),), 2)
    assert not place_branches(found, 2, by_width)
    (region,) = place_branches(found, 2, by_width, lambda call: "linear" in str(call.target))
    assert region.share == 9 / 12


def test_of_two_that_overlap_the_larger_is_taken() -> None:
    model, inputs, _ = built("nested")
    found = looked_at(model, inputs, 2)
    assert len(branch_regions(found)) == 2
    even = {"b1": 9.0, "b2": 1.0, "b21": 4.0, "b22": 4.0}

    def times(calls: Sequence[OpCall]) -> Mapping[Node, float]:
        return {
            call.node: sum(even.get(str(v.parameter).removesuffix(".weight"), 0.0) for v in call.inputs)
            for call in calls
        }

    (region,) = place_branches(found, 2, times)
    assert len(region.region.branches) == 2
    assert region.region.join.target is torch.ops.aten.cat.default
    assert len(region.region.join.args[0]) == 2  # type: ignore[arg-type]
    assert sum(map(len, region.region.branches)) > 2


def test_times_are_those_of_each_operator() -> None:
    model, inputs, _ = built("inception")
    captured = capture(model, inputs, operators=True)
    found = operator_graph(captured, 2)
    before = {name: value.clone() for name, value in captured.module.state_dict().items()}
    calls = [call for call in found.calls.values() if call.outputs]
    began = time.perf_counter()
    took = measure_op_times(captured.module, list(inputs), calls)
    whole = time.perf_counter() - began
    assert took.keys() == {call.node for call in calls}
    assert all(each > 0 for each in took.values())
    assert sum(took.values()) < whole
    assert all(torch.equal(before[name], value) for name, value in captured.module.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


# ------------------------------------------------------------------------------------------------------ what is written


def test_others_have_one_stand_in_for_each_end() -> None:
    model, inputs, _ = built("inception")
    made = plan_sharding(looked_at(model, inputs, 2), 2, ASKED)

    def stand_ins(shards: TPCollectives) -> int:
        return sum(isinstance(part, StandIn) for part in _called(rewrite_for_shard(made, shards).module))

    counts, _ = together(2, stand_ins)
    assert sum(counts) == 4


def _called(module: torch.fx.GraphModule) -> list[nn.Module]:
    return [module.get_submodule(str(node.target)) for node in module.graph.nodes if node.op == "call_module"]


def test_another_number_of_samples() -> None:
    model, _, _ = built("inception")
    found = looked_at(model, (numbers(4, 3, 4, 4),), 2)
    same(plan_sharding(found, 2, ASKED), model, (numbers(9, 3, 4, 4),), "nine samples")


def test_what_writes_into_the_trunk_is_in_no_branch() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.b1, self.b2 = nn.Linear(6, 4), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = x * 2
            seen = x.view(-1)
            return torch.cat([self.b1(x + 1), self.b2(x.add_(1))], -1) + seen.sum()

    model = Writes().double()
    found = looked_at(model, (numbers(4, 6),), 2)
    assert not branch_regions(found)
    with pytest.raises(InputError, match="no way 'branch'"):
        plan_sharding(found, 2, ASKED)
    same(plan_sharding(found, 2), model, (numbers(4, 6),), "in place")


@pytest.mark.parametrize("k", [2, 3])
def test_what_is_joined_may_stay_with_those_who_made_it(k: int) -> None:
    """Nothing is sent but what the last layer sums up."""

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.b1, self.b2, self.b3, self.head = nn.Linear(6, 5), nn.Linear(6, 6), nn.Linear(6, 7), nn.Linear(18, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.cat([self.b1(x), self.b2(x), self.b3(x)], -1).tanh())

    model, x = Joined().double(), numbers(4, 6)
    made = plan_sharding(looked_at(model, x, k), k, ASKED)
    assert same(made, model, x, "joined") == {"all_reduce": 1}
    assert made.parameters["head.weight"] == Shard(-1, (11, 7) if k == 2 else (5, 6, 7))

"""Models whose input is sharded in space: what they compute, what is sent, and when the plan does it by itself."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from paceline import Program, show_shards
from paceline.core.errors import InputError
from paceline.replica.tensor import sharding_plan
from paceline.replica.tensor.base import OpStrategy
from paceline.replica.tensor.graph_ops import OperatorGraph
from paceline.replica.tensor.placements import PARTIAL_GRAD, REPLICATE, Shard
from paceline.replica.tensor.sharding_plan import ShardingPlan, plan_sharding
from paceline.shard_rules import ShardRules
from tests.replica.tensor.cases import looked_at, same, sharded
from tests.replica.tensor.shard_harness import divided

ASKED = ShardRules({"features*": "space"})


class Images(nn.Module):
    """A small network for images, with a branch that is added, of which nothing says how large an image is."""

    def __init__(self) -> None:
        super().__init__()
        self.features1 = nn.Sequential(
            nn.Conv2d(3, 4, 5, padding=2), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        self.features2 = nn.Sequential(nn.Conv2d(4, 6, 3, 2, 1, bias=False), nn.BatchNorm2d(6, eps=1e-3, momentum=0.3))
        self.features3 = nn.Conv2d(4, 6, 1, 2)
        self.mean, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        value = self.features1(x)
        made: Tensor = self.head(self.mean(torch.relu(self.features2(value) + self.features3(value))).flatten(1))
        return made


class Sound(nn.Module):
    """A small network for sounds of one length, which a layer is made for."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.features1 = nn.Sequential(
            nn.Conv1d(2, 4, 7, dilation=2, padding=6), nn.InstanceNorm1d(4), nn.AvgPool1d(3, 2, 1)
        )
        self.features2 = nn.Sequential(nn.Conv1d(4, 4, 4, padding="same", groups=4), nn.GELU(), nn.MaxPool1d(2))
        self.head = nn.Linear(4 * (length // 4), 5)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(self.features2(self.features1(x)).flatten(1))
        return made


def seeded(make: type[nn.Module], *args: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(17)
        return make(*args).double()


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def space(made: ShardingPlan) -> list[str]:
    """The operators that are divided so."""
    return [str(step.call.target).split(".")[1] for step in made.steps if step.strategy.name == "space"]


def in_space(found: OperatorGraph) -> list[OpStrategy]:
    """The ways of the one convolution that are in space, where its input is there as a whole."""
    (call,) = (each for each in found.calls.values() if "conv2d" in str(each.target))
    return [strategy for strategy in sharding_plan.rule_strategies(call, call.shards) if strategy.name == "space"]


@pytest.mark.parametrize("k", [2, 3, 4])
def test_a_network_for_images_is_the_same(k: int) -> None:
    model, x = seeded(Images), numbers(3, 3, 17, 9)
    made = divided(model, x, k, asked=ASKED).plan
    assert sorted(space(made)) == ["batch_norm"] * 2 + ["conv2d"] * 3 + ["max_pool2d"]
    same(made, model, x, "with running statistics")
    assert not any(isinstance(layout, Shard) for step in made.steps[:-4] for _, layout, _ in step.redistributions)
    assert made.parameters["features2.0.weight"] == PARTIAL_GRAD


@pytest.mark.parametrize("k", [2, 3])
def test_a_network_for_sounds_is_the_same(k: int) -> None:
    model, x = seeded(Sound, 26), numbers(3, 2, 26)
    assert space(divided(model, x, k, asked=ASKED).plan)[:3] == ["conv1d", "instance_norm", "avg_pool1d"]


def test_a_batch_may_have_another_size_but_an_image_may_not() -> None:
    model, x = seeded(Images), numbers(3, 3, 17, 9)
    made = divided(model, x, 2, asked=ASKED).plan
    same(made, model, x[:2], "fewer samples")
    with pytest.raises(InputError, match=r"17 elements; give batches of the same size as the first"):
        sharded(made, numbers(3, 3, 19, 9))


def test_where_sizes_may_change_it_has_to_be_asked_for() -> None:
    found = looked_at(nn.Conv2d(1, 1, 1).double(), numbers(3, 1, 6, 5), 2)
    assert [strategy.on_request for strategy in in_space(found)] == [True]
    assert space(plan_sharding(found, 2)) == []
    assert space(plan_sharding(found, 2, ShardRules({"*": "space"}))) == ["conv2d"]


@pytest.mark.parametrize(("filters", "asked"), [(1, False), (2, True)])
def test_where_there_are_enough_filters_it_has_to_be_asked_for(filters: int, asked: bool) -> None:
    model = nn.Sequential(nn.Unflatten(-1, (1, 4, 4)), nn.Conv2d(1, filters, 3)).double()
    assert [strategy.on_request for strategy in in_space(looked_at(model, numbers(3, 16), 2))] == [asked]


def test_a_model_of_which_only_the_input_is_divided_is_trained() -> None:
    program = Program(
        model=lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        loss=nn.functional.cross_entropy, optimizer=partial(torch.optim.SGD, lr=0.1),
        train=(torch.zeros(8, 1, 9, 9), torch.zeros(8, dtype=torch.int64)), batch_size=4,
    )  # fmt: skip
    shown = show_shards(program, "shards=2 shard_rules=*:space")
    assert "divided: 0 % of 40 parameters" in shown


class OfFeatures(nn.Module):
    """The features of a layer as an image."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 64), nn.Linear(64, 5)
        self.filter = nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        image = self.first(x).unflatten(-1, (1, 8, 8))
        made: Tensor = self.second(torch.relu(self.filter(image)).flatten(1))
        return made


@pytest.mark.parametrize("k", [2, 3])
def test_what_is_divided_already_stays_so_where_there_are_too_few_filters(k: int) -> None:
    model, x = seeded(OfFeatures), numbers(3, 6)
    made = divided(model, x, k)
    assert made.strategy("conv2d") == "space"
    assert [step.strategy.name for step in made.plan.steps if step.strategy.name] == ["column", "space", "row"]
    assert made.plan.parameters["first.weight"] != REPLICATE


class Stacked(nn.Module):
    """All samples below one another, as one image."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.filter(x.reshape(1, 1, -1, 8))
        return made


def test_samples_that_became_rows_are_not_divided_in_space() -> None:
    found = looked_at(seeded(Stacked), numbers(6, 8), 2)
    assert [strategy.inputs[0] for strategy in in_space(found)] == [Shard(-1, (4, 4))]

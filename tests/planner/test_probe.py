"""What is known of captured models, and what processes measure of a program."""

import functools

import pytest
import torch
from torch import Tensor, nn

from paceline import Program, show_shards
from paceline.core.errors import InputError
from paceline.engine.step_profile.compute import first_samples, repeats_within
from paceline.planner.program.closed_form import job_for
from paceline.planner.program.graph_profile import division_of, outline, seconds_of, units_of
from paceline.planner.program.profile import LineFit, Unit, UnitSharding
from paceline.planner.program.profiling import flops_of, profile
from paceline.replica.base import Batch
from paceline.replica.pipeline.costs import Costs, measure
from paceline.replica.pipeline.cut_groups import Units


class Tied(nn.Module):
    """An embedding whose weight is the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(11, 4), nn.Linear(4, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, text: Tensor) -> Tensor:
        made: Tensor = self.head(torch.tanh(self.words(text))).transpose(1, 2)
        return made


class Branching(nn.Module):
    """Can't be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x)
        return made if made.sum() > 0 else -made


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def program(model: object = mlp, *, width: int = 8, classes: int = 4) -> Program:
    """Of sixteen samples."""
    return Program(
        model=model,  # type: ignore[arg-type]
        loss=nn.functional.cross_entropy,
        optimizer=functools.partial(torch.optim.Adam, lr=0.01),
        train=(torch.randn(16, width), torch.randint(classes, (16,))),
        batch_size=8,
    )


def tied() -> Program:
    text = torch.randint(11, (16, 5))
    return Program(Tied, nn.functional.cross_entropy, functools.partial(torch.optim.SGD, lr=0.1), (text, text))


def first(of: Program, samples: int = 8) -> Batch:
    inputs, targets = of.train  # type: ignore[misc]
    return Batch(inputs[:samples], targets[:samples], samples)


def costs_of(units: Units, batch: Batch, sizes: tuple[int, ...] = (8, 4)) -> dict[int, Costs]:
    found = {}
    for size in sizes:
        given = first_samples(batch, size)
        found[size] = measure(units, units.captured.flatten((given.input, given.target)), repeats=1)
    return found


def units(of: Program) -> tuple[Units, dict[int, Costs]]:
    made = outline(of, of.build(), first(of), ())
    return made.units, costs_of(made.units, first(of))


def test_units_of_a_perceptron_in_numbers() -> None:
    """x (n × 8) → Linear(8, 16) → ReLU → Linear(16, 4) → loss, in numbers of 4 bytes."""
    first_, relu, last, loss = units_of(*units(program()))
    assert [each.parameters for each in (first_, relu, last, loss)] == [8 * 16 + 16, 0, 16 * 4 + 4, 0]
    assert first_.saved == LineFit(0.0, 8 * 4)  # its input
    assert relu.saved == LineFit(0.0, 16 * 4)  # what it has made, which the next one's weight gradient needs too
    assert last.saved == LineFit()
    assert [each.output for each in (first_, relu, last)] == [LineFit(0.0, n * 4) for n in (16, 16, 4)]
    assert loss.output == LineFit()
    assert [each.name for each in (first_, relu, last)] == ["0", "1", "2"]


def test_units_that_share_a_weight_say_so() -> None:
    found = units_of(*units(tied()))
    sharing = [each for each in found if each.tied]
    assert {each.parameters for each in sharing} == {44}
    assert len(sharing) == 2
    assert len({each.tied for each in sharing}) == 1


def test_seconds_of_units_are_shares_of_what_passes_take() -> None:
    made, costs = units(program())
    whole = {8: 3.0, 4: 2.0}
    lines = [seconds_of(made, costs, whole, way) for way in (0, 1)]
    for size, seconds in whole.items():  # of two points a line goes through both, but where it would fall below 0
        total = sum(line.of(size) for each in lines for line in each)
        assert total == pytest.approx(seconds, rel=0.35)


def divided(of: Program, shards: int = 2) -> tuple[UnitSharding, tuple[Unit, ...]]:
    made = outline(of, of.build(), first(of), (shards,))
    costs = costs_of(made.units, first(of), (8,))
    return division_of(made.units, made.plans[shards], shards, costs[8], 8), units_of(made.units, costs)


def test_shards_of_a_perceptron_have_half_and_meet_once() -> None:
    """As show_shards has it: column, row, one all-reduce of what the last layer makes."""
    found, _ = divided(program())
    assert "1 collective, 128 B sent" in show_shards(program(), "shards=2")
    assert [each.work for each in found.parts[:3]] == [0.5, 0.5, 0.5]
    assert [each.parameters for each in found.parts] == [8 * 8 + 8, 0, 8 * 4 + 4, 0]
    sent = [call for each in found.parts for call in (*each.forward, *each.backward)]
    assert [(call.collective, call.size.of(8)) for call in sent] == [("all_reduce", 8 * 4 * 4)]
    assert not found.refused


def test_what_can_not_be_divided_says_why() -> None:
    found, _ = divided(program(lambda: nn.Sequential(nn.Linear(1, 1)), width=1, classes=1), 2)
    assert "nothing of" in found.refused
    assert not found.parts


def test_what_can_not_be_captured_is_refused() -> None:
    of = program(Branching, width=3, classes=3)
    with pytest.raises(InputError):
        outline(of, of.build(), first(of), ())


def test_operations_are_counted_for_a_sample() -> None:
    """Products of the first layer: forward and its weight's gradient; of the second also the gradient of its input."""
    products = 2 * (2 * 8 * 16) + 3 * (2 * 16 * 4)
    assert flops_of(program(), job_for(program(), "replicas=1")) == products


def test_repeats_fit_the_time_and_are_never_few() -> None:
    assert [repeats_within(seconds) for seconds in (0.0, 1.0, 100.0)] == [15, 4, 3]


@pytest.mark.timeout(240.0)  # processes that each import torch, on however few cores there are
def test_two_processes_measure_a_profile() -> None:
    told: list[str] = []
    found = profile(program(), 2, lambda what, done: told.append(what), runs=False)
    assert [(each.workers, len(each.forward)) for each in found.busy] == [(1, 4), (2, 4)]
    assert all(sum(line.of(8) for line in (*each.forward, *each.backward)) > 0 for each in found.busy)
    assert (found.parameters, found.batch, found.uncut) == (212, 8, "")
    assert found.numerics.total == 16  # Adam's two moments
    assert {point.collective for point in found.points} == {
        "all_reduce", "all_gather", "reduce_scatter", "broadcast", "send"
    }  # fmt: skip
    assert all(point.seconds > 0 for point in found.points)
    assert [each.shards for each in found.divisions] == [2]
    assert found.base_bytes > 0
    assert "passes of each size" in found.provenance["compute"]
    assert told == ["a first step", "operators, 1 at work", "operators, 2 at work", "done"]


@pytest.mark.timeout(240.0)
def test_a_model_that_can_not_be_captured_is_one_unit() -> None:
    found = profile(program(Branching, width=3, classes=3), 1, runs=False)
    assert [each.parameters for each in found.units] == [12]
    assert found.uncut
    assert not found.points
    forward, backward = found.busy[0].forward[0].of(8), found.busy[0].backward[0].of(8)
    assert backward == pytest.approx(2 * forward)


@pytest.mark.timeout(240.0)
def test_sizes_that_a_model_refuses_are_left_out() -> None:
    """A BatchNorm has no statistics of one sample."""
    made = profile(program(lambda: nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))), 1, runs=False)
    assert not made.uncut
    assert sum(line.of(8) for line in made.busy[0].forward) > 0

"""Costs of units: times by a clock that only models move, bytes by counting."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.replica.pipeline import costs
from paceline.replica.pipeline.costs import Costs, NodeInterpreter, measure
from paceline.replica.pipeline.cut_groups import Units
from paceline.replica.pipeline.partition import SharedItem
from tests.replica.pipeline.cut_models import from_zoo, units_of


class Clock:
    """Stands for time.perf_counter."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Spends(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, clock: Clock, forward: Any, backward: float) -> Tensor:
        ctx.clock, ctx.backward_s = clock, backward
        clock.now += next(forward)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.clock.now += ctx.backward_s
        return gradient, None, None, None


class Busy(nn.Module):
    """Takes as long as it says, and every third time much longer."""

    def __init__(self, clock: Clock, forward: float, backward: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self._clock, self._backward = clock, backward
        self._forward = itertools.cycle([forward, forward, forward + 100])

    def forward(self, value: Tensor) -> Tensor:
        return Spends.apply(value * self.weight, self._clock, self._forward, self._backward)


def test_seconds_are_the_median_of_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    units = units_of(nn.Sequential(Busy(clock, 3, 5), nn.Tanh(), Busy(clock, 1, 1)), torch.randn(2, 1).double())
    monkeypatch.setattr(costs, "time", clock)
    assert list(measure(units, [torch.randn(2, 1).double()]).units.seconds) == [8, 0, 2]


def costs_of(model: nn.Module, inputs: Any) -> tuple[Units, Costs]:
    units = units_of(model, inputs)
    return units, measure(units, units.captured.flatten(inputs), repeats=1)


def test_bytes_of_values_parameters_and_what_is_saved() -> None:
    """x (5×3) → Linear(3, 4) → Tanh → Linear(4, 2), in numbers of 8 bytes."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    units, costs = costs_of(model, torch.randn(5, 3).double())
    assert list(costs.units.values) == [SharedItem(160, (1,), producer=0), SharedItem(160, (2,), producer=1)]
    assert list(costs.units.held) == [
        SharedItem(96, (0,)),
        SharedItem(32, (0,)),
        SharedItem(64, (2,)),
        SharedItem(16, (2,)),
    ]
    # Linear saves its input; tanh its output, which is the next one's input and counts once. Weights don't count.
    assert sorted(costs.units.saved, key=lambda i: i.uses) == [SharedItem(120, (0,)), SharedItem(160, (1, 2))]
    leaf = next(iter(units.captured.module.graph.nodes)).name
    assert costs.sizes == {leaf: 120, "_0": 160, "_1": 160, "_2": 80}


class Widening(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.middle = nn.Linear(3, 3)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        value = self.embedding(tokens)
        hidden = self.middle(value).relu()
        return hidden @ self.embedding.weight.T, value


def test_the_last_unit_uses_what_the_output_holds_and_tied_parameters_are_one() -> None:
    units, costs = costs_of(Widening(), torch.arange(4))
    last = len(units.groups) - 1
    names = [nodes[0].name for nodes in units.groups]
    value = next(item for item in costs.units.values if item.producer == names.index("embedding"))
    assert value == SharedItem(4 * 3 * 8, (names.index("linear"), last), producer=names.index("embedding"))
    weight = next(item for item in costs.units.held if item.nbytes == 7 * 3 * 8)
    assert weight.uses[0] == names.index("embedding")
    assert len(weight.uses) == 2


class Inplace(nn.Module):
    """What its second half sees depends on three writes: to a value, through a view, and to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        value = self.linear(x) * 2
        value += 1
        value[:, 0].mul_(3)
        self.count += 1
        return (value * self.count).exp()


def test_units_run_on_what_came_before_even_if_it_was_written() -> None:
    torch.manual_seed(0)
    model, x = Inplace().double(), torch.randn(4, 3).double()
    units = units_of(model, x)
    trial, watch = NodeInterpreter(units.captured.module, [x]), costs.OperatorTimer(x.device)
    for node in units.captured.module.graph.nodes:
        trial.run_timed(node, watch)
    fresh = Inplace().double()
    fresh.load_state_dict({**model.state_dict(), "count": torch.zeros(())})
    # It has counted once: what was tried before counted on a copy.
    exp = next(value for node, value in trial.values.items() if node.name == "exp")
    assert torch.equal(exp, fresh(x))
    assert exp.requires_grad


def test_a_write_is_saved_where_it_was_written() -> None:
    units, costs = costs_of(Inplace(), torch.randn(4, 3).double())
    exp = next(u for u, nodes in enumerate(units.groups) if nodes[-1].name == "exp")
    # exp saves its output alone, the multiplication before it the written value: 4 × 3 numbers of 8 bytes each.
    assert [item for item in costs.units.saved if item.uses == (exp,)] == [SharedItem(96, (exp,))]
    assert all(item.nbytes in (96, 8) for item in costs.units.saved)


@pytest.mark.parametrize("name", ["cnn", "resnet", "gpt2", "inception"])
def test_measuring_leaves_no_trace(name: str) -> None:
    job, model, units = from_zoo(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    modes = [each.training for each in model.modules()]
    torch.manual_seed(3)
    state = torch.get_rng_state()
    costs = measure(units, units.captured.flatten(job.inputs), repeats=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [each.training for each in model.modules()] == modes
    assert len(costs.units.seconds) == len(units.groups)
    assert sum(costs.units.seconds) > 0
    assert min(costs.units.seconds) >= 0


def test_what_is_saved_is_what_a_step_saves() -> None:
    """All units together save what the whole model does, but for what it holds anyway."""
    job, model, units = from_zoo("unet")
    own = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
    saved: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(job.inputs)
    found = measure(units, units.captured.flatten(job.inputs), repeats=1).units.saved
    assert sum(item.nbytes for item in found) == sum(size for size, _ in saved.values())
    assert output.requires_grad

"""Models that are large, of several dtypes, or not what one expects."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

from paceline import Run, Strategy, train
from tests import oracle
from tests.engine import programs

Local = Callable[..., Run]

STEPS = 7


class TwoTypes(nn.Module):
    """A bfloat16 and a float32 vector beside float64 matrices: A is three vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6, dtype=torch.float32))
        self.shift = nn.Parameter(torch.zeros(6, dtype=torch.bfloat16))
        self.rest = programs.mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(x * self.scale.double() + self.shift.double())


@pytest.mark.parametrize("optimizer", [functools.partial(SGD, lr=0.1, momentum=0.9), functools.partial(Adam, lr=0.01)])
def test_parameters_of_several_dtypes(local: Local, optimizer: Any) -> None:
    """To the bit what virtual time says: both round the same numbers in the same order."""
    program = programs.program(model=TwoTypes, optimizer=optimizer, clip_norm=0.5)
    run = local(program, "replicas=3", steps=STEPS)
    virtual = train(program, "replicas=3", engine="virtual", steps=STEPS, progress=False)
    assert {value.dtype for value in run.state.values()} == {torch.float64, torch.float32, torch.bfloat16}
    oracle.assert_same(run.model, virtual.state, 1e-12)
    moved = [name for name, value in program.build().state_dict().items() if not torch.equal(value, run.state[name])]
    assert len(moved) == 6


class Rotations(nn.Module):
    """Complex weights, a real output."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex128) @ self.weight).abs()


@pytest.mark.parametrize("optimizer", [functools.partial(SGD, lr=0.1, momentum=0.9), functools.partial(Adam, lr=0.01)])
def test_complex_parameters(local: Local, optimizer: Any) -> None:
    program = programs.program(model=Rotations, optimizer=optimizer, clip_norm=0.5)
    run = local(program, "replicas=3", steps=STEPS)
    oracle.assert_same(run.model, oracle.one_process(program, 3, STEPS), 1e-9)  # Adam divides by a gradient's size


class Counting(nn.Module):
    """A whole-number buffer that training writes, one that it does not, and a weight that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = programs.mlp()
        self.inner[0].weight.requires_grad_(False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int32))
        self.register_buffer("table", torch.arange(5))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return self.inner(x)


def test_whole_numbers_and_what_is_frozen(local: Local) -> None:
    program = programs.program(model=Counting, train=programs.data(samples=48))
    run = local(program, "replicas=3", steps=STEPS)
    before = program.build().state_dict()
    assert run.state["calls"] == STEPS
    for name in ("table", "inner.0.weight"):
        assert torch.equal(run.state[name], before[name])
    assert not torch.equal(run.state["inner.0.bias"], before["inner.0.bias"])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
def test_scripted_layers(local: Local) -> None:
    """They take no hooks, by which others end a step that is called off."""
    program = programs.program(model=scripted)
    run = local(program, "replicas=2 aggregation=buffered:k=1,cancel=true", steps=STEPS)
    assert run.summary["gradients"] + run.summary["cancelled"] == 2 * STEPS


def scripted() -> nn.Module:
    return nn.Sequential(torch.jit.script(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 3)).double()


def test_twenty_five_workers_and_a_million_parameters(local: Local) -> None:
    program = programs.program(
        model=functools.partial(large, 600), train=programs.data(dtype=torch.float32), batch_size=2, test=None
    )
    run = local(program, Strategy.parse("replicas=25 aggregation=smooth-switch:every=10"), steps=4)
    assert run.left == []
    assert run.summary["parameter_bytes"][0] > 4_000_000
    assert run.summary["gradients"] == run.summary["applied"] + run.summary["discarded"] == 100
    assert all(torch.isfinite(value).all() for value in run.state.values())


def large(width: int) -> nn.Module:
    hidden = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), *hidden, nn.Linear(width, 3))


@pytest.mark.parametrize("policy", ["hogwild", "asynchronous", "synchronous"])
def test_it_learns(local: Local, policy: str) -> None:
    run = local(programs.program(), f"replicas=3 aggregation={policy}", steps=60)
    losses = [record.train_loss for record in run.history]
    assert losses[-1] < losses[0] - 0.05  # type: ignore[operator]

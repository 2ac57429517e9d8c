"""Replicas by themselves: adopt, advance, finish."""

import functools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, Adam

from paceline import Program, train
from paceline.core.delta import Keep, Mix, Replace
from paceline.core.errors import InputError
from paceline.replica.autograd import Autograd, backpropagate, step_seed
from paceline.replica.base import EMPTY, Batch
from paceline.replica.flat_state import FlatLayout, FlatState, finite, read
from paceline.replica.local_sgd import LocalSGD, WritesInPlace
from paceline.replica.own_parameters import Exchange
from paceline.replica.single import Single
from tests import oracle
from tests.engine import programs

ROUNDING = 1e-14


def autograd(program: Program, replica: int = 0, buffers: tuple[str, ...] = ()) -> tuple[Autograd, FlatState]:
    module = oracle.Plain(program).module
    layout = FlatLayout.of(module, buffers)
    return Autograd(program, module, layout, replica, "cpu"), read(module, layout.new())


def batch(program: Program, *indices: int) -> Batch:
    inputs, targets = program.train
    return Batch(inputs[list(indices)], targets[list(indices)], len(indices))


def same(state: FlatState, expected: oracle.Values, bound: float = ROUNDING) -> None:
    for name, value in state.named():
        torch.testing.assert_close(value, expected[name], rtol=bound, atol=bound)


def test_a_gradient_is_that_of_all_its_micro_steps() -> None:
    program = programs.program()
    mine, state = autograd(program)
    replica = Single(mine, micro_steps=3)
    out = state.layout.new()
    for _ in range(2):  # nothing is left over from the Δ before
        replica.adopt(state)
        losses = [replica.advance(b, k) for k, b in enumerate([batch(program, 1, 2, 3), EMPTY, batch(program, 7)])]
        measured = replica.finish(out)
        same(out, oracle.Plain(program).gradient([1, 2, 3, 7]))
        assert (measured.samples, measured.finite) == (4, True)
        assert measured.loss == pytest.approx((3 * losses[0] + losses[2]) / 4)
        assert math.isnan(losses[1])


@pytest.mark.parametrize("model", [programs.Tied, programs.Two, programs.mlp])
def test_gradients_may_be_added_up_in_delta_itself(model: Any) -> None:
    """One that is used twice, one that is not used; nothing is left over from the Δ before, or from one called off."""
    program = programs.program(model=model, train=programs.with_dict() if model is programs.Two else programs.data())
    inputs, targets = program.train
    rows = [({k: v[r] for k, v in inputs.items()} if isinstance(inputs, dict) else inputs[r]) for r in ([1, 2], [7])]
    batches = [Batch(x, targets[r], len(r)) for x, r in zip(rows, ([1, 2], [7]), strict=True)]
    found = list[FlatState]()
    for in_place in (False, True):
        mine, state = autograd(program)
        replica, out = Single(mine, micro_steps=2), state.layout.new()
        mine.gradients = out if in_place else None
        replica.adopt(state)
        replica.advance(batches[1], 5)
        for _ in range(2):
            replica.adopt(state)
            for clock, each in enumerate(batches):
                replica.advance(each, clock)
            assert replica.finish(out).finite
        found.append(out)
    for one, other in zip(found[0].parameters, found[1].parameters, strict=True):
        assert torch.equal(one, other)  # the same sums in the same order


LOSSES: dict[str, Any] = {
    "scalar": lambda x: (x * x).sum(),
    "bfloat16": lambda x: (x * x).sum().bfloat16(),
    "float16": lambda x: (x * x).sum().half(),
    "float64": lambda x: (x * x).double().mean(),
    "of one element": lambda x: (x * x).sum().reshape(1),
    "used twice": lambda x: (x.exp() * x).sum() + x[0],
}


@pytest.mark.parametrize("weight", [1.0, 3.0, 0.1, 1e5])
@pytest.mark.parametrize("kind", LOSSES)
def test_backpropagating_is_torchs_backward(kind: str, weight: float) -> None:
    given = torch.randn(5, generator=torch.Generator().manual_seed(3))
    mine, torchs = (given.clone().requires_grad_() for _ in range(2))
    for _ in range(2):  # the second gradient is added to the first
        backpropagate(LOSSES[kind](mine), weight)
        (weight * LOSSES[kind](torchs)).backward()
    assert mine.grad is not None
    assert torchs.grad is not None
    assert torch.equal(mine.grad, torchs.grad)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda x: x * 2, "grad can be implicitly created only for scalar outputs"),
        (lambda x: x.detach().sum(), "does not require grad"),
        (lambda x: torch.tensor(1), "does not require grad"),
    ],
)
def test_what_torchs_backward_refuses(loss: Any, said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        backpropagate(loss(torch.ones(3, requires_grad=True)))


def test_a_loss_of_a_class_of_its_own_has_its_own_backward() -> None:
    class Loss(torch.Tensor):
        called = False

        def backward(self, *args: Any, **kwargs: Any) -> None:
            Loss.called = True

    backpropagate(torch.ones(()).as_subclass(Loss))
    assert Loss.called


def test_a_delta_that_was_called_off_leaves_nothing_behind() -> None:
    program = programs.program()
    mine, state = autograd(program)
    replica = Single(mine, micro_steps=2)
    replica.adopt(state)
    replica.advance(batch(program, 5), 0)
    replica.adopt(state)
    for k in (1, 2):
        replica.advance(batch(program, k), k)
    replica.finish(out := state.layout.new())
    same(out, oracle.Plain(program).gradient([1, 2]))


def test_no_sample_no_gradient() -> None:
    program = programs.program()
    mine, state = autograd(program)
    replica = Single(mine)
    replica.adopt(state)
    replica.advance(EMPTY, 0)
    measured = replica.finish(out := state.layout.new())
    assert (measured.samples, measured.finite) == (0, True)
    assert math.isnan(measured.loss)
    assert not any(v.any() for v in out.parameters)


def test_parameters_without_a_gradient_have_zeros_and_sparse_ones_are_filled_up() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.idle = nn.Embedding(5, 3, sparse=True), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.table(x)

    data = torch.tensor([0, 1, 1, 4]), torch.tensor([0, 1, 2, 0])
    program = programs.program(model=Sparse, train=data)
    mine, state = autograd(program)
    replica = Single(mine)
    replica.adopt(state)
    replica.advance(batch(program, 0, 1, 2), 0)
    replica.finish(out := state.layout.new())
    gradient = dict(out.named())
    assert gradient["table.weight"].abs().sum(1).gt(0).tolist() == [True, True, False, False, False]
    assert not gradient["idle.weight"].any()


def test_running_buffers_begin_at_as_and_travel_with_the_delta() -> None:
    names = tuple(f"1.{n}" for n, _ in nn.BatchNorm1d(8).named_buffers())
    program = programs.program(model=programs.batchnorm)
    mine, state = autograd(program, buffers=names)
    dict(state.named())["1.running_mean"].fill_(3)
    replica = Single(mine)
    for _ in range(2):  # the second time from A again, not from the first
        replica.adopt(state)
        replica.advance(batch(program, 1, 2, 3), 0)
        replica.finish(out := state.layout.new())
    plain = oracle.Plain(program)
    plain.module[1].running_mean.fill_(3)
    gradient = plain.gradient([1, 2, 3])
    same(out, gradient | dict(plain.module.named_buffers()))
    assert not torch.equal(dict(out.named())["1.running_mean"], dict(state.named())["1.running_mean"])


class Assigns(nn.Module):
    """Keeps a mean of its inputs in a buffer, which it assigns or writes."""

    mean: torch.Tensor

    def __init__(self, writes: bool, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.layer, self.writes, self.shape = nn.Linear(6, 3).double(), writes, shape
        self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> Any:
        mean = 0.9 * self.mean.clone() + 0.1 * self.layer(x).mean() * x.mean(0)
        if self.writes:
            with torch.no_grad():
                self.mean.copy_(mean)
        else:
            self.mean = mean.expand(*self.shape, 6) if self.training else self.mean
        return self.layer(x - mean.detach())


@pytest.mark.parametrize(("engine", "strategy"), [("virtual", "replicas=2"), ("distributed", "replicas=1")])
def test_a_buffer_that_forward_assigns_is_as_one_that_it_writes(engine: str, strategy: str) -> None:
    states = []
    for writes in (True, False):
        program = programs.program(model=functools.partial(Assigns, writes))
        states.append(train(program, strategy, steps=5, engine=engine, progress=False).state)
    assert states[0]["mean"].abs().min() > 0
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name


def test_a_buffer_that_forward_assigns_keeps_its_shape() -> None:
    program = programs.program(model=functools.partial(Assigns, False, (2,)))
    with pytest.raises(InputError, match=r"forward made mean of Assigns torch.float64 \[2, 6\], a buffer of .* \[6\]"):
        train(program, steps=2, engine="virtual", progress=False)


@pytest.mark.parametrize("optimizer", [functools.partial(SGD, lr=0.1, momentum=0.9), functools.partial(Adam, lr=0.01)])
@pytest.mark.parametrize(("rule", "alpha"), [(Replace(), 1.0), (Mix(0.25), 0.25), (Keep(), 0.0)])
@pytest.mark.parametrize("distance", [False, True])
def test_own_steps(optimizer: Any, rule: Any, alpha: float, distance: bool) -> None:
    """Two rounds of two steps, between which A has moved elsewhere."""
    program = programs.program(optimizer=optimizer, clip_norm=0.5)
    mine, state = autograd(program)
    replica, plain = LocalSGD(program, mine, Exchange(rule), distance=distance), oracle.Plain(program)
    out = state.layout.new()
    for round_ in range(2):
        replica.adopt(state)
        if round_:
            sent = plain.values() | {n: v.clone() for n, v in state.named()}
            plain.load({n: x - alpha * (x - sent[n]) for n, x in plain.values().items()})
        began = plain.values()
        for k in range(2):
            replica.advance(batch(program, round_ * 2 + k, 9), k)
            plain.step(plain.gradient([round_ * 2 + k, 9]))
        measured = replica.finish(out)
        assert measured.samples == 4
        same(out, plain.values() if distance else {n: p - began[n] for n, p in plain.values().items()}, 1e-12)
        state.parameters[0].add_(0.3)


def test_own_steps_begin_anew_after_what_is_not_finite() -> None:
    program = programs.program(optimizer=functools.partial(Adam, lr=0.01))
    mine, state = autograd(program)
    replica = LocalSGD(program, mine, Exchange(Mix(0.5)), distance=True)
    out = state.layout.new()
    replica.adopt(state)
    good = batch(program, 1, 2)
    replica.advance(Batch(good.input * math.inf, good.target, 2), 0)
    assert not replica.finish(out).finite
    replica.adopt(state)
    replica.advance(good, 1)
    assert replica.finish(out).finite
    plain = oracle.Plain(program)
    plain.step(plain.gradient([1, 2]))
    same(out, plain.values())


def test_writing_in_place() -> None:
    program = programs.program()
    mine, state = autograd(program)
    replica, plain = WritesInPlace(program, mine), oracle.Plain(program)
    for k in range(3):
        replica.adopt(state)
        replica.advance(batch(program, k, 8), k)
        plain.step(plain.gradient([k, 8]))
        same(state, plain.values())
    assert replica.finish(state).samples == 2


@given(st.integers(0, 2**63 - 1), st.integers(0, 2000), st.integers(0, 10**7))
def test_a_step_has_a_seed_that_torch_takes(seed: int, replica: int, clock: int) -> None:
    value = step_seed(seed, replica, clock)
    assert 0 <= value < 2**63
    assert value != step_seed(seed, replica, clock + 1)
    assert value != step_seed(seed, replica + 1, clock)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_finite(bad: float) -> None:
    good = torch.ones(4, dtype=torch.float64)
    spoilt = good.clone()
    spoilt[2] = bad
    assert finite([good, good], 1.0)
    assert finite([good * 1e308], 1.0), "a sum that overflows says nothing of what it adds"
    assert not finite([good, spoilt], 1.0)
    assert not finite([good], bad)

"""The owner does to A, vector by vector, what torch.optim does to a model's parameters."""

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, RMSprop
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from paceline import Program
from paceline.aggregation import Aggregation, parse
from paceline.engine.run_context import first_state
from paceline.engine.server_optimizer import ServerOptimizer
from paceline.replica.flat_state import FlatState
from paceline.replica.optimizer_kernels import kernel_of
from tests import oracle
from tests.engine import programs
from tests.engine.test_virtual_parity import TwoTypes


def pair(
    program: Program, aggregation: str = "synchronous", buffers: tuple[str, ...] = ()
) -> tuple[ServerOptimizer, oracle.Plain]:
    policy: Aggregation[Any] = parse(aggregation)
    return ServerOptimizer(program, policy, first_state(program, buffers)[1]), oracle.Plain(program)


def deltas(owner: ServerOptimizer, count: int, seed: int) -> list[FlatState]:
    generator = torch.Generator().manual_seed(seed)
    made = [owner.state.clone() for _ in range(count)]
    for state in made:
        for vector in state.parameters:
            vector.copy_(torch.randn(len(vector), generator=generator, dtype=vector.dtype))
    return made


def same(owner: ServerOptimizer, plain: oracle.Plain, bound: float = 0.0) -> None:
    for name, view in owner.state.named():
        torch.testing.assert_close(
            view, plain.values()[name], rtol=bound, atol=bound, msg=lambda m, n=name: f"{n}: {m}"
        )


OPTIMIZERS = [
    functools.partial(SGD, lr=0.1),
    functools.partial(SGD, lr=0.1, maximize=True),
    functools.partial(SGD, lr=0.1, momentum=0.9, dampening=0.1),
    functools.partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    lambda parameters: SGD(parameters, lr=torch.tensor(0.1)),
    functools.partial(Adam, lr=0.01, amsgrad=True),
    functools.partial(Adam, lr=0.01, weight_decay=0.1),
    functools.partial(AdamW, lr=0.01),
    functools.partial(SGD, lr=0.1, weight_decay=0.01),
    functools.partial(RMSprop, lr=0.01, momentum=0.5, centered=True),
    programs.half_decayed,
]


@pytest.mark.parametrize("scheduler", [None, functools.partial(StepLR, step_size=2, gamma=0.5)])
@pytest.mark.parametrize("model", [programs.mlp, programs.Tied, programs.frozen, TwoTypes])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: getattr(optimizer, "__name__", str(optimizer)))
def test_a_vector_is_stepped_on_as_its_tensors_are(optimizer: Any, model: Any, scheduler: Any) -> None:
    """To the bit, for these optimizers treat each element alone; Adam's fused kernel rounds a few times otherwise."""
    owner, plain = pair(programs.program(model=model, optimizer=optimizer, scheduler=scheduler))
    for step in range(5):
        (delta,) = deltas(owner, 1, step)
        rate = 0.5 if step % 2 else 1.0
        before = delta.clone()
        owner.apply([(delta, 1.0)], rate, alone=step > 1)
        assert all(torch.equal(a, b) for a, b in zip(delta.parameters, before.parameters, strict=True))
        plain.step(dict(delta.named()), rate)
    fused = owner.flat_optimizer.state_count == 2
    same(owner, plain, (1e-6 if model is TwoTypes else 1e-14) if fused else 0.0)


@pytest.mark.parametrize("model", [programs.mlp, TwoTypes])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: getattr(optimizer, "__name__", str(optimizer)))
def test_the_new_a_may_be_written_elsewhere(optimizer: Any, model: Any) -> None:
    """To the bit as in place, and the old A stays as it was."""
    given = programs.program(model=model, optimizer=optimizer)
    (here, _), (there, _) = pair(given), pair(given)
    for step in range(4):
        (delta,) = deltas(here, 1, step)
        old, before = there.state, there.state.clone()
        here.apply([(delta, 1.0)], alone=step > 1)
        there.apply([(delta, 1.0)], alone=step > 1, out=before.clone())
        assert there.state is not old
        assert old.digest() == before.digest()
        assert there.state.digest() == here.state.digest()


KERNELS = [(lambda p: SGD(p, lr=1), True), (Adam, True), (AdamW, True), (RMSprop, False)]
KERNELS += [(lambda p: SGD(p, lr=1, maximize=True), False), (lambda p: Adam(p, amsgrad=True), False)]


@pytest.mark.parametrize(("make", "expected"), KERNELS)
def test_who_has_a_kernel(make: Any, expected: bool) -> None:
    vector, other = torch.zeros(3), torch.zeros(3)
    assert (kernel_of(make([torch.nn.Parameter(vector)]), [vector]) is not None) is expected
    assert kernel_of(make([torch.nn.Parameter(other)]), [vector]) is None


@pytest.mark.parametrize(
    "optimizer", OPTIMIZERS[:2], ids=lambda optimizer: getattr(optimizer, "__name__", str(optimizer))
)
def test_a_sum_is_weighed_and_goes_from_left_to_right(optimizer: Any) -> None:
    owner, plain = pair(programs.program(optimizer=optimizer))
    made, weights = deltas(owner, 3, 0), (0.5, 0.3, 0.2)
    owner.apply(zip(made, weights, strict=True))
    named = [dict(d.named()) for d in made]
    total = {
        n: sum(w * d[n] for w, d in zip(weights[1:], named[1:], strict=True)) + weights[0] * v
        for n, v in named[0].items()
    }
    plain.step(total)
    same(owner, plain, 1e-15)  # w·g is added in one rounding here, in two there


def test_deltas_are_asked_for_one_at_a_time() -> None:
    owner, _ = pair(programs.program())
    asked: list[int] = []

    def lazily() -> Any:
        for i, delta in enumerate(deltas(owner, 3, 0)):
            before = [v.clone() for v in owner.combined]
            asked.append(i)
            yield delta, 1.0
            assert not all(torch.equal(a, b) for a, b in zip(before, owner.combined, strict=True))

    owner.apply(lazily())
    assert asked == [0, 1, 2]


@pytest.mark.parametrize("bound", [0.1, 1e9])
@pytest.mark.parametrize("model", [programs.mlp, TwoTypes])
def test_clipping_is_torchs(model: Any, bound: float) -> None:
    owner, plain = pair(programs.program(model=model, clip_norm=bound))
    for step in range(3):
        (delta,) = deltas(owner, 1, step)
        owner.apply([(delta, 1.0)])
        plain.step(dict(delta.named()))
    # The norm is taken over vectors here and over tensors there; torch adds the norm of a float32 part in float32.
    same(owner, plain, 1e-6 if model is TwoTypes else 1e-14)


def test_momentum_that_a_schedule_moves() -> None:
    scheduler = functools.partial(OneCycleLR, max_lr=0.1, total_steps=10)
    owner, plain = pair(programs.program(optimizer=functools.partial(SGD, lr=0.1, momentum=0.9), scheduler=scheduler))
    for step in range(8):
        (delta,) = deltas(owner, 1, step)
        owner.apply([(delta, 1.0)])
        plain.step(dict(delta.named()))
    same(owner, plain)


@pytest.mark.parametrize("hook", ["register_step_pre_hook", "register_step_post_hook"])
def test_hooks_of_an_optimizer_are_called(hook: str) -> None:
    called: list[int] = []

    def make(parameters: Any) -> SGD:
        optimizer = SGD(parameters, lr=0.1)
        getattr(optimizer, hook)(lambda *_: called.append(1))
        return optimizer

    owner, _ = pair(programs.program(optimizer=make))
    (delta,) = deltas(owner, 1, 0)
    owner.apply([(delta, 1.0)])
    assert called == [1]


def test_a_change_moves_a_by_itself() -> None:
    owner, _ = pair(programs.program(optimizer=functools.partial(Adam, lr=0.5)), "local-steps")
    one, other = deltas(owner, 2, 0)
    before = owner.state.clone()
    owner.apply([(one, 0.25), (other, 0.75)])
    for name, view in owner.state.named():
        expected = dict(before.named())[name] + 0.25 * dict(one.named())[name] + 0.75 * dict(other.named())[name]
        torch.testing.assert_close(view, expected, rtol=1e-15, atol=1e-15)


def test_a_distance_is_taken_from_a_as_it_is_on_arrival() -> None:
    owner, _ = pair(programs.program(), "elastic-averaging")
    (x,) = deltas(owner, 1, 0)
    for _ in range(2):
        before = owner.state.clone()
        owner.apply([(x, 0.1)])
        for name, view in owner.state.named():
            a, there = dict(before.named())[name], dict(x.named())[name]
            torch.testing.assert_close(view, a + 0.1 * (there - a), rtol=1e-14, atol=1e-15)


def test_buffers_are_a_weighted_mean_and_counters_never_go_back() -> None:
    names = tuple(n for n, _ in nn.BatchNorm1d(8).named_buffers())
    owner, _ = pair(programs.program(model=programs.batchnorm), buffers=tuple(f"1.{n}" for n in names))
    one, other = deltas(owner, 2, 0)
    for state, mean, count in ((one, 2.0, 5), (other, 4.0, 3)):
        views = dict(state.named())
        views["1.running_mean"].fill_(mean)
        views["1.running_var"].fill_(mean)
        views["1.num_batches_tracked"].fill_(count)
    owner.apply([(one, 1.0), (other, 3.0)])  # weights of a sum: they need not add up to 1
    values = dict(owner.state.named())
    assert values["1.running_mean"].tolist() == [3.5] * 8
    assert values["1.num_batches_tracked"].item() == 5
    owner.apply([(other, 1.0)])
    assert values["1.running_mean"].tolist() == [4.0] * 8
    assert values["1.num_batches_tracked"].item() == 5

"""Many gradients in one call: what autograd gives one at a time, and used only where it does."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import Program, train
from paceline.core.data_order import BatchRange, DataOrder
from paceline.engine.run_context import first_state
from paceline.engine.virtual.pending_delta import PendingDelta
from paceline.engine.virtual.vmap_gradients import MOST, StackedGradient, VmapComputer, stacked_gradient
from paceline.replica.autograd import Autograd
from paceline.replica.batches import BatchSource
from paceline.replica.flat_state import FlatState
from paceline.replica.single import Single
from tests import oracle
from tests.engine import programs

BOUND = 1e-13
"""Both add the same few hundred products of float64, in another order."""


def order(program: Program, replicas: int = 1) -> DataOrder:
    return oracle.order(program, replicas)


def usable(program: Program) -> bool:
    module, state = first_state(program, ())
    return stacked_gradient(module, program, state.layout, order(program)) is not None


def deep() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8, bias=False), nn.GELU(), nn.Identity(), nn.Linear(8, 5), nn.LeakyReLU(), nn.Linear(5, 3)
    ).double()


def smooth(output: Tensor, target: Tensor) -> Tensor:
    """A loss of one's own, which is called through vmap."""
    return nn.functional.cross_entropy(output, target, label_smoothing=0.1) + output.square().mean()


LOSSES = [
    nn.functional.cross_entropy,
    smooth,
    nn.CrossEntropyLoss(),
    lambda output, target: nn.functional.mse_loss(output, nn.functional.one_hot(target, 3).double()),
]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("model", [programs.mlp, deep])
def test_gradients_are_autograds(model: Any, loss: Any) -> None:
    program = programs.program(model=model, loss=loss)
    assert usable(program)
    module, state = first_state(program, ())
    states = [state.clone() for _ in range(5)]
    for i, other in enumerate(states):
        other.parameters[0].add_(0.1 * i)
    rows = torch.arange(20).view(5, 4)
    inputs, targets = (part[rows] for part in program.train)
    gradients, losses = StackedGradient(program, module, state.layout)(states, inputs, targets)
    for i, alone in enumerate(states):
        plain = oracle.Plain(program).load(dict(alone.named()))
        named = dict(FlatState(state.layout, [gradients[i]], []).named())
        for name, expected in plain.gradient(rows[i]).items():
            torch.testing.assert_close(named[name], expected, rtol=BOUND, atol=BOUND)
        expected_loss = program.loss(plain.module(inputs[i]), targets[i])
        torch.testing.assert_close(losses[i], expected_loss.detach(), rtol=BOUND, atol=BOUND)


class Hooked(nn.Sequential):
    """No plain nn.Sequential."""


def hooked() -> nn.Module:
    model = programs.mlp()
    model[0].register_forward_hook(lambda module, inputs, output: output * 2)
    return model


def shared() -> nn.Module:
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(6, 3)).double()


def weighted(output: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """Its mean is no mean over samples."""
    weight = torch.tensor([1.0, 5.0, 0.1], dtype=output.dtype)
    return nn.functional.cross_entropy(output, target, weight=weight, reduction=reduction)


@pytest.mark.parametrize(
    "fields",
    [
        {"model": programs.frozen},
        {"model": programs.Tied},
        {"model": shared},
        {"model": hooked},
        {"model": lambda: Hooked(*programs.mlp())},
        {"model": programs.dropout},
        {"model": programs.batchnorm},
        {"model": programs.convolution},
        {"model": lambda: nn.Sequential(nn.Linear(6, 400), nn.Linear(400, 300), nn.Linear(300, 3)).double()},
        {"model": programs.Two, "train": programs.with_tuple()},
        {"train": list(zip(*programs.data(), strict=True))},
        {"loader": {"collate_fn": torch.utils.data.default_collate}},
        {"loss": lambda output, target: nn.functional.cross_entropy(nn.functional.dropout(output), target)},
        {
            "loss": lambda output, target: (
                nn.functional.cross_entropy(output, target) * float(output.sum().item() > -1e9)
            )
        },
        {"precision": "bf16", "model": functools.partial(programs.mlp, torch.float32)},
    ],
)
def test_what_the_rule_leaves_out_is_computed_one_at_a_time(fields: dict[str, Any]) -> None:
    if fields.get("precision") == "bf16":
        fields = fields | {"train": programs.data(dtype=torch.float32)}
    program = programs.program(**fields)
    run = train(program, "replicas=2 aggregation=asynchronous", engine="virtual", steps=3, progress=False)
    assert run.summary["notes"]["gradient_batching"] == "one at a time"


def test_a_loss_that_weighs_its_samples_is_still_right() -> None:
    program = programs.program(loss=weighted)
    run = train(program, "replicas=1", engine="virtual", steps=5, progress=False)
    oracle.assert_same(run.model, oracle.one_process(program, 1, 5), 1e-12)


def test_targets_that_are_ignored_do_not_count() -> None:
    inputs, targets = programs.data()
    targets = targets.clone()
    targets[-7:] = -100  # cross_entropy's mean is over the others of a batch
    program = programs.program(train=(inputs, targets))
    run = train(program, "replicas=1", engine="virtual", steps=8, progress=False)
    oracle.assert_same(run.model, oracle.one_process(program, 1, 8), 1e-12)


@pytest.fixture
def stacked() -> VmapComputer:
    program = programs.program()
    module, state = first_state(program, ())
    data = order(program, 40)

    def make(replica: int) -> Single:
        return Single(Autograd(program, module, state.layout, replica, "cpu"))

    gradient = StackedGradient(program, module, state.layout)
    return VmapComputer(gradient, data, make, BatchSource(program, data, data.replicas).at, stop=True)


def attempts(count: int) -> list[PendingDelta]:
    _, state = first_state(programs.program(), ())
    return [PendingDelta(replica, 1, 0, state, 0, BatchRange(replica, 0, 1)) for replica in range(count)]


def test_those_that_have_waited_longest_are_computed_along(stacked: VmapComputer) -> None:
    """With 40 replicas of 50 samples a batch holds 2 samples for the first ten and 1 for the others."""
    under_way = attempts(40)
    for attempt in under_way:
        stacked.begin(attempt)
    stacked.compute(under_way[15])
    done = [a.replica for a in under_way if a.measured is not None]
    assert done == list(range(10, 40))
    assert len(done) < MOST
    stacked.compute(under_way[3])
    assert all(a.measured is not None for a in under_way)


def test_no_more_than_the_bound_at_once(stacked: VmapComputer) -> None:
    under_way = [PendingDelta(12, k, 0, attempts(1)[0].read, 0, BatchRange(12, 0, 1)) for k in range(MOST + 8)]
    for attempt in under_way:
        stacked.begin(attempt)
    stacked.compute(under_way[-1])
    assert [a.clock for a in under_way if a.measured is not None] == [*range(MOST - 1), MOST + 7]


def test_what_is_forgotten_is_not_computed(stacked: VmapComputer) -> None:
    one, other, third = attempts(3)
    for attempt in (one, other, third):
        stacked.begin(attempt)
    stacked.forget(other)
    stacked.compute(one)
    assert (other.measured, third.measured is None) == (None, False)
    assert third.read is None, "the A that it read is let go"

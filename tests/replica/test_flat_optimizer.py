"""Steps on gradients that lie tensor by tensor."""

import functools

import pytest
import torch
from torch import nn

from paceline.replica import optimizer_kernels
from paceline.replica.flat_optimizer import FlatOptimizer
from paceline.replica.flat_state import FlatLayout, FlatState

OPTIMIZERS = {
    "plain": functools.partial(torch.optim.SGD, lr=0.1),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": functools.partial(torch.optim.Adam, lr=0.1),
}


def filled(layout: FlatLayout, seed: int) -> FlatState:
    made, draw = layout.new(), torch.Generator().manual_seed(seed)
    for vector in made.parameters:
        vector.normal_(generator=draw)
    return made


@pytest.mark.parametrize("weight", [1.0, 0.25])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_tensor_by_tensor_is_as_all_at_once(name: str, weight: float) -> None:
    """Of two dtypes, with a gradient that is laid out otherwise."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 7).double())
    layout = FlatLayout.of(model)
    states = [filled(layout, 1) for _ in range(2)]
    whole, apart = (FlatOptimizer(OPTIMIZERS[name], None, state, layout.new()) for state in states)
    for step in range(3):
        gradient = filled(layout, 2 + step)
        pieces = [p.t().contiguous().t() if p.dim() == 2 else p.clone() for p in gradient.views.parameters]
        before = [v.clone() for v in states[0].parameters]
        whole.step(gradient.parameters, 0.5, weight=weight)
        apart.step_by_tensor(pieces, 0.5, weight=weight)
        for one, other, old in zip(states[0].parameters, states[1].parameters, before, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6 if one.dtype == torch.float32 else 1e-14, atol=1e-7)
            assert (one - old).abs().min() > 0
    assert whole.steps == apart.steps == 3


@pytest.mark.parametrize("weight", [1.0, 0.25])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_may_write_its_gradient_has_the_same_bits(name: str, weight: float) -> None:
    layout = FlatLayout.of(nn.Linear(6, 5))
    states = [filled(layout, 1) for _ in range(2)]
    keeping, consuming = (FlatOptimizer(OPTIMIZERS[name], None, state, layout.new()) for state in states)
    for step in range(3):
        gradients = [filled(layout, 2 + step).parameters for _ in range(2)]
        before = gradients[0][0].clone()
        keeping.step(gradients[0], 0.5, weight=weight)
        consuming.step(gradients[1], 0.5, weight=weight, consumes=True)
        assert torch.equal(gradients[0][0], before)
        assert torch.equal(states[0].parameters[0], states[1].parameters[0])


@pytest.mark.parametrize("consumes", [False, True])
@pytest.mark.parametrize("name", ["plain", "momentum", "dampened"])
def test_a_step_block_by_block_has_the_same_bits(name: str, consumes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    dampened = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5)
    make = (OPTIMIZERS | {"dampened": dampened})[name]
    layout = FlatLayout.of(nn.Linear(66, 15))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    found = []
    for block in (2**18, 64):
        monkeypatch.setattr(optimizer_kernels, "BLOCK", block)
        state, other = filled(layout, 1), layout.new()
        optimizer = FlatOptimizer(make, None, state, layout.new())
        for step in range(3):
            gradient = filled(layout, 2 + step).parameters
            optimizer.step(gradient, 0.5, other if step % 2 == 0 else state, weight=0.25, consumes=consumes)
        found.append(other.parameters[0])
    assert torch.equal(*found)

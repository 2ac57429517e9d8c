"""A thousand replicas hold the versions of A that are still to be read, and nothing else."""

import functools
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import Program, train
from paceline.replica.flat_state import FlatLayout, FlatState
from tests.engine import programs

REPLICAS = 1000


class Census:
    """Counts the states that are alive, and the tensors of A's length."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
        gc.collect()  # what is left of runs of other tests
        self.most = self._live = 0
        self._elements = elements
        clone, new = FlatState.clone, FlatLayout.new
        monkeypatch.setattr(FlatState, "clone", lambda state: self._born(clone(state)))
        monkeypatch.setattr(FlatLayout, "new", lambda layout, **k: self._born(new(layout, **k)))

    def _born(self, state: FlatState) -> FlatState:
        self._live += 1
        self.most = max(self.most, self._live)
        weakref.finalize(state, self._gone)
        return state

    def _gone(self) -> None:
        self._live -= 1

    def vectors(self) -> int:
        """How many there are now, whoever holds them."""
        found = {o.data_ptr() for o in gc.get_objects() if type(o) is Tensor and o.numel() == self._elements}
        return len(found)


def large() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 200), nn.ReLU(), nn.Linear(200, 900), nn.ReLU(), nn.Linear(900, 3)).double()


def program(model: Any, loss: Any) -> Program:
    return programs.program(
        model=model,
        loss=loss,
        optimizer=functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9),
        train=programs.data(samples=REPLICAS),
        batch_size=1,
    )


@pytest.mark.parametrize(
    ("aggregation", "states"),
    [
        # A, its combined Δ, the snapshot that all read, and the Δ being added.
        ("synchronous", 6),
        # Versions 0 to 1000 are read by one replica each.
        ("asynchronous", REPLICAS + 6),
        # K Δs make an update, whose replicas read one version: there are 20 of them in all.
        ("buffered:k=100", 2 * REPLICAS // 100 + 6),
    ],
)
def test_only_versions_that_are_to_be_read_are_held(
    monkeypatch: pytest.MonkeyPatch, aggregation: str, states: int
) -> None:
    elements = sum(p.numel() for p in large().parameters())
    counted: list[int] = []
    census = Census(monkeypatch, elements)
    calls = 0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls % 500 == 0:
            counted.append(census.vectors())
        return nn.functional.cross_entropy(output, target)

    strategy = f"replicas={REPLICAS} aggregation={aggregation}"
    times = "compute=exponential:mean=1"
    train(program(large, loss), strategy, engine="virtual", steps=2, times=times, evaluate_every=2, progress=False)
    assert elements > 180_000
    assert census.most <= states
    assert len(counted) >= 3
    # Beside the states: the optimizer's momentum, and one gradient of the largest layer.
    assert max(counted) <= states + 4


def test_gradients_computed_ahead_take_the_place_of_what_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where up to 32 are computed in one call, an attempt still holds one vector: the A to read, or then its Δ."""
    inputs, targets = programs.data(samples=REPLICAS)
    program = programs.program(train=(inputs, targets), batch_size=1)
    elements = sum(p.numel() for p in programs.mlp().parameters())
    census = Census(monkeypatch, elements)
    most, reads = 0, FlatState.clone

    def counted(state: FlatState) -> FlatState:
        nonlocal most
        most = max(most, census.vectors())
        return reads(state)

    strategy = f"replicas={REPLICAS} aggregation=asynchronous"
    monkeypatch.setattr(FlatState, "clone", lambda state: counted(state) if torch.rand(()) < 0.02 else reads(state))
    run = train(program, strategy, engine="virtual", steps=2, times="compute=exponential:mean=1", progress=False)
    assert run.summary["notes"]["gradient_batching"] == "up to 32 attempts that wait in one call"
    assert REPLICAS / 2 < most <= REPLICAS + 8

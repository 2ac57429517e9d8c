"""The layout of one shard's part of A, and which of its tensors count once."""

import functools

import pytest
import torch
from torch import nn

from paceline.replica.flat_optimizer import FlatOptimizer
from paceline.replica.flat_state import FlatLayout
from paceline.replica.optimizer_factory import optimizer_of_part
from paceline.replica.tensor.placements import PARTIAL_GRAD, OnRank, Shard, even_sizes, is_counted_on, shard_layout
from paceline.replica.tensor.placements import Placement as Lies

LIES: dict[str, Lies] = {
    "0.weight": Shard(-2, even_sizes(8, 3)),
    "0.bias": PARTIAL_GRAD,
    "1.weight": Shard(-1, even_sizes(8, 3)),
    "1.bias": OnRank(2),
}


@pytest.fixture
def whole() -> FlatLayout:
    return FlatLayout.of(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)))


def test_each_element_counts_once(whole: FlatLayout) -> None:
    """In a sum over all shards, as that of the norm of a gradient is."""
    parts = [shard_layout(whole, LIES, shard) for shard in range(3)]
    sizes = [{e.name: e.shape.numel() for b in part.parameters for e in b.entries} for part in parts]
    assert sizes[0] == {"0.weight": 18, "0.bias": 8, "1.weight": 9}
    assert sizes[2] == {"0.weight": 12, "0.bias": 8, "1.weight": 6, "1.bias": 3}
    counted = sum(
        n for shard, found in enumerate(sizes) for name, n in found.items() if is_counted_on(LIES[name], shard)
    )
    assert counted == sum(block.elements for block in whole.parameters)


def test_groups_are_those_of_whole_shapes(whole: FlatLayout) -> None:
    """Though no part of the first weight has 8 rows; and what an optimizer makes at once is of the part's shape."""

    def by_rows(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        wide = [p for p in parameters if p.shape[0] == 8]
        rest = [p for p in parameters if p.shape[0] != 8]
        return torch.optim.Adagrad([{"params": wide, "lr": 0.5}, {"params": rest, "lr": 0.0}])

    part = shard_layout(whole, LIES, 1)
    state, gradient = part.new(), part.new()
    for vector in (*state.parameters, *gradient.parameters):
        vector.fill_(1.0)
    stepper = FlatOptimizer(
        optimizer_of_part(by_rows, whole, part),
        functools.partial(torch.optim.lr_scheduler.StepLR, step_size=9),
        state,
        gradient,
    )
    stepper.step(gradient.parameters)
    moved = {name for name, value in state.named() if not torch.equal(value, torch.ones_like(value))}
    assert moved == {"0.weight", "0.bias"}

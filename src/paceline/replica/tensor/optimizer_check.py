"""Check by trial that an optimizer may step on parts of tensors: that it treats each element alone.

::

    a small A     -- 3 steps on random gradients -->   A'
                                                       equal? else it looks at whole tensors, as LARS does
    parts of it   -- 3 steps on their parts ------->   parts of A'
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.core.errors import InputError
from paceline.replica.flat_optimizer import FlatOptimizer, OptimizerFactory, optimizer_of_part
from paceline.replica.flat_state import DtypeBuffer, FlatLayout, FlatState
from paceline.replica.tensor.placements import Placement, Shard, even_sizes, shard_layout

STEPS = 3
"""Number of steps, so that the optimizer's state counts as well."""

APART = 1e-5
"""Tolerance relative to the farthest move of an element: some optimizers keep state in float32. The norm of a part
differs from that of the whole by far more."""

_OTHER_DIMS = 3
"""Length of the dims that are not sharded, in the trial."""

_SEED = 2718
"""Seed of the trial; any number would do."""


def refuse_unless_elementwise(
    make: OptimizerFactory, whole: FlatLayout, placements: Mapping[str, Placement], shards: int
) -> None:
    """Raise InputError if an optimizer does not do to parts of tensors what it does to the tensors.

    The trial is on small tensors in float64, with the names and in the groups of A's.

    Args:
        make: constructs the optimizer.
        whole: layout of A.
        placements: placements of its tensors, by name.
        shards: k.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        _Trial(make, whole, placements, shards).compare()


class _Trial:
    def __init__(
        self, make: OptimizerFactory, whole: FlatLayout, placements: Mapping[str, Placement], shards: int
    ) -> None:
        self._make, self._whole, self._shards = make, whole, shards
        # Small tensors, sharded along the same dims, into parts that are not equally long.
        uneven = even_sizes(shards + 1, shards)
        self._placements = {
            name: Shard(placement.dim, uneven) if isinstance(placement, Shard) else placement
            for name, placement in placements.items()
        }

        def small(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
            placement, sizes = self._placements.get(name), [_OTHER_DIMS] * len(shape)
            if isinstance(placement, Shard):
                sizes[placement.dim] = placement.length
            return tuple(sizes)

        blocks = whole.reshaped(small).parameters
        self._small = FlatLayout(tuple(DtypeBuffer(torch.float64, block.entries) for block in blocks), ())
        self._name = "the optimizer"
        self._values, self._gradients = self._small.new(), self._small.new()
        for vector in (*self._values.parameters, *self._gradients.parameters):
            vector.normal_()

    def compare(self) -> None:
        before, after = (
            dict(self._values.named()),
            dict(self.stepped(self._small, self._values, self._gradients).named()),
        )
        for shard in range(self._shards):
            layout = shard_layout(self._small, self._placements, shard)
            if not layout.parameters:
                continue
            parts = [self.parts(state, layout, shard) for state in (self._values, self._gradients)]
            for name, tensor in self.stepped(layout, *parts).named():
                expected = self._part(name, after[name], shard)
                farthest = float((after[name] - before[name]).abs().max())
                if not torch.allclose(tensor, expected, rtol=0.0, atol=APART * farthest, equal_nan=True):
                    raise self.error(f"looks at more of {name} than one element at a time")

    def stepped(self, layout: FlatLayout, values: FlatState, gradients: FlatState) -> FlatState:
        """Return these values after some steps."""
        state, out = values.clone(), gradients.clone()
        try:
            stepper = FlatOptimizer(optimizer_of_part(self.construct, self._whole, layout), None, state, out)
            for _ in range(STEPS):
                out.copy_(gradients)  # an optimizer may write into a gradient
                stepper.step(out.parameters)
        except InputError:
            raise
        except Exception as error:
            raise self.error(f"fails on a step: {type(error).__name__}: {error}") from error
        return state

    def construct(self, parameters: list[nn.Parameter]) -> Optimizer:
        optimizer = self._make(parameters)
        self._name = type(optimizer).__name__
        return optimizer

    def error(self, why: str) -> InputError:
        return InputError(
            f"shards={self._shards}: each shard steps on its part of a tensor, but {self._name} {why}; write shards=1, "
            "or an optimizer that treats each element alone, as torch.optim.AdamW does"
        )

    def parts(self, whole: FlatState, layout: FlatLayout, shard: int) -> FlatState:
        """Return a shard's part of a state."""
        state, tensors = layout.new(), dict(whole.named())
        for name, view in state.named():
            view.copy_(self._part(name, tensors[name], shard))
        return state

    def _part(self, name: str, tensor: Tensor, shard: int) -> Tensor:
        placement = self._placements.get(name)
        return placement.take(tensor, shard) if isinstance(placement, Shard) else tensor

"""Check by trial that an optimizer may step on parts of tensors: that it treats each element alone.

::

    a small A     -- 3 steps on random gradients -->   A'
                                                       equal? else it looks at whole tensors, as LARS does
    parts of it   -- 3 steps on their parts ------->   parts of A'
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.core.errors import InputError
from paceline.device import exclusive_generator
from paceline.replica.flat_optimizer import FlatOptimizer
from paceline.replica.flat_state import DtypeBuffer, FlatLayout, FlatState
from paceline.replica.optimizer_factory import OptimizerFactory, optimizer_of_part
from paceline.replica.tensor.placements import Placement, Shard, even_sizes, shard_layout

# Number of steps, so that the optimizer's state counts as well.
STEPS = 3

# Tolerance relative to the farthest move of an element: some optimizers keep state in float32. The norm of a part
# differs from that of the whole by far more.
APART = 1e-5

# Length of the dims that are not sharded, in the trial.
_OTHER_DIMS = 3

# Seed of the trial; any number would do.
_SEED = 2718


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
    # Small tensors, sharded along the same dims, into parts that are not equally long.
    uneven = even_sizes(shards + 1, shards)
    placements = {name: Shard(p.dim, uneven) if isinstance(p, Shard) else p for name, p in placements.items()}

    def small(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        placement, sizes = placements.get(name), [_OTHER_DIMS] * len(shape)
        if isinstance(placement, Shard):
            sizes[placement.dim] = placement.length
        return tuple(sizes)

    def part(name: str, tensor: Tensor, shard: int) -> Tensor:
        placement = placements.get(name)
        return placement.take(tensor, shard) if isinstance(placement, Shard) else tensor

    blocks = whole.reshaped(small).parameters
    layout = FlatLayout(tuple(DtypeBuffer(torch.float64, block.entries) for block in blocks), ())
    trial = _Trial(make, whole, shards)
    values, gradients = layout.new(), layout.new()
    with exclusive_generator():
        torch.manual_seed(_SEED)
        for vector in (*values.parameters, *gradients.parameters):
            vector.normal_()
        before, after = dict(values.named()), dict(trial.stepped(layout, values, gradients).named())
        for shard in range(shards):
            local = shard_layout(layout, placements, shard)
            if not local.parameters:
                continue
            parts = local.new(), local.new()
            for state, wholes in zip(parts, (before, dict(gradients.named())), strict=True):
                for name, view in state.named():
                    view.copy_(part(name, wholes[name], shard))
            for name, tensor in trial.stepped(local, *parts).named():
                expected, farthest = part(name, after[name], shard), float((after[name] - before[name]).abs().max())
                if not torch.allclose(tensor, expected, rtol=0.0, atol=APART * farthest, equal_nan=True):
                    raise trial.error(f"looks at more of {name} than one element at a time")


@dataclass
class _Trial:
    make: OptimizerFactory
    whole: FlatLayout
    shards: int
    name: str = "the optimizer"

    def stepped(self, layout: FlatLayout, values: FlatState, gradients: FlatState) -> FlatState:
        """Return these values after some steps."""
        state, out = values.clone(), gradients.clone()

        def construct(parameters: list[nn.Parameter]) -> Optimizer:
            optimizer = self.make(parameters)
            self.name = type(optimizer).__name__
            return optimizer

        try:
            flat_optimizer = FlatOptimizer(optimizer_of_part(construct, self.whole, layout), None, state, out)
            for _ in range(STEPS):
                out.copy_(gradients)  # an optimizer may write into a gradient
                flat_optimizer.step(out.parameters)
        except InputError:
            raise
        except Exception as error:
            raise self.error(f"fails on a step: {type(error).__name__}: {error}") from error
        return state

    def error(self, why: str) -> InputError:
        return InputError(
            f"shards={self.shards}: each shard steps on its part of a tensor, but {self.name} {why}; write shards=1, "
            "or an optimizer that treats each element alone, as torch.optim.AdamW does"
        )

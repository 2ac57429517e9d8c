"""Whether an optimizer may step on parts of tensors: whether it treats each element alone, which is tried.

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
from paceline.replica.tensor.placements import Placement as Lies
from paceline.replica.tensor.placements import Shard, even_sizes, shard_layout

STEPS = 3
"""So that what an optimizer remembers counts as well."""

APART = 1e-5
"""Of the farthest that an element of the tensor moves: some remember in float32. The norm of a part is another than
that of the whole by far more."""

_OTHERS = 3
"""Length of the dims that are not divided, in what is tried."""

_SEED = 2718
"""Any number would do."""


def refuse_unless_elementwise(make: OptimizerFactory, whole: FlatLayout, lies: Mapping[str, Lies], shards: int) -> None:
    """Raise InputError where an optimizer does not do to parts of tensors what it does to the tensors.

    Tried are small tensors in float64, with the names and in the groups of A's.

    Args:
        make: the optimizer.
        whole: the layout of A.
        lies: how its tensors lie among the shards.
        shards: k.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        _Trial(make, whole, lies, shards).compare()


class _Trial:
    def __init__(self, make: OptimizerFactory, whole: FlatLayout, lies: Mapping[str, Lies], shards: int) -> None:
        self._make, self._whole, self._shards = make, whole, shards
        self._lies = {name: _small(how, shards) for name, how in lies.items()}
        self._small = _doubled(whole.reshaped(lambda name, shape: _shape(len(shape), self._lies.get(name))))
        self._name = "the optimizer"
        self._values, self._gradients = (_random(self._small) for _ in range(2))

    def compare(self) -> None:
        expected = dict(self._moved(self._small, self._values, self._gradients).named())
        before = dict(self._values.named())
        for shard in range(self._shards):
            layout = shard_layout(self._small, self._lies, shard)
            if not layout.parameters:
                continue
            found = self._moved(layout, *(self._taken(s, layout, shard) for s in (self._values, self._gradients)))
            for name, tensor in found.named():
                there = self._part(name, expected[name], shard)
                farthest = float((expected[name] - before[name]).abs().max())
                if not torch.allclose(tensor, there, rtol=0.0, atol=APART * farthest, equal_nan=True):
                    raise self._refused(f"looks at more of {name} than one element at a time")

    def _moved(self, layout: FlatLayout, values: FlatState, gradients: FlatState) -> FlatState:
        """What some steps make of these values."""
        state, out = values.clone(), gradients.clone()
        try:
            stepper = FlatOptimizer(optimizer_of_part(self._named, self._whole, layout), None, state, out)
            for _ in range(STEPS):
                out.copy_(gradients)  # an optimizer may write into a gradient
                stepper.step(out.parameters)
        except InputError:
            raise
        except Exception as error:
            raise self._refused(f"fails on a step: {type(error).__name__}: {error}") from error
        return state

    def _refused(self, why: str) -> InputError:
        return InputError(
            f"shards={self._shards}: each shard steps on its part of a tensor, but {self._name} {why}; write shards=1, "
            "or an optimizer that treats each element alone, as torch.optim.AdamW does"
        )

    def _named(self, parameters: list[nn.Parameter]) -> Optimizer:
        optimizer = self._make(parameters)
        self._name = type(optimizer).__name__
        return optimizer

    def _taken(self, whole: FlatState, layout: FlatLayout, shard: int) -> FlatState:
        state, tensors = layout.new(), dict(whole.named())
        for name, view in state.named():
            view.copy_(self._part(name, tensors[name], shard))
        return state

    def _part(self, name: str, tensor: Tensor, shard: int) -> Tensor:
        how = self._lies.get(name)
        return how.take(tensor, shard) if isinstance(how, Shard) else tensor


def _small(how: Lies, shards: int) -> Lies:
    """Divided along the same dim, into parts that are not equally long."""
    return Shard(how.dim, even_sizes(shards + 1, shards)) if isinstance(how, Shard) else how


def _shape(dims: int, how: Lies | None) -> tuple[int, ...]:
    shape = [_OTHERS] * dims
    if isinstance(how, Shard):
        shape[how.dim] = how.length
    return tuple(shape)


def _doubled(layout: FlatLayout) -> FlatLayout:
    """Of the parameters alone."""
    return FlatLayout(tuple(DtypeBuffer(torch.float64, block.entries) for block in layout.parameters), ())


def _random(layout: FlatLayout) -> FlatState:
    state = layout.new()
    for vector in state.parameters:
        vector.normal_()
    return state

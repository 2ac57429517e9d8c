"""A mini-batch cut into micro-batches."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from paceline.core.errors import InputError
from paceline.program import Tree, leaves, map_tree
from paceline.replica.base import Batch

Shapes: TypeAlias = tuple[tuple[torch.Size, torch.dtype], ...]
"""Of the leaves of an input: where they are equal, all that is made of it has equal shapes."""


@dataclass(frozen=True)
class MicroBatch:
    """Some samples of a mini-batch."""

    index: int
    samples: int
    inputs: list[Tensor]
    """The leaves of the input."""
    target: Tree
    shapes: Shapes

    def moved(self, device: str, takes: Collection[int], *, target: bool) -> "MicroBatch":
        """On another device, as far as it is needed there.

        Args:
            device: as torch writes it.
            takes: which leaves of the input.
            target: whether the target.
        """

        def there(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        inputs = [there(leaf) if index in takes else leaf for index, leaf in enumerate(self.inputs)]
        return replace(self, inputs=inputs, target=map_tree(there, self.target) if target else self.target)


def sizes(samples: int, count: int) -> list[int]:
    """As torch.tensor_split has them, without empty ones.

    >>> sizes(10, 4), sizes(2, 4)
    ([3, 3, 2, 2], [1, 1])
    """
    count = min(samples, count)
    return [samples // count + (i < samples % count) for i in range(count)]


def micro_batches(batch: Batch, count: int, flat: Callable[[Tree], list[Tensor]]) -> list[MicroBatch]:
    """Cut what has a row for each sample along dim 0; what has not goes whole to each micro-batch.

    Args:
        batch: with at least one sample.
        count: how many micro-batches, where there are as many samples.
        flat: the leaves of an input, in the order in which the model takes them.

    Raises:
        InputError: no tensor of the input has as many rows as there are samples.
    """
    borders = [0, *accumulate(sizes(batch.samples, count))]
    if len(borders) > 2 and not any(_has_rows(leaf, batch.samples) for leaf in leaves(batch.input)):
        shapes = [list(leaf.shape) for leaf in leaves(batch.input)]
        raise InputError(
            f"the input has tensors of shapes {shapes}, none with {batch.samples} rows, as many as samples; a batch is "
            "cut along dim 0: write micro_batches=1, or put the samples there"
        )
    return [_rows(batch, index, start, stop, flat) for index, (start, stop) in enumerate(pairwise(borders))]


def _rows(batch: Batch, index: int, start: int, stop: int, flat: Callable[[Tree], list[Tensor]]) -> MicroBatch:
    def rows(leaf: Tensor) -> Tensor:
        return leaf[start:stop] if _has_rows(leaf, batch.samples) else leaf

    inputs = flat(map_tree(rows, batch.input))
    shapes = tuple((leaf.shape, leaf.dtype) for leaf in inputs)
    return MicroBatch(index, stop - start, inputs, map_tree(rows, batch.target), shapes)


def _has_rows(leaf: Tensor, samples: int) -> bool:
    return leaf.dim() > 0 and leaf.shape[0] == samples

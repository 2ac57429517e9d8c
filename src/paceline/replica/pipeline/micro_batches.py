"""Micro-batches: a mini-batch cut along dim 0."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from paceline.core.errors import InputError
from paceline.device import moved
from paceline.program import Tree, leaves, map_tree
from paceline.replica.base import Batch
from paceline.replica.capture.input_spec import Shapes, flatten_tree, shapes_of


@dataclass(frozen=True)
class MicroBatch:
    """Some samples of a mini-batch.

    Args:
        inputs: the leaves of the input.
        weight: factor of its mean loss in the loss that is minimised.
        seed: seed of the mini-batch, from which those of all forward passes are derived.
    """

    index: int
    samples: int
    inputs: list[Tensor]
    target: Tree
    shapes: Shapes
    weight: float = 1.0
    seed: int = 0

    def to(self, device: str, leaves: Collection[int], *, target: bool) -> "MicroBatch":
        """Return a copy on another device, of which only some leaves of the input, and maybe the target, are moved."""
        move = partial(moved, device=torch.device(device))
        inputs = [move(leaf) if index in leaves else leaf for index, leaf in enumerate(self.inputs)]
        return replace(self, inputs=inputs, target=map_tree(move, self.target) if target else self.target)


def micro_batch_sizes(samples: int, count: int) -> list[int]:
    """Return the sizes that torch.tensor_split gives, without empty ones.

    >>> micro_batch_sizes(10, 4), micro_batch_sizes(2, 4)
    ([3, 3, 2, 2], [1, 1])
    """
    count = min(samples, count)
    return [samples // count + (i < samples % count) for i in range(count)]


def micro_batches(batch: Batch, count: int, flatten: Callable[[Tree], list[Tensor]]) -> list[MicroBatch]:
    """Cut the tensors that have a row for each sample along dim 0; the others go whole to each micro-batch.

    Args:
        batch: with at least one sample.
        count: how many micro-batches, where there are as many samples.
        flatten: input -> its leaves, in the order in which the model takes them.

    Raises:
        InputError: no tensor of the input has as many rows as there are samples.
    """
    bounds = list(pairwise([0, *accumulate(micro_batch_sizes(batch.samples, count))]))

    def has_rows(leaf: Tensor) -> bool:
        return leaf.dim() > 0 and leaf.shape[0] == batch.samples

    tensors = [batch.input] if isinstance(batch.input, Tensor) else leaves(batch.input)
    if len(bounds) > 1 and not any(map(has_rows, tensors)):
        shapes = [list(leaf.shape) for leaf in tensors]
        raise InputError(
            f"the input has tensors of shapes {shapes}, none with {batch.samples} rows, as many as samples; a batch is "
            "cut along dim 0: write micro_batches=1, or put the samples there"
        )

    def part(index: int, start: int, stop: int) -> MicroBatch:
        def rows(leaf: Tensor) -> Tensor:
            return leaf[start:stop] if has_rows(leaf) else leaf

        trees = batch.input, batch.target
        own, target = (rows(tree) if isinstance(tree, Tensor) else map_tree(rows, tree) for tree in trees)
        inputs = flatten(own)
        return MicroBatch(index, stop - start, inputs, target, shapes_of(inputs))

    return [part(index, start, stop) for index, (start, stop) in enumerate(bounds)]


def select_rows(tree: Tree, samples: int, rows: slice) -> Tree:
    """Return a tree with some rows of each tensor that has one for each sample."""
    tensors: list[Tensor] = []
    rebuild = flatten_tree(tree, tensors)
    return rebuild([leaf[rows] if leaf.dim() and len(leaf) == samples else leaf for leaf in tensors])

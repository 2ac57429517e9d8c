"""What the shards of a replica have of a tensor, and of its gradient.

::

                value on a shard        gradient on a shard
    Whole       all of it               all of it
    Shared      all of it               a term of it, to be summed
    Partial     a term of it            all of it
    Split       its part                its part
    Owned       all of it, on one       all of it, on that one

A divided operator takes ``ReplicatePartialGrad`` and ``Shard``, and gives ``Shard`` and ``Partial``. From
one placement to another is a collective, forward, backward or both (:mod:`paceline.replica.tensor.redistribute`).

What one shard has of A.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias, final

from torch import Tensor, cat

from paceline.core.errors import InputError
from paceline.replica.flat_state import FlatLayout


@final
@dataclass(frozen=True, slots=True)
class Replicate:
    """Every shard has all of it, and all of its gradient: what one process has."""

    def __str__(self) -> str:
        return "whole"


@final
@dataclass(frozen=True, slots=True)
class ReplicatePartialGrad:
    """Every shard has all of it; the shards' gradients are terms of the sum that is its gradient."""

    def __str__(self) -> str:
        return "shared"


@final
@dataclass(frozen=True, slots=True)
class Partial:
    """The shards have the terms of the sum that it is; every one has all of its gradient."""

    def __str__(self) -> str:
        return "partial"


@final
@dataclass(frozen=True, slots=True)
class Shard:
    """Each shard has its part along one dim, and the gradient of that part.

    The dim is ``outer`` blocks of the same length one after the other; of each block a shard has ``sizes[shard]``
    elements, in order. So a layer that makes queries, keys and values in one product is split by heads with 3 blocks::

        outer = 3           | q q q q | k k k k | v v v v |
        sizes = (2, 2)        0 0 1 1   0 0 1 1   0 0 1 1

    >>> Shard(-1, (2, 2), blocks=3).local((5, 12), shard=0)
    (5, 6)
    """

    dim: int
    """Counted from the last, so that it stays the same where a tensor is broadcast: -1, -2, ..."""
    sizes: tuple[int, ...]
    """Elements of each block, by shard."""
    blocks: int = 1
    """Of the batch that was planned with: where blocks are samples, another batch has as many as it has samples."""

    def __str__(self) -> str:
        blocks = f"{self.blocks} × " if self.blocks > 1 else ""
        return f"dim {self.dim} in {blocks}{'+'.join(map(str, self.sizes))}"

    @property
    def block_size(self) -> int:
        """Elements of a block."""
        return sum(self.sizes)

    @property
    def length(self) -> int:
        """Of the whole dim."""
        return self.blocks * self.block_size

    @property
    def share(self) -> float:
        """Of the whole, what the shard has that has most."""
        return max(self.sizes) / self.block_size

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each shard's part of a block begins."""
        return (0, *accumulate(self.sizes[:-1]))

    def local_shape(self, shape: Sequence[int], shard: int) -> tuple[int, ...]:
        """The shape of a shard's part of a tensor of this shape, which may have other blocks than was planned with."""
        made = list(shape)
        made[self.dim] = shape[self.dim] // self.block_size * self.sizes[shard]
        return tuple(made)

    def at(self, dim: int) -> "Shard":
        """The same along another dim."""
        return Shard(dim, self.sizes, self.blocks)

    def take(self, tensor: Tensor, shard: int) -> Tensor:
        """A shard's part of a whole tensor: a view where there is one block.

        >>> import torch
        >>> Shard(0, (2, 2), blocks=3).take(torch.arange(12), shard=1)
        tensor([ 2,  3,  6,  7, 10, 11])
        """
        dim = self.dim % tensor.dim()
        if self.blocks == 1:
            if tensor.shape[dim] != self.block_size:
                raise InputError(
                    f"a tensor of {tuple(tensor.shape)} can't be divided by {self}, which is for {self.block_size} "
                    "elements; give batches of the same size as the first, or leave its module whole in shard_rules"
                )
            return tensor.narrow(dim, self.offsets[shard], self.sizes[shard])
        blocks = _blocks(tensor, dim, self.block_size)
        return blocks.narrow(dim + 1, self.offsets[shard], self.sizes[shard]).flatten(dim, dim + 1)

    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole tensor, of all shards' parts in order.

        >>> import torch
        >>> split, whole = Shard(0, (1, 2), blocks=2), torch.arange(6)
        >>> torch.equal(split.concat([split.take(whole, shard) for shard in (0, 1)]), whole)
        True
        """
        dim = self.dim % parts[0].dim()
        if self.blocks == 1:
            return cat(list(parts), dim)
        blocks = [_blocks(part, dim, size) for part, size in zip(parts, self.sizes, strict=True)]
        return cat(blocks, dim + 1).flatten(dim, dim + 1)


def _blocks(tensor: Tensor, dim: int, block: int) -> Tensor:
    """Its dim as two: blocks, and what is in one."""
    shape = tensor.shape
    return tensor.reshape(*shape[:dim], shape[dim] // block, block, *shape[dim + 1 :])


@final
@dataclass(frozen=True, slots=True)
class OnRank:
    """One shard has it, and its gradient; the others have an empty tensor in its place."""

    shard: int

    def __str__(self) -> str:
        return f"on shard {self.shard}"


Placement: TypeAlias = Replicate | ReplicatePartialGrad | Partial | Shard | OnRank

REPLICATE, PARTIAL_GRAD, PARTIAL = Replicate(), ReplicatePartialGrad(), Partial()


def memory_order(tensor: Tensor) -> list[int]:
    """Its dims as they lie in memory, the one whose elements are furthest apart first.

    >>> import torch
    >>> order(torch.empty(2, 3, 4).transpose(0, 1))
    [1, 0, 2]
    """
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda dim: -strides[dim])


def even_sizes(units: int, shards: int) -> tuple[int, ...]:
    """So many units among the shards, as evenly as can be: the first have one more.

    >>> shares(10, 4)
    (3, 3, 2, 2)
    """
    return tuple(units // shards + (shard < units % shards) for shard in range(shards))


def shard_layout(whole: FlatLayout, lies: Mapping[str, Placement], shard: int) -> FlatLayout:
    """The layout of a shard's part of A.

    Args:
        whole: of A.
        lies: how tensors lie among the shards, by name; every shard has those that are not named.
        shard: whose part it is.
    """

    def shape(name: str, size: tuple[int, ...]) -> tuple[int, ...] | None:
        how = lies.get(name)
        if isinstance(how, Shard):
            return how.local_shape(size, shard)
        return None if isinstance(how, OnRank) and how.shard != shard else size

    return whole.reshaped(shape)


def is_counted_on(how: Placement | None, shard: int) -> bool:
    """Whether what a shard has of a tensor counts in a sum over all of A: what every shard has counts once."""
    return shard == 0 or isinstance(how, Shard | OnRank)

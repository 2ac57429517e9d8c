"""Placements of a tensor and of its gradient on the shards of a replica, as DTensor has them.

::

                            value on a shard        gradient on a shard
    Replicate               all of it               all of it
    ReplicatePartialGrad    all of it               a term of it, to be summed
    Partial                 a term of it            all of it
    Shard                   its part                its part
    OnRank                  all of it, on one       all of it, on that one

A sharded operator takes ``ReplicatePartialGrad`` and ``Shard``, and gives ``Shard`` and ``Partial``. From
one placement to another is a collective, forward, backward or both (:mod:`paceline.replica.tensor.redistribute`).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import ClassVar, TypeAlias, final

from torch import Tensor, cat

from paceline.core.errors import InputError
from paceline.replica.flat_state import FlatLayout


class _Named:
    """A placement without fields, which prints as its name."""

    __slots__ = ()
    name: ClassVar[str]

    def __str__(self) -> str:
        return self.name


@final
@dataclass(frozen=True, slots=True)
class Replicate(_Named):
    """Every shard has all of the tensor and all of its gradient, as one process has."""

    name: ClassVar[str] = "whole"


@final
@dataclass(frozen=True, slots=True)
class ReplicatePartialGrad(_Named):
    """Every shard has all of the tensor; the shards' gradients are terms of the sum that is its gradient."""

    name: ClassVar[str] = "shared"


@final
@dataclass(frozen=True, slots=True)
class Partial(_Named):
    """Each shard has a term of the sum that is the tensor, and all of its gradient."""

    name: ClassVar[str] = "partial"


@final
@dataclass(frozen=True, slots=True)
class OnRank:
    """One shard has the tensor and its gradient; the others have an empty tensor in its place."""

    shard: int

    def __str__(self) -> str:
        return f"on shard {self.shard}"


@final
@dataclass(frozen=True, slots=True)
class Shard:
    """Each shard has its part along one dim, and the gradient of that part.

    The dim is ``blocks`` blocks of the same length one after the other; of each block a shard has ``sizes[shard]``
    elements, in order. So a layer that makes queries, keys and values in one product is split by heads with 3 blocks::

        blocks = 3          | q q q q | k k k k | v v v v |
        sizes = (2, 2)        0 0 1 1   0 0 1 1   0 0 1 1

    >>> Shard(-1, (2, 2), blocks=3).local_shape((5, 12), shard=0)
    (5, 6)
    """

    dim: int
    """Dim, counted from the last, so that it stays the same where a tensor is broadcast: -1, -2, ..."""
    sizes: tuple[int, ...]
    """Elements of each block, by shard."""
    blocks: int = 1
    """Blocks in the batch that was planned with: where blocks are samples, another batch has as many as samples."""
    # Computed once: forward passes read them, and a plan that is made does not change.
    block_size: int = field(init=False, repr=False, compare=False)
    """Elements of a block."""
    offsets: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """First element of each shard's part of a block."""

    def __post_init__(self) -> None:
        # The dataclass is frozen, so that its fields are set past it.
        object.__setattr__(self, "block_size", sum(self.sizes))
        object.__setattr__(self, "offsets", (0, *accumulate(self.sizes[:-1])))

    def __str__(self) -> str:
        blocks = f"{self.blocks} × " if self.blocks > 1 else ""
        return f"dim {self.dim} in {blocks}{'+'.join(map(str, self.sizes))}"

    @property
    def length(self) -> int:
        """Elements of the whole dim."""
        return self.blocks * self.block_size

    @property
    def share(self) -> float:
        """Share of the dim that the largest part is."""
        return max(self.sizes) / self.block_size

    def local_shape(self, shape: Sequence[int], shard: int) -> tuple[int, ...]:
        """Return the shape of a shard's part of a tensor, which may have other blocks than was planned with."""
        local = list(shape)
        local[self.dim] = shape[self.dim] // self.block_size * self.sizes[shard]
        return tuple(local)

    def at(self, dim: int) -> "Shard":
        """Return the same parts along another dim."""
        return Shard(dim, self.sizes, self.blocks)

    def without(self, removed: Collection[int], dims: int) -> "Shard":
        """Return the same parts of a tensor of ``dims`` dims from which other dims are removed.

        >>> Shard(-1, (2, 2)).without({1}, 3), Shard(-3, (2, 2)).without({1}, 3)
        (Shard(dim=-1, sizes=(2, 2), blocks=1), Shard(dim=-2, sizes=(2, 2), blocks=1))
        """
        return self.at(self.dim + sum(each > self.dim % dims for each in removed))

    def take(self, tensor: Tensor, shard: int) -> Tensor:
        """Return a shard's part of a whole tensor: a view where there is one block.

        >>> import torch
        >>> Shard(0, (2, 2), blocks=3).take(torch.arange(12), shard=1)
        tensor([ 2,  3,  6,  7, 10, 11])
        """
        dim, shape = self.dim % tensor.dim(), tensor.shape
        if self.blocks > 1:
            blocks = tensor.reshape(*shape[:dim], shape[dim] // self.block_size, self.block_size, *shape[dim + 1 :])
            return blocks.narrow(dim + 1, self.offsets[shard], self.sizes[shard]).flatten(dim, dim + 1)
        if shape[dim] != self.block_size:
            raise InputError(
                f"a tensor of {tuple(shape)} can't be divided by {self}, which is for {self.block_size} "
                "elements; give batches of the same size as the first, or leave its module whole in shard_rules"
            )
        return tensor.narrow(dim, self.offsets[shard], self.sizes[shard])

    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole tensor, of all shards' parts in order.

        >>> import torch
        >>> split, whole = Shard(0, (1, 2), blocks=2), torch.arange(6)
        >>> torch.equal(split.concat([split.take(whole, shard) for shard in (0, 1)]), whole)
        True
        """
        dim = self.dim % parts[0].dim()
        if self.blocks == 1:
            return cat(list(parts), dim)
        # A block is the parts of all shards one after the other: they are joined within each block.
        blocks = [
            part.reshape(*part.shape[:dim], part.shape[dim] // size, size, *part.shape[dim + 1 :])
            for part, size in zip(parts, self.sizes, strict=True)
        ]
        return cat(blocks, dim + 1).flatten(dim, dim + 1)


Placement: TypeAlias = Replicate | ReplicatePartialGrad | Partial | Shard | OnRank

REPLICATE, PARTIAL_GRAD, PARTIAL = Replicate(), ReplicatePartialGrad(), Partial()


def memory_order(tensor: Tensor) -> list[int]:
    """Return the dims of a tensor as memory has them, the one with the largest stride first.

    >>> import torch
    >>> memory_order(torch.empty(2, 3, 4).transpose(0, 1))
    [1, 0, 2]
    """
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda dim: -strides[dim])


def even_sizes(units: int, shards: int) -> tuple[int, ...]:
    """Divide units among shards as evenly as possible: the first shards have one more.

    >>> even_sizes(10, 4)
    (3, 3, 2, 2)
    """
    return tuple(units // shards + (shard < units % shards) for shard in range(shards))


def shard_layout(whole: FlatLayout, placements: Mapping[str, Placement], shard: int) -> FlatLayout:
    """Return the layout of one shard's part of A.

    Args:
        whole: layout of A.
        placements: placement of each tensor, by name; tensors that are not named are replicated.
        shard: rank whose part it is.
    """

    def local_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        placement = placements.get(name)
        if isinstance(placement, Shard):
            return placement.local_shape(shape, shard)
        return None if isinstance(placement, OnRank) and placement.shard != shard else shape

    return whole.reshaped(local_shape)


def is_counted_on(placement: Placement | None, shard: int) -> bool:
    """Return whether a shard's tensor counts in a sum over all of A: a replicated one counts once, on shard 0."""
    return shard == 0 or isinstance(placement, Shard | OnRank)

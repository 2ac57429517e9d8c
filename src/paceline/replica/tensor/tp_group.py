"""Collectives of the shards of a replica: the contract that engines fulfil, and the sum of partial gradients."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import final

import torch
from torch import Tensor, nn

from paceline.core.types import Clock
from paceline.replica.flat_state import FlatLayout


class TPCollectives(ABC):
    """The tensor-parallel group of one replica and stage, as one of its shards sees it.

    All shards call the same methods in the same order. An argument stays as it is; a result is the caller's own.

    Args:
        rank: rank of this shard.
        count: k, number of shards.
    """

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count
        self.step: Clock = 0
        """Step that is under way, for error messages and spans; 0: training has not begun."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, what: str, *, largest: bool = False) -> Tensor:
        """Return the sum over all shards, or the maximum, element by element.

        Args:
            tensor: of the same shape on all shards.
            what: description of the tensor, in words that follow "waited for".
            largest: compute the maximum.
        """

    @abstractmethod
    def all_gather(self, part: Tensor, shapes: Sequence[Sequence[int]], what: str) -> list[Tensor]:
        """Return each shard's part; ``shapes`` are the shapes of the parts, by shard."""

    @abstractmethod
    def reduce_scatter(self, parts: Sequence[Tensor], what: str) -> Tensor:
        """Return the sum over all shards of the part for this one; ``parts`` has one part for each shard."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, owner: int, what: str) -> Tensor:
        """Return the owner's tensor; the other shards pass a tensor of that shape, whose elements are not read."""

    @abstractmethod
    def reduce(self, tensor: Tensor, owner: int, what: str) -> Tensor:
        """Return the sum over all shards on the owner, and a tensor of no meaning on the others."""


@final
class SingleRankTP(TPCollectives):
    """Group of one shard."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def all_reduce(self, tensor: Tensor, what: str, *, largest: bool = False) -> Tensor:
        del what, largest
        return tensor.clone()

    def all_gather(self, part: Tensor, shapes: Sequence[Sequence[int]], what: str) -> list[Tensor]:
        del shapes, what
        return [part.clone()]

    def reduce_scatter(self, parts: Sequence[Tensor], what: str) -> Tensor:
        del what
        return parts[0].clone()

    def broadcast(self, tensor: Tensor, owner: int, what: str) -> Tensor:
        del owner, what
        return tensor.clone()

    def reduce(self, tensor: Tensor, owner: int, what: str) -> Tensor:
        del owner, what
        return tensor.clone()


class CollectiveModule(nn.Module):
    """Module of a shard's graph that communicates; it has no parameters.

    Args:
        shards: the group.
        name: name of the tensor or operator, for messages of ranks that wait.
    """

    def __init__(self, shards: TPCollectives, name: str) -> None:
        super().__init__()
        self.shards, self.name = shards, name

    def extra_repr(self) -> str:
        return self.name


class PartialGrads:
    """Sum of the gradients of replicated parameters that each shard uses for its part of the work.

    Args:
        shards: the group; each shard has a term of each gradient.
        layout: layout of this shard's tensors.
        names: names of the parameters.
    """

    def __init__(self, shards: TPCollectives, layout: FlatLayout, names: Collection[str]) -> None:
        self._shards = shards
        self._indices = [index for index, name in enumerate(layout.parameter_names) if name in names]

    def all_reduce_(self, gradients: list[Tensor]) -> None:
        """Replace those gradients by their sums, in one all-reduce; all shards call it together.

        Args:
            gradients: gradients of all parameters, in the layout's order.
        """
        if not self._indices:
            return
        # One message for all of them: most are vectors of biases and norms, for which latency would count.
        terms = [gradients[index] for index in self._indices]
        total = self._shards.all_reduce(torch.cat([term.reshape(-1) for term in terms]), "gradients that all share")
        sums = torch.split(total, [term.numel() for term in terms])
        for index, vector in zip(self._indices, sums, strict=True):
            gradients[index] = vector.view_as(gradients[index])

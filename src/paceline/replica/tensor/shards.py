"""What the shards of a replica do together: the contract that engines fulfil."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import final

from torch import Tensor

from paceline.core.types import Clock


class Shards(ABC):
    """The shards of one replica and stage, as one of them sees them.

    All of them call the same in the same order. What is given stays as it is; what is returned is the caller's own.

    Args:
        rank: which shard this is.
        count: k, of how many.
    """

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count
        self.step: Clock = 0
        """Which one is under way, for those who wait and for spans; 0: training has not begun."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, what: str, *, largest: bool = False) -> Tensor:
        """The sum over all shards, or the largest of each element.

        Args:
            tensor: of the same shape on all shards.
            what: in words that follow "waited for".
            largest: rather than the sum.
        """

    @abstractmethod
    def all_gather(self, part: Tensor, shapes: Sequence[Sequence[int]], what: str) -> list[Tensor]:
        """What each shard gives, whose shape by shard is known."""

    @abstractmethod
    def reduce_scatter(self, parts: Sequence[Tensor], what: str) -> Tensor:
        """Of what each shard gives for this one, the sum."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, owner: int, what: str) -> Tensor:
        """What one shard gives; the others give a tensor of that shape, whose numbers are not looked at."""

    @abstractmethod
    def reduce(self, tensor: Tensor, owner: int, what: str) -> Tensor:
        """On one shard the sum over all of them; on the others, nothing that means anything."""


@final
class Alone(Shards):
    """One shard, which is all."""

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

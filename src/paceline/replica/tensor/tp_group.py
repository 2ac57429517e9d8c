"""What the shards of a replica do together: the contract that engines fulfil.

Gradients of which each shard has a term: of parameters that all have and each uses for its part of the work.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import final

import torch
from torch import Tensor

from paceline.core.types import Clock
from paceline.replica.flat_state import FlatLayout


class TPCollectives(ABC):
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
class SingleRankTP(TPCollectives):
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


class PartialGrads:
    """Those of one shard.

    Args:
        shards: who have a term each.
        layout: of this shard's tensors.
        names: of the parameters.
    """

    def __init__(self, shards: TPCollectives, layout: FlatLayout, names: Collection[str]) -> None:
        self._shards = shards
        self._places = [place for place, name in enumerate(layout.parameter_names) if name in names]

    def all_reduce_(self, gradients: list[Tensor]) -> None:
        """Let those gradients be the sums over all shards; all of them call it together.

        Args:
            gradients: of all parameters, in the layout's order.
        """
        if not self._places:
            return
        terms = [gradients[place] for place in self._places]
        total = self._shards.all_reduce(torch.cat([term.reshape(-1) for term in terms]), "gradients that all share")
        for place, found in zip(self._places, torch.split(total, [term.numel() for term in terms]), strict=True):
            gradients[place] = found.view_as(gradients[place])

"""How one vector of A, and of Δ, is divided among the ranks."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from itertools import pairwise
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from paceline.core.pieces import Equal, at_borders
from paceline.engine.team.traffic import Traffic
from paceline.replica.state import Block, Entry


class Piece(NamedTuple):
    """What a rank steps on."""

    block: Block
    start: int
    """Where in the vector it begins."""
    here: Tensor
    """Of A."""
    delta: Tensor
    """Σ Δ."""

    def of(self, block: Block, names: Collection[str]) -> Iterator[Tensor]:
        """What of Σ Δ here belongs to these parameters.

        Args:
            block: says what lies in the whole vector.
            names: of some of its parameters.
        """
        for entry in block.entries:
            start, stop = max(0, entry.start - self.start), min(len(self.delta), entry.stop - self.start)
            if start < stop and entry.name in names:
                yield self.delta[start:stop]


class Part(ABC):
    """One rank's part of one vector.

    Args:
        own: what this rank alone steps on.
        shared: what every rank steps on: of its Δ the sum is made where ranks meet.
    """

    def __init__(self, own: Piece, shared: Piece | None = None) -> None:
        self.own, self.shared = own, shared

    @abstractmethod
    def begin_sum(self, traffic: Traffic) -> Any:
        """Begin to sum Δ: each rank is to have the sum of its own piece. To be waited for."""

    @abstractmethod
    def begin_gathering(self, traffic: Traffic) -> Any:
        """Begin to tell all ranks this one's new piece of A. To be waited for, and then :meth:`take`."""

    @abstractmethod
    def take(self) -> None:
        """Put together what has been gathered."""


@final
class Even(Part):
    """Equal parts that lie where they are; what is left over, fewer elements than ranks, all step on.

    ::

        rank 0: . . . | rank 1: . . . | rank 2: . . . | all: . .

    Args:
        block: says what lies in the vectors.
        a: of A.
        delta: of Δ.
        rank: of this process.
        ranks: how many there are.
    """

    def __init__(self, block: Block, a: Tensor, delta: Tensor, rank: int, ranks: int) -> None:
        each, _ = Equal.of(block.elements, ranks)
        body = each * ranks
        self._a, self._delta = a[:body].view(ranks, each), delta[:body].view(ranks, each)
        self._sum = torch.zeros_like(self._a[rank])
        left = _flat(block.dtype, body, block.elements)
        super().__init__(
            Piece(_flat(block.dtype, rank * each, (rank + 1) * each), rank * each, self._a[rank], self._sum),
            Piece(left, body, a[body:], delta[body:]) if left.elements else None,
        )

    def begin_sum(self, traffic: Traffic) -> Any:
        return traffic.reduce_scatter(self._delta, self._sum)

    def begin_gathering(self, traffic: Traffic) -> Any:
        self._sum.copy_(self.own.here)  # it may not be sent from where it is received
        return traffic.all_gather(self._a, self._sum)

    def take(self) -> None:
        """All lies in its place."""


@final
class AtBorders(Part):
    """Whole parameters; the parts are as unequal as these are, and travel in rows as long as the longest.

    Args:
        block: says what lies in the vectors.
        a: of A.
        delta: of Δ.
        rank: of this process.
        ranks: how many there are.
    """

    def __init__(self, block: Block, a: Tensor, delta: Tensor, rank: int, ranks: int) -> None:
        cut = at_borders([entry.stop - entry.start for entry in block.entries], ranks)
        self._a, self._delta = ([whole[start:stop] for start, stop in pairwise(cut)] for whole in (a, delta))  # by rank
        longest = max(map(len, self._a))
        self._rows = torch.zeros(ranks, longest, dtype=block.dtype)
        self._row = torch.zeros(longest, dtype=block.dtype)
        here = self._a[rank]
        super().__init__(Piece(_inside(block, cut[rank], cut[rank + 1]), cut[rank], here, self._row[: len(here)]))

    def begin_sum(self, traffic: Traffic) -> Any:
        for row, part in zip(self._rows, self._delta, strict=True):
            row[: len(part)] = part
        return traffic.reduce_scatter(self._rows, self._row)

    def begin_gathering(self, traffic: Traffic) -> Any:
        self.own.delta.copy_(self.own.here)
        return traffic.all_gather(self._rows, self._row)

    def take(self) -> None:
        for row, part in zip(self._rows, self._a, strict=True):
            part.copy_(row[: len(part)])


def _flat(dtype: torch.dtype, start: int, stop: int) -> Block:
    """Elements of which nobody asks to what parameter they belong."""
    entry = Entry(f"{start}:{stop}", torch.Size([stop - start]), 0, stop - start)
    return Block(dtype, (entry,) if stop > start else ())


def _inside(block: Block, start: int, stop: int) -> Block:
    """The parameters between two borders."""
    inside = [entry for entry in block.entries if start <= entry.start and entry.stop <= stop]
    return Block(block.dtype, tuple(Entry(e.name, e.shape, e.start - start, e.stop - start) for e in inside))

"""The partition of a part of A among ranks that each step on a slice of it, as one rank sees it."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.comm.shared_memory import ALIGNMENT
from paceline.comm.shm.collectives import Taken
from paceline.core.partitioning import cut_at_borders
from paceline.engine.spmd.communicator import Communicator
from paceline.replica.flat_state import DtypeBuffer, TensorEntry


class ZeroSlice(NamedTuple):
    """A slice of one vector of A that a rank steps on.

    Args:
        start: offset in the vector.
        state: the slice of A.
        delta: the slice of Σ Δ.
    """

    block: DtypeBuffer
    start: int
    state: Tensor
    delta: Tensor

    def of(self, block: DtypeBuffer, names: Collection[str]) -> Iterator[Tensor]:
        """Yield the elements of Σ Δ in this slice that belong to these parameters of the vector.

        Args:
            block: layout of the whole vector.
            names: of some of its parameters.
        """
        for entry in block.entries:
            start, stop = max(0, entry.start - self.start), min(len(self.delta), entry.stop - self.start)
            if start < stop and entry.name in names:
                yield self.delta[start:stop]


@dataclass(frozen=True)
class ZeroPartition:
    """The partition of one vector among ranks, as one rank sees it: its slice, and the rows that collectives move.

    Build it by :meth:`even` or :meth:`by_parameters`.

    Args:
        own: the slice that this rank alone steps on; its Δ is the front of ``_row``.
        _delta_rows: a row of Δ for each rank.
        _state_rows: a row of A for each rank.
        _row: this rank's, apart from the others: a collective's input and output must not overlap.
        common: the slice that every rank steps on; its Δ is summed in the exchange. None: there is none.
        _unequal: slices of A and of Δ of each rank, to be copied from and to the rows; None: rows are in place.
    """

    own: ZeroSlice
    _delta_rows: Tensor
    _state_rows: Tensor
    _row: Tensor
    common: ZeroSlice | None = None
    _unequal: tuple[list[Tensor], list[Tensor]] | None = None

    @classmethod
    def even(cls, block: DtypeBuffer, a: Tensor, delta: Tensor, rank: int, ranks: int) -> "ZeroPartition":
        """Cut a vector into equal slices in place; all ranks step on the rest, fewer elements than there are ranks.

        ::

            rank 0: . . . | rank 1: . . . | rank 2: . . . | all: . .

        Args:
            block: layout of the vector.
            a: the vector of A.
            delta: the vector of Δ.
            rank: of this process in its group.
            ranks: of the group.
        """
        each = block.elements // ranks
        body = each * ranks
        states, deltas = a[:body].view(ranks, each), delta[:body].view(ranks, each)
        row = torch.zeros_like(states[rank])
        own = ZeroSlice(_elements(block.dtype, rank * each, each), rank * each, states[rank], row)
        rest = ZeroSlice(_elements(block.dtype, body, block.elements - body), body, a[body:], delta[body:])
        return cls(own, deltas, states, row, rest if rest.block.elements else None)

    @classmethod
    def by_parameters(cls, block: DtypeBuffer, a: Tensor, delta: Tensor, rank: int, ranks: int) -> "ZeroPartition":
        """Cut a vector into slices of whole parameters: unequal, so they are sent in rows as long as the longest.

        Args:
            block: layout of the vector.
            a: the vector of A.
            delta: the vector of Δ.
            rank: of this process in its group.
            ranks: of the group.
        """
        cut = cut_at_borders([entry.stop - entry.start for entry in block.entries], ranks)
        states, deltas = ([whole[start:stop] for start, stop in pairwise(cut)] for whole in (a, delta))  # by rank
        longest = max(map(len, states))
        rows, row = a.new_zeros(ranks, longest), a.new_zeros(longest)
        start, stop = cut[rank], cut[rank + 1]
        own = ZeroSlice(_parameters(block, start, stop), start, states[rank], row[: stop - start])
        return cls(own, rows, rows, row, _unequal=(states, deltas))

    def begin_reduce_scatter(self, communicator: Communicator) -> Any:
        """Begin to sum Δ, each rank's slice on that rank; returns the work to wait for."""
        for row, part in zip(self._delta_rows, self._unequal[1], strict=True) if self._unequal else ():
            row[: len(part)] = part
        return communicator.reduce_scatter(self._delta_rows, self._row)

    def begin_all_gather(self, communicator: Communicator) -> Any:
        """Begin to gather all slices of the new A; returns the work to wait for before :meth:`unpack`."""
        self.own.delta.copy_(self.own.state)
        return communicator.all_gather(self._state_rows, self._row)

    def unpack(self) -> None:
        """Write the gathered slices into A, unless they were gathered in place."""
        for row, part in zip(self._state_rows, self._unequal[0], strict=True) if self._unequal else ():
            part.copy_(row[: len(part)])


@dataclass(frozen=True)
class SharedPartition:
    """The partition of neighbouring parameters among ranks that share the memory of A, as one rank sees it.

    Build it by :meth:`of`.

    Args:
        own: the slice that this rank alone steps on; its Δ is its place in the vector of Δ.
        _cut: where each rank's slice begins, and where the last one ends.
        _delta: the part of the vector of Δ.
    """

    own: ZeroSlice
    _cut: Sequence[int]
    _delta: Tensor

    @classmethod
    def of(
        cls, block: DtypeBuffer, a: Tensor, delta: Tensor, part: slice, rank: int, ranks: int, *, anywhere: bool
    ) -> "SharedPartition":
        """Cut a part of a vector into one slice for each rank, some of which may be empty.

        Args:
            block: layout of the vector.
            a: the vector of A.
            delta: the vector of Δ.
            part: of the vectors: whole parameters.
            rank: of this process in its group.
            ranks: of the group.
            anywhere: whether parameters may be cut.
        """
        if anywhere:  # no two ranks write into one cache line
            elements, line = part.stop - part.start, ALIGNMENT // block.dtype.itemsize
            each = -(-elements // (ranks * line)) * line
            cut = [min(elements, each * number) for number in range(ranks + 1)]
        else:
            inside = _inside(block, part.start, part.stop)
            cut = list(cut_at_borders([entry.stop - entry.start for entry in inside], ranks))
        start, stop = part.start + cut[rank], part.start + cut[rank + 1]
        laid_out = _elements(block.dtype, start, stop - start) if anywhere else _parameters(block, start, stop)
        own = ZeroSlice(laid_out, start, a[start:stop], delta[start:stop])
        return cls(own, cut, delta[part])

    def begin_reduce_scatter(
        self, communicator: Communicator, given: Tensor | None = None, taken: Taken | None = None
    ) -> Any:
        """Begin to sum Δ, each rank's slice on that rank; returns the work to wait for.

        Args:
            communicator: of the ranks.
            given: this rank's contribution; None: it is in the vector of Δ.
            taken: takes the sum of this rank's slice, piece by piece; None: the vector of Δ receives it.
        """
        whole, own = self._delta if given is None else given, self.own.delta if taken is None else taken
        return communicator.reduce_scatter_parts([whole[a:b] for a, b in pairwise(self._cut)], own)


def _inside(block: DtypeBuffer, start: int, stop: int) -> list[TensorEntry]:
    return [entry for entry in block.entries if start <= entry.start and entry.stop <= stop]


def _parameters(block: DtypeBuffer, start: int, stop: int) -> DtypeBuffer:
    """Lay out the whole parameters between two offsets of a vector."""
    entries = (TensorEntry(e.name, e.shape, e.start - start, e.stop - start) for e in _inside(block, start, stop))
    return DtypeBuffer(block.dtype, tuple(entries))


def _elements(dtype: torch.dtype, start: int, count: int) -> DtypeBuffer:
    """Lay elements out as one tensor, whatever parameters they belong to."""
    entry = TensorEntry(f"{start}:{start + count}", torch.Size([count]), 0, count)
    return DtypeBuffer(dtype, (entry,) if count else ())

"""ZeRO-1: the optimizer's state is partitioned among the ranks that have the same part of A (arXiv 1910.02054).

::

    Δ of all of them --- reduce-scatter ---> Σ Δ of my slice -- step on my slice of A --+
                                                                                         |
    their whole new part of A <------------------------ all-gather ---------------------+

Where an optimizer treats each element alone, the part is cut anywhere; one that looks at whole parameters gets whole
ones. With replicas of one worker the part is A; with replicas of stages and shards each worker has another part, and
its peers in the other replicas the same.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from paceline.core.partitioning import cut_at_borders
from paceline.core.types import Version
from paceline.engine.distributed.reduce_buffer import ReduceBuffer
from paceline.engine.distributed.update import ShardState, Update, clip_across_ranks
from paceline.engine.spmd.communicator import Communicator
from paceline.engine.spmd.rank_context import SubGroup
from paceline.program import Program
from paceline.replica.flat_optimizer import FlatOptimizer
from paceline.replica.flat_state import DtypeBuffer, FlatLayout, FlatState, TensorEntry
from paceline.replica.optimizer_factory import (
    build_optimizer,
    is_elementwise,
    optimizer_of_part,
    optimizer_of_vectors,
    shape_only_parameters,
)


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
        shared: the slice that every rank steps on; its Δ is summed in the exchange. None: there is none.
        _unequal: slices of A and of Δ of each rank, to be copied from and to the rows; None: rows are in place.
    """

    own: ZeroSlice
    _delta_rows: Tensor
    _state_rows: Tensor
    _row: Tensor
    shared: ZeroSlice | None = None
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
        inside = [entry for entry in block.entries if start <= entry.start and entry.stop <= stop]
        entries = (TensorEntry(e.name, e.shape, e.start - start, e.stop - start) for e in inside)
        own = ZeroSlice(DtypeBuffer(block.dtype, tuple(entries)), start, states[rank], row[: stop - start])
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


def _elements(dtype: torch.dtype, start: int, count: int) -> DtypeBuffer:
    """Lay elements out as one tensor, whatever parameters they belong to."""
    entry = TensorEntry(f"{start}:{start + count}", torch.Size([count]), 0, count)
    return DtypeBuffer(dtype, (entry,) if count else ())


# Measured bounds from which on it pays.
LEAST_RANKS, LEAST_ELEMENTS = 4, 1_000_000


def pays(program: Program, layout: FlatLayout, backend: str, ranks: int) -> bool:
    """Return whether ZeRO-1 should make a step faster than the whole optimizer on each rank.

    With 4 ranks on shared memory and a million elements or more it took 0.85 to 0.92 of the time under Adam and under
    SGD with momentum; with 2 ranks 1.01 to 1.12 of it, and over Gloo 1.3 and more (benchmarks/data_parallel). Plain SGD
    keeps no state, so there is nothing to partition.
    """
    elements = sum(block.elements for block in layout.parameters)
    if backend != "shm" or ranks < LEAST_RANKS or elements < LEAST_ELEMENTS:
        return False
    parameters = list(shape_only_parameters(layout).values())
    optimizer = build_optimizer(program.optimizer, parameters)
    stateful = not isinstance(optimizer, torch.optim.SGD) or bool(optimizer.param_groups[0]["momentum"])
    return stateful and is_elementwise(optimizer, len(parameters))


@final
class ZeroOptimizer(Update):
    """Each rank steps on its slice of its part of A, and keeps the optimizer's state of that slice alone.

    Args:
        program: gives optimizer, scheduler and clipping.
        buffer: holds this rank's Δ.
        shard: this rank's part of A.
        group: the ranks that have the same part.
        communicator: of all ranks; sums the norm of the whole Δ.
    """

    def __init__(
        self, program: Program, buffer: ReduceBuffer, shard: ShardState, group: SubGroup, communicator: Communicator
    ) -> None:
        self._buffer, self._state, self._group, self._all = buffer, shard.state, group.communicator, communicator
        self._clip_norm = program.clip_norm
        layout, full = shard.state.layout, shard.full_layout
        parameters = list(shape_only_parameters(full).values())
        anywhere = is_elementwise(build_optimizer(program.optimizer, parameters), len(parameters))
        vectors = list(zip(layout.parameters, shard.state.parameters, buffer.state.parameters, strict=True))
        self._partitions: list[ZeroPartition] = []
        if self._group is None:  # no other rank has this part
            own, shared = [ZeroSlice(block, 0, a, delta) for block, a, delta in vectors], []
        else:
            build, ranks = ZeroPartition.even if anywhere else ZeroPartition.by_parameters, self._group.ranks
            self._partitions = [build(block, a, delta, group.rank, ranks) for block, a, delta in vectors]
            own = [partition.own for partition in self._partitions if partition.own.block.elements]
            shared = [partition.shared for partition in self._partitions if partition.shared is not None]
        slices = [*own, *shared]
        self._gradients = [piece.delta for piece in slices]
        self.reduced_vectors = buffer.tails({piece.block.dtype: piece.block.elements for piece in shared})

        # Elements that every rank of the group steps on count in the norm on its first rank.
        blocks, names = {block.dtype: block for block in layout.parameters}, set(shard.counted)
        counted = slices if group.rank == 0 else own
        self._counted = [tensor for piece in counted for tensor in piece.of(blocks[piece.block.dtype], names)]
        if slices:
            flat = FlatLayout(tuple(piece.block for piece in slices), ())
            of_vectors = optimizer_of_vectors(program.optimizer, full)
            make = of_vectors if anywhere else optimizer_of_part(program.optimizer, full, flat)
            states = FlatState(flat, [piece.state for piece in slices], []), FlatState(flat, self._gradients, [])
            self.optimizer = FlatOptimizer(make, program.scheduler, *states)
        self.slices: dict[int, tuple[DtypeBuffer, int]] = {}
        """Layout of the vector, and offset in it, of each slice that is cut anywhere, by its only entry's identity."""
        if anywhere and self._group is not None:
            self.slices = {id(piece.block.entries[0]): (blocks[piece.block.dtype], piece.start) for piece in slices}
        self.shared_entries = {id(entry) for piece in shared for entry in piece.block.entries}
        """Identities of the entries of slices that all ranks of the group step on."""

    def apply(self, factor: float, rate: float, version: Version) -> None:
        del version
        group = self._group
        if group is not None:
            for work in [partition.begin_reduce_scatter(group) for partition in self._partitions]:
                group.wait(work, "the reduce-scatter of Δ")
        if self._gradients:
            torch._foreach_mul_(self._gradients, factor)
        if self._clip_norm is not None:
            clip_across_ranks(self._gradients, self._counted, self._clip_norm, self._all)
        if self.optimizer is not None:
            self.optimizer.step(self._gradients, rate)
        if group is not None:
            for work in [partition.begin_all_gather(group) for partition in self._partitions]:
                group.wait(work, "the all-gather of A")
        for partition in self._partitions:
            partition.unpack()
        self._buffer.copy_running_buffers(self._state)

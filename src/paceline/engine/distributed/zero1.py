"""ZeRO-1: the optimizer's state is partitioned among the ranks that have the same part of A (arXiv 1910.02054).

An optimizer whose state is divided among those who have the same part of A (Rajbhandari et al. 2019, arXiv
1910.02054: ZeRO-1).

::

    Δ of all of them --- reduce-scatter ---> Σ Δ of my piece -- step on my piece of A --+
                                                                                         |
    their whole new part of A <------------------------ all-gather ---------------------+

Where each element is stepped on by itself, the part is cut anywhere; an optimizer that looks at whole parameters is
given whole ones. With replicas of one worker the part is A; with replicas of stages and shards each worker has another,
and its peers in the other replicas the same.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from paceline.core.partitioning import cut_at_borders
from paceline.engine.distributed.reduce_buffer import ReduceBuffer
from paceline.engine.distributed.update import ShardState, Update, take_buffers
from paceline.engine.spmd.communicator import Communicator
from paceline.engine.spmd.rank_context import SubGroup
from paceline.program import Program
from paceline.replica.clipping import clip_scale, square_norm
from paceline.replica.flat_optimizer import FlatOptimizer, elementwise, of_part, of_vectors, stand_ins
from paceline.replica.flat_state import DtypeBuffer, FlatLayout, FlatState, TensorEntry


class ZeroSlice(NamedTuple):
    """What a rank steps on."""

    block: DtypeBuffer
    start: int
    """Where in the vector it begins."""
    here: Tensor
    """Of A."""
    delta: Tensor
    """Σ Δ."""

    def of(self, block: DtypeBuffer, names: Collection[str]) -> Iterator[Tensor]:
        """What of Σ Δ here belongs to these parameters.

        Args:
            block: says what lies in the whole vector.
            names: of some of its parameters.
        """
        for entry in block.entries:
            start, stop = max(0, entry.start - self.start), min(len(self.delta), entry.stop - self.start)
            if start < stop and entry.name in names:
                yield self.delta[start:stop]


class ZeroPartition(ABC):
    """One rank's part of one vector.

    Args:
        own: what this rank alone steps on.
        shared: what every rank steps on: of its Δ the sum is made where ranks meet.
    """

    def __init__(self, own: ZeroSlice, shared: ZeroSlice | None = None) -> None:
        self.own, self.shared = own, shared

    @abstractmethod
    def begin_sum(self, communicator: Communicator) -> Any:
        """Begin to sum Δ: each rank is to have the sum of its own piece. To be waited for."""

    @abstractmethod
    def begin_gathering(self, communicator: Communicator) -> Any:
        """Begin to tell all ranks this one's new piece of A. To be waited for, and then :meth:`take`."""

    @abstractmethod
    def take(self) -> None:
        """Put together what has been gathered."""


@final
class EvenPartition(ZeroPartition):
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

    def __init__(self, block: DtypeBuffer, a: Tensor, delta: Tensor, rank: int, ranks: int) -> None:
        each = block.elements // ranks
        body = each * ranks
        self._a, self._delta = a[:body].view(ranks, each), delta[:body].view(ranks, each)
        self._sum = torch.zeros_like(self._a[rank])
        left = _flat(block.dtype, body, block.elements)
        super().__init__(
            ZeroSlice(_flat(block.dtype, rank * each, (rank + 1) * each), rank * each, self._a[rank], self._sum),
            ZeroSlice(left, body, a[body:], delta[body:]) if left.elements else None,
        )

    def begin_sum(self, communicator: Communicator) -> Any:
        return communicator.reduce_scatter(self._delta, self._sum)

    def begin_gathering(self, communicator: Communicator) -> Any:
        self._sum.copy_(self.own.here)  # it may not be sent from where it is received
        return communicator.all_gather(self._a, self._sum)

    def take(self) -> None:
        """All lies in its place."""


@final
class ParameterPartition(ZeroPartition):
    """Whole parameters; the parts are as unequal as these are, and travel in rows as long as the longest.

    Args:
        block: says what lies in the vectors.
        a: of A.
        delta: of Δ.
        rank: of this process.
        ranks: how many there are.
    """

    def __init__(self, block: DtypeBuffer, a: Tensor, delta: Tensor, rank: int, ranks: int) -> None:
        cut = cut_at_borders([entry.stop - entry.start for entry in block.entries], ranks)
        self._a, self._delta = ([whole[start:stop] for start, stop in pairwise(cut)] for whole in (a, delta))  # by rank
        longest = max(map(len, self._a))
        self._rows = torch.zeros(ranks, longest, dtype=block.dtype)
        self._row = torch.zeros(longest, dtype=block.dtype)
        here = self._a[rank]
        super().__init__(ZeroSlice(_inside(block, cut[rank], cut[rank + 1]), cut[rank], here, self._row[: len(here)]))

    def begin_sum(self, communicator: Communicator) -> Any:
        for row, part in zip(self._rows, self._delta, strict=True):
            row[: len(part)] = part
        return communicator.reduce_scatter(self._rows, self._row)

    def begin_gathering(self, communicator: Communicator) -> Any:
        self.own.delta.copy_(self.own.here)
        return communicator.all_gather(self._rows, self._row)

    def take(self) -> None:
        for row, part in zip(self._rows, self._a, strict=True):
            part.copy_(row[: len(part)])


def _flat(dtype: torch.dtype, start: int, stop: int) -> DtypeBuffer:
    """Elements of which nobody asks to what parameter they belong."""
    entry = TensorEntry(f"{start}:{stop}", torch.Size([stop - start]), 0, stop - start)
    return DtypeBuffer(dtype, (entry,) if stop > start else ())


def _inside(block: DtypeBuffer, start: int, stop: int) -> DtypeBuffer:
    """The parameters between two borders."""
    inside = [entry for entry in block.entries if start <= entry.start and entry.stop <= stop]
    return DtypeBuffer(
        block.dtype, tuple(TensorEntry(e.name, e.shape, e.start - start, e.stop - start) for e in inside)
    )


LEAST_RANKS, LEAST_ELEMENTS = 4, 1_000_000
"""From where on it was measured to pay."""


@final
class ZeroOptimizer(Update):
    """Each rank steps on its piece of its part of A, and keeps the optimizer's state of that piece alone.

    Args:
        program: gives optimizer, scheduler and clipping.
        freight: what ranks bring.
        held: this rank's part of A.
        subgroup: those who have the same.
        everybody: by whom the norm of the whole Δ is found.
    """

    def __init__(
        self, program: Program, freight: ReduceBuffer, held: ShardState, subgroup: SubGroup, everybody: Communicator
    ) -> None:
        self._freight, self._held, self._among, self._everybody = freight, held, subgroup.communicator, everybody
        self._clip_norm = program.clip_norm
        anywhere = elementwise(program.optimizer, held.whole)
        self._parts = _parts(EvenPartition if anywhere else ParameterPartition, freight, held, subgroup)
        self._own, self._shared = _pieces(self._parts, freight, held)
        self._counted = list(self._that_count(first=subgroup.rank == 0))
        self._gradients = [piece.delta for piece in (*self._own, *self._shared)]
        self._stepper = _stepper(program, held.whole, [*self._own, *self._shared], anywhere=anywhere)

    @property
    def reduced_vectors(self) -> list[Tensor]:
        left = {piece.block.dtype: piece.block.elements for piece in self._shared}
        return self._freight.tails_with(left)

    @property
    def optimizer_bytes(self) -> int:
        return 0 if self._stepper is None else self._stepper.nbytes

    def apply(self, factor: float, rate: float) -> None:
        self._sum()
        if self._gradients:
            torch._foreach_mul_(self._gradients, factor)
        if self._clip_norm is not None:
            self._clip(self._clip_norm)
        if self._stepper is not None:
            self._stepper.step(self._gradients, rate)
        self._gather()
        take_buffers(self._held.state, self._freight.state)

    def full_state(self, *, wanted: bool) -> FlatState | None:
        return self._held.gather(wanted=wanted)

    def _sum(self) -> None:
        if self._among is not None:
            self._wait(self._among, [part.begin_sum(self._among) for part in self._parts], "the reduce-scatter of Δ")

    def _clip(self, bound: float) -> None:
        square = torch.tensor([square_norm(self._counted)], dtype=torch.float64)
        self._everybody.all_reduce([square], "the norm of Δ")
        if self._gradients:
            torch._foreach_mul_(self._gradients, clip_scale(float(square), bound))

    def _gather(self) -> None:
        if self._among is not None:
            self._wait(self._among, [part.begin_gathering(self._among) for part in self._parts], "the all-gather of A")
        for part in self._parts:
            part.take()

    def _wait(self, among: Communicator, works: Sequence[Any], what: str) -> None:
        for work in works:
            among.wait(work, what)

    def _that_count(self, *, first: bool) -> Iterator[Tensor]:
        """What of Σ Δ here counts in the norm; what all have, with the first of them."""
        blocks = {block.dtype: block for block in self._held.state.layout.parameters}
        for piece in (*self._own, *(self._shared if first else ())):
            yield from piece.of(blocks[piece.block.dtype], set(self._held.counted))


def pays(program: Program, layout: FlatLayout, backend: str, ranks: int) -> bool:
    """Whether a divided optimizer makes a step quicker than one on each rank: where nobody has asked for either.

    So it was with 4 ranks on shared memory, from a million elements on: 0.85 to 0.92 of the time under Adam and under
    SGD with momentum. With 2 ranks it was 1.01 to 1.12 of it, and over Gloo 1.3 and more (benchmarks/data_parallel).
    """
    elements = sum(block.elements for block in layout.parameters)
    worth_it = backend == "shm" and ranks >= LEAST_RANKS and elements >= LEAST_ELEMENTS
    return worth_it and elementwise(program.optimizer, layout) and _remembers(program, layout)


def _remembers(program: Program, layout: FlatLayout) -> bool:
    """Whether it keeps anything from step to step: plain SGD does not."""
    optimizer = program.optimizer(list(stand_ins(layout).values()))
    return not isinstance(optimizer, torch.optim.SGD) or bool(optimizer.param_groups[0]["momentum"])


def _parts(
    divided: type[EvenPartition | ParameterPartition], freight: ReduceBuffer, held: ShardState, subgroup: SubGroup
) -> Sequence[ZeroPartition]:
    """Of each vector this rank's; none where nobody else has it."""
    if subgroup.communicator is None:
        return []
    vectors = zip(held.state.layout.parameters, held.state.parameters, freight.state.parameters, strict=True)
    return [divided(block, a, delta, subgroup.rank, subgroup.communicator.ranks) for block, a, delta in vectors]


def _pieces(
    parts: Sequence[ZeroPartition], freight: ReduceBuffer, held: ShardState
) -> tuple[list[ZeroSlice], list[ZeroSlice]]:
    """What this rank alone steps on, and what all do."""
    if not parts:
        vectors = zip(held.state.layout.parameters, held.state.parameters, freight.state.parameters, strict=True)
        return [ZeroSlice(block, 0, a, delta) for block, a, delta in vectors], []
    own = [part.own for part in parts if part.own.block.elements]
    return own, [part.shared for part in parts if part.shared is not None]


def _stepper(
    program: Program, whole: FlatLayout, pieces: Sequence[ZeroSlice], *, anywhere: bool
) -> FlatOptimizer | None:
    """The optimizer of this rank's pieces; None where it has none."""
    if not pieces:
        return None
    layout = FlatLayout(tuple(piece.block for piece in pieces), ())
    here = FlatState(layout, [piece.here for piece in pieces], [])
    make = of_vectors(program.optimizer, whole) if anywhere else of_part(program.optimizer, whole, layout)
    return FlatOptimizer(make, program.scheduler, here, FlatState(layout, [piece.delta for piece in pieces], []))

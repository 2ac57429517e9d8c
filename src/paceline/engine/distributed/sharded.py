"""An optimizer whose state is divided among those who have the same part of A (Rajbhandari et al. 2019, arXiv
1910.02054: ZeRO-1).

::

    Δ of all of them --- reduce-scatter ---> Σ Δ of my piece -- step on my piece of A --+
                                                                                         |
    their whole new part of A <------------------------ all-gather ---------------------+

Where each element is stepped on by itself, the part is cut anywhere; an optimizer that looks at whole parameters is
given whole ones. With replicas of one worker the part is A; with replicas of stages and shards each worker has another,
and its peers in the other replicas the same.
"""

from collections.abc import Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor

from paceline.engine.distributed.freight import Freight
from paceline.engine.distributed.held import Held
from paceline.engine.distributed.parts import AtBorders, Even, Part, Piece
from paceline.engine.distributed.update import Update, take_buffers
from paceline.engine.team.circles import Circle
from paceline.engine.team.traffic import Traffic
from paceline.program import Program
from paceline.replica.clipping import clip_scale, square_norm
from paceline.replica.state import Layout, State
from paceline.replica.stepper import Stepper, elementwise, of_part, of_vectors, stand_ins

LEAST_RANKS, LEAST_ELEMENTS = 4, 1_000_000
"""From where on it was measured to pay."""


@final
class Sharded(Update):
    """Each rank steps on its piece of its part of A, and keeps the optimizer's state of that piece alone.

    Args:
        program: gives optimizer, scheduler and clipping.
        freight: what ranks bring.
        held: this rank's part of A.
        circle: those who have the same.
        everybody: by whom the norm of the whole Δ is found.
    """

    def __init__(self, program: Program, freight: Freight, held: Held, circle: Circle, everybody: Traffic) -> None:
        self._freight, self._held, self._among, self._everybody = freight, held, circle.traffic, everybody
        self._clip_norm = program.clip_norm
        anywhere = elementwise(program.optimizer, held.whole)
        self._parts = _parts(Even if anywhere else AtBorders, freight, held, circle)
        self._own, self._shared = _pieces(self._parts, freight, held)
        self._counted = list(self._that_count(first=circle.rank == 0))
        self._gradients = [piece.delta for piece in (*self._own, *self._shared)]
        self._stepper = _stepper(program, held.whole, [*self._own, *self._shared], anywhere=anywhere)

    @property
    def meeting(self) -> list[Tensor]:
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

    def whole(self, *, wanted: bool) -> State | None:
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

    def _wait(self, among: Traffic, works: Sequence[Any], what: str) -> None:
        for work in works:
            among.wait(work, what)

    def _that_count(self, *, first: bool) -> Iterator[Tensor]:
        """What of Σ Δ here counts in the norm; what all have, with the first of them."""
        blocks = {block.dtype: block for block in self._held.state.layout.parameters}
        for piece in (*self._own, *(self._shared if first else ())):
            yield from piece.of(blocks[piece.block.dtype], set(self._held.counted))


def pays(program: Program, layout: Layout, backend: str, ranks: int) -> bool:
    """Whether a divided optimizer makes a step quicker than one on each rank: where nobody has asked for either.

    So it was with 4 ranks on shared memory, from a million elements on: 0.85 to 0.92 of the time under Adam and under
    SGD with momentum. With 2 ranks it was 1.01 to 1.12 of it, and over Gloo 1.3 and more (benchmarks/data_parallel).
    """
    elements = sum(block.elements for block in layout.parameters)
    worth_it = backend == "shm" and ranks >= LEAST_RANKS and elements >= LEAST_ELEMENTS
    return worth_it and elementwise(program.optimizer, layout) and _remembers(program, layout)


def _remembers(program: Program, layout: Layout) -> bool:
    """Whether it keeps anything from step to step: plain SGD does not."""
    optimizer = program.optimizer(list(stand_ins(layout).values()))
    return not isinstance(optimizer, torch.optim.SGD) or bool(optimizer.param_groups[0]["momentum"])


def _parts(divided: type[Even | AtBorders], freight: Freight, held: Held, circle: Circle) -> Sequence[Part]:
    """Of each vector this rank's; none where nobody else has it."""
    if circle.traffic is None:
        return []
    vectors = zip(held.state.layout.parameters, held.state.parameters, freight.state.parameters, strict=True)
    return [divided(block, a, delta, circle.rank, circle.traffic.ranks) for block, a, delta in vectors]


def _pieces(parts: Sequence[Part], freight: Freight, held: Held) -> tuple[list[Piece], list[Piece]]:
    """What this rank alone steps on, and what all do."""
    if not parts:
        vectors = zip(held.state.layout.parameters, held.state.parameters, freight.state.parameters, strict=True)
        return [Piece(block, 0, a, delta) for block, a, delta in vectors], []
    own = [part.own for part in parts if part.own.block.elements]
    return own, [part.shared for part in parts if part.shared is not None]


def _stepper(program: Program, whole: Layout, pieces: Sequence[Piece], *, anywhere: bool) -> Stepper | None:
    """The optimizer of this rank's pieces; None where it has none."""
    if not pieces:
        return None
    layout = Layout(tuple(piece.block for piece in pieces), ())
    here = State(layout, [piece.here for piece in pieces], [])
    make = of_vectors(program.optimizer, whole) if anywhere else of_part(program.optimizer, whole, layout)
    return Stepper(make, program.scheduler, here, State(layout, [piece.delta for piece in pieces], []))

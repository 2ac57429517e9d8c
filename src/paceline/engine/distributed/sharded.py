"""An optimizer whose state is divided among the ranks (Rajbhandari et al. 2019, arXiv 1910.02054: ZeRO-1).

::

    Δ of all ranks ---- reduce-scatter ----> Σ Δ of my part -- step on my part of A --+
                                                                                       |
    the whole new A <------------------------- all-gather -----------------------------+

Where each element is stepped on by itself, A is cut anywhere; an optimizer that looks at whole parameters is given
whole ones.
"""

from typing import final

import torch
from torch import Tensor, nn

from paceline.engine.distributed.freight import Freight
from paceline.engine.distributed.parts import AtBorders, Even, Piece
from paceline.engine.distributed.update import Update, take_buffers
from paceline.engine.team.traffic import Traffic
from paceline.program import Program
from paceline.replica.clipping import clip_scale, square_norm
from paceline.replica.state import Layout, State
from paceline.replica.stepper import ELEMENTWISE, Stepper

LEAST_RANKS, LEAST_ELEMENTS = 4, 1_000_000
"""From where on it was measured to pay."""


@final
class Sharded(Update):
    """Each rank steps on its part of A, and keeps the optimizer's state of that part alone.

    Args:
        program: gives optimizer, scheduler and clipping.
        freight: what ranks bring.
        state: A.
        rank: of this process.
        ranks: how many there are.
        traffic: by which they meet.
    """

    def __init__(
        self, program: Program, freight: Freight, state: State, rank: int, ranks: int, traffic: Traffic
    ) -> None:
        self._freight, self._state, self._traffic = freight, state, traffic
        self._clip_norm = program.clip_norm
        divided = Even if elementwise(program, state) else AtBorders
        self._parts = [
            divided(block, a, delta, rank, ranks)
            for block, a, delta in zip(state.layout.parameters, state.parameters, freight.state.parameters, strict=True)
        ]
        self._own = [part.own for part in self._parts if part.own.block.elements]
        self._shared = [part.shared for part in self._parts if part.shared is not None]
        self._gradients = [piece.delta for piece in (*self._own, *self._shared)]
        self._stepper = _stepper(program, [*self._own, *self._shared])

    @property
    def meeting(self) -> list[Tensor]:
        left = {piece.block.dtype: piece.block.elements for piece in self._shared}
        return self._freight.tails_with(left)

    def apply(self, factor: float, rate: float) -> None:
        self._sum()
        if self._gradients:
            torch._foreach_mul_(self._gradients, factor)
        if self._clip_norm is not None:
            self._clip(self._clip_norm)
        if self._stepper is not None:
            self._stepper.step(self._gradients, rate)
        self._gather()
        take_buffers(self._state, self._freight.state)

    def whole(self, *, wanted: bool) -> State | None:
        return self._state.clone() if wanted else None

    def _sum(self) -> None:
        for work in [part.begin_sum(self._traffic) for part in self._parts]:
            self._traffic.wait(work, "the reduce-scatter of Δ")

    def _clip(self, bound: float) -> None:
        square = torch.tensor([square_norm(piece.delta for piece in self._own)], dtype=torch.float64)
        self._traffic.all_reduce([square], "the norm of Δ")
        everywhere = float(square) + square_norm(piece.delta for piece in self._shared)
        if self._gradients:
            torch._foreach_mul_(self._gradients, clip_scale(everywhere, bound))

    def _gather(self) -> None:
        for work in [part.begin_gathering(self._traffic) for part in self._parts]:
            self._traffic.wait(work, "the all-gather of A")
        for part in self._parts:
            part.take()


def pays(program: Program, state: State, backend: str, ranks: int) -> bool:
    """Whether a divided optimizer makes a step quicker than one on each rank: where nobody has asked for either.

    So it was with 4 ranks on shared memory, from a million elements on: 0.85 to 0.92 of the time under Adam and under
    SGD with momentum. With 2 ranks it was 1.01 to 1.12 of it, and over Gloo 1.3 and more (benchmarks/data_parallel).
    """
    elements = sum(block.elements for block in state.layout.parameters)
    worth_it = backend == "shm" and ranks >= LEAST_RANKS and elements >= LEAST_ELEMENTS
    return worth_it and elementwise(program, state) and _remembers(program, state)


def elementwise(program: Program, state: State) -> bool:
    """Whether the optimizer treats each element alone, and all alike."""
    optimizer = _tried(program, state)
    groups = optimizer.param_groups
    whole = len(groups) == 1 and len(groups[0]["params"]) == len(state.views.parameters)
    return whole and type(optimizer) in ELEMENTWISE and not optimizer.state


def _remembers(program: Program, state: State) -> bool:
    """Whether it keeps anything from step to step: plain SGD does not."""
    optimizer = _tried(program, state)
    return not isinstance(optimizer, torch.optim.SGD) or bool(optimizer.param_groups[0]["momentum"])


def _tried(program: Program, state: State) -> torch.optim.Optimizer:
    """The optimizer on other parameters of the same form."""
    return program.optimizer([nn.Parameter(torch.zeros_like(view)) for view in state.views.parameters])


def _stepper(program: Program, pieces: list[Piece]) -> Stepper | None:
    """The optimizer of this rank's pieces; None where it has none."""
    if not pieces:
        return None
    layout = Layout(tuple(piece.block for piece in pieces), ())
    here = State(layout, [piece.here for piece in pieces], [])
    return Stepper(program.optimizer, program.scheduler, here, State(layout, [piece.delta for piece in pieces], []))

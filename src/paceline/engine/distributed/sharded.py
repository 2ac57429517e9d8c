"""An optimizer whose state is divided among the ranks (Rajbhandari et al. 2019, arXiv 1910.02054: ZeRO-1).

::

    Δ of all ranks ---- reduce-scatter ----> Σ Δ of my part -- step on my part of A --+
                                                                                       |
    the whole new A <------------------------- all-gather -----------------------------+

Where each element is stepped on by itself, A is cut anywhere; an optimizer that looks at whole parameters is given
whole ones.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import final

import torch
from torch import Tensor, nn

from paceline.engine.distributed.exchange import Traffic
from paceline.engine.distributed.freight import Freight
from paceline.engine.distributed.update import Update, take_buffers
from paceline.program import Program
from paceline.replica.clipping import clip_scale, square_norm
from paceline.replica.state import Block, Entry, Layout, State
from paceline.replica.stepper import ELEMENTWISE, Stepper

Cut = tuple[int, ...]
"""Where the parts of a vector begin, and where the last one ends."""


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
        self._freight, self._state, self._rank, self._traffic = freight, state, rank, traffic
        self._clip_norm = program.clip_norm
        anywhere = _elementwise(program, state)
        cut = even if anywhere else at_borders
        self._cuts = [cut(block, ranks) for block in state.layout.parameters]
        self._rows = [_rows(c, v) for c, v in zip(self._cuts, state.parameters, strict=True)]
        self._mine = [torch.zeros_like(rows[0]) for rows in self._rows]
        self._stepper = self._made(program, anywhere=anywhere)

    @property
    def meeting(self) -> list[Tensor]:
        return self._freight.tails

    def apply(self, factor: float, rate: float) -> None:
        gradients = self._reduce_scatter(factor)
        if self._clip_norm is not None:
            self._clip(gradients, self._clip_norm)
        if self._stepper is not None:
            self._stepper.step(gradients, rate)
        self._all_gather()
        take_buffers(self._state, self._freight.state)

    def whole(self, *, wanted: bool) -> State | None:
        return self._state.clone() if wanted else None

    def _reduce_scatter(self, factor: float) -> list[Tensor]:
        works = []
        for cut, rows, mine, vector in zip(
            self._cuts, self._rows, self._mine, self._freight.state.parameters, strict=True
        ):
            _pack(cut, vector, rows)
            works.append(self._traffic.reduce_scatter(rows, mine))
        for work in works:
            self._traffic.wait(work, "the reduce-scatter of Δ")
        parts = [
            mine[: cut[self._rank + 1] - cut[self._rank]] for cut, mine in zip(self._cuts, self._mine, strict=True)
        ]
        torch._foreach_mul_(parts, factor)
        return parts

    def _clip(self, gradients: list[Tensor], bound: float) -> None:
        square = torch.tensor([square_norm(gradients)], dtype=torch.float64)
        self._traffic.all_reduce([square], "the norm of Δ")
        torch._foreach_mul_(gradients, clip_scale(float(square), bound))

    def _all_gather(self) -> None:
        works = []
        for cut, rows, mine, vector in zip(self._cuts, self._rows, self._mine, self._state.parameters, strict=True):
            part = _part(cut, self._rank, vector)
            mine[: len(part)] = part
            works.append(self._traffic.all_gather(rows, mine))
        for work in works:
            self._traffic.wait(work, "the all-gather of A")
        for cut, rows, vector in zip(self._cuts, self._rows, self._state.parameters, strict=True):
            for rank, row in enumerate(rows):
                part = _part(cut, rank, vector)
                part.copy_(row[: len(part)])

    def _made(self, program: Program, *, anywhere: bool) -> Stepper | None:
        """The optimizer of this rank's part; None where it has none."""
        layout = Layout(tuple(_own(b, c, self._rank, whole=not anywhere) for b, c in self._blocks()), ())
        if not any(block.elements for block in layout.parameters):
            return None
        here = [_part(c, self._rank, v) for c, v in zip(self._cuts, self._state.parameters, strict=True)]
        there = [mine[: len(part)] for mine, part in zip(self._mine, here, strict=True)]
        return Stepper(program.optimizer, program.scheduler, State(layout, here, []), State(layout, there, []))

    def _blocks(self) -> Sequence[tuple[Block, Cut]]:
        return list(zip(self._state.layout.parameters, self._cuts, strict=True))


def even(block: Block, ranks: int) -> Cut:
    """Parts as equal as possible, but for the last ones.

    >>> even(Block(torch.float32, (Entry("w", torch.Size([10]), 0, 10),)), 4)
    (0, 3, 6, 9, 10)
    """
    size = -(-block.elements // ranks)
    return tuple(min(block.elements, size * rank) for rank in range(ranks + 1))


def at_borders(block: Block, ranks: int) -> Cut:
    """Whole parameters: each begins a part once those before it hold their share.

    >>> sizes = [4, 1, 1, 6]
    >>> entries = [Entry(str(n), torch.Size([n]), stop - n, stop) for n, stop in zip(sizes, accumulate(sizes))]
    >>> at_borders(Block(torch.float32, tuple(entries)), 3)
    (0, 4, 6, 12)
    """
    borders = [0, *(entry.stop for entry in block.entries)]
    wanted = (block.elements * rank / ranks for rank in range(1, ranks))
    inner = [min(borders, key=lambda border: abs(border - w)) for w in wanted]
    return (0, *accumulate(inner, max), block.elements)


def _elementwise(program: Program, state: State) -> bool:
    """Whether the optimizer treats each element alone, and all alike."""
    parameters = [nn.Parameter(torch.zeros_like(view)) for view in state.views.parameters]
    optimizer = program.optimizer(parameters)
    groups = optimizer.param_groups
    whole = len(groups) == 1 and len(groups[0]["params"]) == len(parameters)
    return whole and type(optimizer) in ELEMENTWISE and not optimizer.state


def _own(block: Block, cut: Cut, rank: int, *, whole: bool) -> Block:
    """A rank's part as a block: one vector, or the parameters that are in it."""
    start, stop = cut[rank], cut[rank + 1]
    if not whole:
        entry = Entry(f"{start}:{stop}", torch.Size([stop - start]), 0, stop - start)
        return Block(block.dtype, (entry,) if stop > start else ())
    inside = [e for e in block.entries if start <= e.start and e.stop <= stop]
    return Block(block.dtype, tuple(Entry(e.name, e.shape, e.start - start, e.stop - start) for e in inside))


def _part(cut: Cut, rank: int, vector: Tensor) -> Tensor:
    return vector[cut[rank] : cut[rank + 1]]


def _rows(cut: Cut, vector: Tensor) -> Tensor:
    """Room for all parts, each as long as the longest."""
    longest = max(stop - start for start, stop in pairwise(cut))
    return torch.zeros(len(cut) - 1, longest, dtype=vector.dtype)


def _pack(cut: Cut, vector: Tensor, rows: Tensor) -> None:
    for rank, row in enumerate(rows):
        part = _part(cut, rank, vector)
        row[: len(part)] = part

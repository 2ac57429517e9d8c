"""Δ as it is sent: with the running buffers and all ranks' rows in one vector for each dtype.

::

    float32 vector   | parameters ................ | running buffers ... | rows of all ranks |
                       ^ Δ is written here           ^ and here            ^ rows.py
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.engine.distributed import rows
from paceline.engine.distributed.rows import Row
from paceline.replica.state import Block, Layout, State

PRECISE = (torch.float64, torch.float32)
"""What rows can be told in."""


class Freight:
    """What one rank brings to an exchange, and what it takes home.

    Args:
        layout: of A, or of its running buffers alone where Δ does not travel with them.
        ranks: how many there are.
        norms: whether rows tell norms.
    """

    def __init__(self, layout: Layout, ranks: int, *, norms: bool = False) -> None:
        blocks = (*layout.parameters, *(b for b in layout.buffers if b.dtype.is_floating_point))
        sizes: dict[torch.dtype, int] = {}
        starts = [_append(sizes, block) for block in blocks]
        self._counted = sum(b.elements for b in layout.buffers if not b.dtype.is_floating_point)
        self._norms, self._fields = norms, rows.FIELDS + rows.NORMS * norms
        width = self._fields + rows.DIGITS * self._counted
        told_in = next((d for d in PRECISE if d in sizes), torch.float64)
        table = sizes.get(told_in, 0)
        sizes[told_in] = table + ranks * width
        vectors = {dtype: torch.zeros(size, dtype=dtype) for dtype, size in sizes.items()}
        self.vectors = list(vectors.values())
        """What is reduced."""
        self.nbytes = sum(v.nbytes for v in self.vectors)
        self._parameters = {block.dtype: block.elements for block in layout.parameters}
        self.table = vectors[told_in][table:].view(ranks, width)
        self._sums = [vectors[b.dtype][s : s + b.elements] for b, s in zip(blocks, starts, strict=True)]
        count = len(layout.parameters)
        self._floats = self._sums[count:]
        floats = iter(self._floats)
        buffers = [next(floats) if b.dtype.is_floating_point else _whole(b) for b in layout.buffers]
        self.state = State(layout, self._sums[:count], buffers)
        """Where Δ is written, and where Σ weight·Δ lies afterwards."""
        self._counters = [b for b in buffers if not b.is_floating_point()]

    @property
    def tails(self) -> list[Tensor]:
        """What is reduced where Δ itself is not: running buffers and rows."""
        return self.tails_with({})

    def tails_with(self, last: Mapping[torch.dtype, int]) -> list[Tensor]:
        """These, and with them so many of the last elements of Δ."""
        starts = [self._parameters.get(v.dtype, 0) - last.get(v.dtype, 0) for v in self.vectors]
        return [tail for v, start in zip(self.vectors, starts, strict=True) if len(tail := v[start:])]

    def weigh(self, weight: float) -> None:
        """Multiply what this rank brings, counters aside."""
        if weight != 1.0 and self._sums:
            torch._foreach_mul_(self._sums, weight)

    def scale_buffers(self, factor: float) -> None:
        """Multiply the running buffers, counters aside."""
        if self._floats:
            torch._foreach_mul_(self._floats, factor)

    def empty(self) -> None:
        """Bring nothing."""
        if self._sums:
            torch._foreach_zero_(self._sums)

    def tell(self, rank: int, row: Row) -> None:
        """Fill in this rank's row, and no other."""
        self.table.zero_()
        rows.write(row, self.table[rank])
        self.count(rank)

    def count(self, rank: int) -> None:
        """Fill in this rank's counters alone."""
        rows.write_counters(self._counters, self.table[rank, self._fields :])

    def told(self) -> list[Row]:
        """What all ranks have said."""
        return [rows.read(numbers, norms=self._norms) for numbers in self.table[:, : self._fields].tolist()]

    def take_counters(self, ranks: list[int]) -> None:
        """Let the counters be the largest of these ranks'."""
        if self._counted:
            largest = torch.split(
                rows.read_counters(self.table[:, self._fields :], ranks), [c.numel() for c in self._counters]
            )
            for mine, value in zip(self._counters, largest, strict=True):
                mine.copy_(value)

    def kept(self) -> list[Tensor]:
        """A copy of what this rank brings, for an exchange that has to be made again."""
        return [v.clone() for v in self.state.vectors]

    def bring_again(self, kept: list[Tensor]) -> None:
        """Bring what was kept."""
        torch._foreach_copy_(self.state.vectors, kept)


def _append(sizes: dict[torch.dtype, int], block: Block) -> int:
    start = sizes.get(block.dtype, 0)
    sizes[block.dtype] = start + block.elements
    return start


def _whole(block: Block) -> Tensor:
    return torch.zeros(block.elements, dtype=block.dtype)

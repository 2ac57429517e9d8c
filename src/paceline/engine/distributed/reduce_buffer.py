"""The flat buffer that a rank contributes to an all-reduce.

Δ, the running buffers and a table with a status row for each rank are one vector for each dtype::

    float32 vector   | parameters ................ | running buffers ... | status and counters of all ranks |
                       ^ Δ is written here           ^ and here            ^ each rank fills its own row

Each rank leaves the rows of the others zero, so one all-reduce sums Δ and spreads all statuses (``rank_status.py``).
Where Δ is on a device, statuses are a vector of their own in the host's memory, so that they never cross.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.device import CPU
from paceline.engine.distributed.rank_status import BITS, DIGITS, FIELDS, MASK, NORMS
from paceline.replica.flat_state import FlatLayout, FlatState, is_averaged


class ReduceBuffer:
    """Flat buffer that a rank contributes to the all-reduce; holds the sums afterwards.

    Args:
        layout: of A, or of its running buffers alone where Δ is summed elsewhere.
        ranks: rows of the status table.
        device: on which it is.
        norms: whether rows have norms.
    """

    def __init__(
        self, layout: FlatLayout, ranks: int, device: torch.device | None = None, *, norms: bool = False
    ) -> None:
        self._layout, self._ranks, self._device, self._norms = layout, ranks, device, norms
        self.vectors: list[Tensor] = []
        """The buffer: reduced whole where Δ is summed in it."""
        self.own_vectors: list[Tensor] = []
        """Without the table of statuses, where that is a vector of its own."""
        self.renew()

    def renew(self) -> None:
        """Take new memory, all zeros; a collective that was given up may still write into what there was."""
        layout, ranks, norms = self._layout, self._ranks, self._norms
        # One vector for each dtype: parameters, then floating-point running buffers, then the table.
        blocks = (*layout.parameters, *(b for b in layout.buffers if is_averaged(b.dtype)))
        sizes: dict[torch.dtype, int] = {}
        starts = []
        for block in blocks:
            starts.append(sizes.get(block.dtype, 0))
            sizes[block.dtype] = starts[-1] + block.elements
        table_dtype = next((dtype for dtype in (torch.float64, torch.float32) if dtype in sizes), torch.float64)
        table_start = sizes.get(table_dtype, 0)
        counters = DIGITS * sum(b.elements for b in layout.buffers if not is_averaged(b.dtype))
        fields = FIELDS + NORMS * norms
        apart = self._device not in (None, CPU)
        counters_start = table_start + (0 if apart else ranks * fields)
        sizes[table_dtype] = counters_start + ranks * counters
        vectors = {dtype: torch.zeros(size, dtype=dtype, device=self._device) for dtype, size in sizes.items() if size}
        tables = [torch.zeros(ranks * fields, dtype=table_dtype)] if apart else []
        self.own_vectors[:] = vectors.values()
        self.vectors[:] = [*self.own_vectors, *tables]
        self.nbytes = sum(v.nbytes for v in self.vectors)
        table = tables[0] if apart else vectors[table_dtype][table_start:counters_start]
        self.table = table.view(ranks, fields)
        """The status of each rank, a row each."""
        self._digits = vectors[table_dtype][counters_start:].view(ranks, counters) if counters else None
        """The integer buffers (counters) of each rank as digits, a row each; None: there are none."""

        self._sums = [vectors[b.dtype][s : s + b.elements] for b, s in zip(blocks, starts, strict=True)]
        self._floats = self._sums[len(layout.parameters) :]
        floats = iter(self._floats)
        buffers = [
            next(floats) if is_averaged(b.dtype) else torch.zeros(b.elements, dtype=b.dtype, device=self._device)
            for b in layout.buffers
        ]
        self.state = FlatState(layout, self._sums[: len(layout.parameters)], buffers)
        """Views of the buffer: Δ is written here, and Σ weight·Δ is here afterwards."""
        self._counters = [b for b in buffers if not is_averaged(b.dtype)]
        self._parameters = {block.dtype: block.elements for block in layout.parameters}

    def cut(self, slices: Sequence[slice]) -> list[Tensor]:
        """Return these slices of Δ; views of the buffer."""
        cut = (vector[each] for vector, each in zip(self.state.parameters, slices, strict=True))
        return [vector for vector in cut if len(vector)]

    def tails(self, last: Mapping[torch.dtype, int] | None = None) -> list[Tensor]:
        """Return the running buffers and the table, and the last so many elements of Δ of a dtype."""
        starts = [self._parameters.get(v.dtype, 0) - (last or {}).get(v.dtype, 0) for v in self.own_vectors]
        tails = [tail for v, start in zip(self.own_vectors, starts, strict=True) if len(tail := v[start:])]
        return [*tails, *self.vectors[len(self.own_vectors) :]]

    def scale(self, weight: float) -> None:
        """Multiply Δ and the floating-point running buffers."""
        if weight != 1.0 and self._sums:
            torch._foreach_mul_(self._sums, weight)

    def scale_buffers(self, factor: float) -> None:
        """Multiply the floating-point running buffers alone."""
        if self._floats:
            torch._foreach_mul_(self._floats, factor)

    def zero(self) -> None:
        """Contribute nothing to the sums."""
        if self._sums:
            torch._foreach_zero_(self._sums)

    def clear_rows(self) -> None:
        """Make the status and the counters of every rank zero."""
        self.table.zero_()
        if self._digits is not None:
            self._digits.zero_()

    def set_counters(self, rank: int) -> None:
        """Write this rank's integer buffers as digits into its row: sums of floats would round them."""
        if self._digits is not None:
            flat = torch.cat([c.to(torch.int64) for c in self._counters])
            digits = torch.stack([flat & MASK, (flat >> BITS) & MASK, flat >> (2 * BITS)])
            self._digits[rank] = digits.flatten()

    def take_counters(self, ranks: list[int]) -> None:
        """Set each integer buffer to the largest of these ranks'."""
        if self._digits is not None:
            # An index is copied to a device, which the host waits for; usually it is all of them.
            rows = self._digits if ranks == [*range(self._ranks)] else self._digits[ranks]
            digits = rows.to(torch.int64).view(len(ranks), DIGITS, -1)
            largest = (digits[:, 0] + (digits[:, 1] << BITS) + (digits[:, 2] << (2 * BITS))).amax(dim=0)
            values = torch.split(largest, [c.numel() for c in self._counters])
            for counter, value in zip(self._counters, values, strict=True):
                counter.copy_(value)

    def copy_running_buffers(self, state: FlatState) -> None:
        """Write the reduced running buffers into A; integer ones of several replicas never decrease."""
        for own, reduced in zip(state.buffers, self.state.buffers, strict=True):
            own.copy_(reduced if is_averaged(own.dtype) or self._ranks == 1 else torch.maximum(own, reduced))

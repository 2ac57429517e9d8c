"""The flat all-reduce buffer of a rank, each rank's status in it, and the gradient synchronisation by it.

Δ as it is sent: with the running buffers and all ranks' rows in one vector for each dtype.

::

    float32 vector   | parameters ................ | running buffers ... | rows of all ranks |
                       ^ Δ is written here           ^ and here            ^ rows.py

One all-reduce of all that ranks bring.
"""

import math
from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from paceline.core.types import Clock, Nanoseconds
from paceline.engine.spmd.communicator import Communicator
from paceline.replica.flat_state import DtypeBuffer, FlatLayout, FlatState

_BITS = 22
_MASK = (1 << _BITS) - 1
DIGITS = 3
"""Of 22 bits each: a float32 holds 24, and three cover an int64."""


class StatusKind(IntEnum):
    """What a rank brings."""

    nothing = 0
    """Its replica has left."""
    delta = 1
    """A Δ, new or one that waits for its round."""
    farewell = 2
    """Its replica leaves."""


class DeltaNorm(NamedTuple):
    """What a rank tells of its Δ, of those elements that count with it; squares of norms."""

    square: float = 0.0
    """Of Δ; where micro-steps were looked at, the mean of theirs."""
    pieces: int = 0
    """How many those were; 0: nothing is told."""
    together: float = 0.0
    """Of what these were combined to: Δ; or its mean with the one before; or the sum of all replicas'."""
    before: float = 0.0
    """Of the Δ before, where that has been kept."""
    samples_before: int = 0
    """Of that; 0: none has."""


class RankStatus(NamedTuple):
    """One rank's."""

    kind: StatusKind
    samples: int
    finite: bool
    stop: bool
    """Whether it has been asked to end the run."""
    loss: float
    entered_ns: Nanoseconds
    """When it came to the exchange, since the run began."""
    norm: DeltaNorm | None = None
    """None: nobody has asked."""


FIELDS = 2 + DIGITS * 2
"""Numbers in a row, norms and counters aside."""

NORMS = 8
"""Numbers of a norm: each real one as what float32 holds of it, and the rest."""


def digits(number: int) -> list[int]:
    """A whole number, digit by digit.

    >>> digits(5 + (7 << 22)), digits(-1)
    ([5, 7, 0], [4194303, 4194303, -1])
    """
    return [number & _MASK, (number >> _BITS) & _MASK, number >> (2 * _BITS)]


def whole(parts: list[float]) -> int:
    """The number of these digits.

    >>> whole(digits(-(2**60) + 3)) == -(2**60) + 3
    True
    """
    low, middle, high = map(int, parts)
    return low + (middle << _BITS) + (high << (2 * _BITS))


def numbers(row: RankStatus) -> list[float]:
    """A row as it lies in the table."""
    flags = int(row.kind) + 4 * row.finite + 8 * row.stop
    norm = () if row.norm is None else _norm_numbers(row.norm)
    return [flags, row.loss, *digits(row.samples), *digits(row.entered_ns), *norm]


def _norm_numbers(norm: DeltaNorm) -> list[float]:
    """Lengths, which float32 has room for where it has none for their squares."""
    lengths = [math.sqrt(square) for square in (norm.square, norm.together, norm.before)]
    rounded = torch.tensor(lengths, dtype=torch.float32).tolist()
    rest = [length - near for length, near in zip(lengths, rounded, strict=True)]
    return [norm.pieces, norm.samples_before, *rounded, *rest]


def _norm(place: list[float]) -> DeltaNorm:
    pieces, samples, *parts = place
    lengths = (near + rest for near, rest in zip(parts[:3], parts[3:], strict=True))
    square, together, before = (length * length for length in lengths)
    return DeltaNorm(square, int(pieces), together, before, int(samples))


def write(row: RankStatus, place: Tensor) -> None:
    """Put a row into its place in the table."""
    values = torch.tensor(numbers(row), dtype=place.dtype)
    place[: len(values)] = values


def read(place: list[float], *, norms: bool = False) -> RankStatus:
    """The row that was written, with norms or without."""
    flags, loss, *parts = place[:FIELDS]
    norm = _norm(place[FIELDS : FIELDS + NORMS]) if norms else None
    samples, entered = whole(parts[:DIGITS]), whole(parts[DIGITS:])
    bits = int(flags)
    return RankStatus(StatusKind(bits & 3), samples, bool(bits & 4), bool(bits & 8), loss, entered, norm)


def write_counters(counters: list[Tensor], place: Tensor) -> None:
    """Put whole-number buffers into the place behind a row, as digits."""
    if counters:
        flat = torch.cat([c.to(torch.int64) for c in counters])
        parts = torch.stack([flat & _MASK, (flat >> _BITS) & _MASK, flat >> (2 * _BITS)])
        place[:] = parts.flatten()


def read_counters(table: Tensor, present: list[int]) -> Tensor:
    """The largest of each counter among these ranks; the table is that of places behind rows."""
    parts = table[present].to(torch.int64).view(len(present), DIGITS, -1)
    return (parts[:, 0] + (parts[:, 1] << _BITS) + (parts[:, 2] << (2 * _BITS))).amax(dim=0)


PRECISE = (torch.float64, torch.float32)
"""What rows can be told in."""


class ReduceBuffer:
    """What one rank brings to an exchange, and what it takes home.

    Args:
        layout: of A, or of its running buffers alone where Δ does not travel with them.
        ranks: how many there are.
        norms: whether rows tell norms.
    """

    def __init__(self, layout: FlatLayout, ranks: int, *, norms: bool = False) -> None:
        blocks = (*layout.parameters, *(b for b in layout.buffers if b.dtype.is_floating_point))
        sizes: dict[torch.dtype, int] = {}
        starts = [_append(sizes, block) for block in blocks]
        self._counted = sum(b.elements for b in layout.buffers if not b.dtype.is_floating_point)
        self._norms, self._fields = norms, FIELDS + NORMS * norms
        width = self._fields + DIGITS * self._counted
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
        self.state = FlatState(layout, self._sums[:count], buffers)
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

    def tell(self, rank: int, row: RankStatus) -> None:
        """Fill in this rank's row, and no other."""
        self.table.zero_()
        write(row, self.table[rank])
        self.count(rank)

    def count(self, rank: int) -> None:
        """Fill in this rank's counters alone."""
        write_counters(self._counters, self.table[rank, self._fields :])

    def told(self) -> list[RankStatus]:
        """What all ranks have said."""
        return [read(numbers, norms=self._norms) for numbers in self.table[:, : self._fields].tolist()]

    def take_counters(self, ranks: list[int]) -> None:
        """Let the counters be the largest of these ranks'."""
        if self._counted:
            largest = torch.split(
                read_counters(self.table[:, self._fields :], ranks), [c.numel() for c in self._counters]
            )
            for mine, value in zip(self._counters, largest, strict=True):
                mine.copy_(value)

    def kept(self) -> list[Tensor]:
        """A copy of what this rank brings, for an exchange that has to be made again."""
        return [v.clone() for v in self.state.vectors]

    def bring_again(self, kept: list[Tensor]) -> None:
        """Bring what was kept."""
        torch._foreach_copy_(self.state.vectors, kept)


def _append(sizes: dict[torch.dtype, int], block: DtypeBuffer) -> int:
    start = sizes.get(block.dtype, 0)
    sizes[block.dtype] = start + block.elements
    return start


def _whole(block: DtypeBuffer) -> Tensor:
    return torch.zeros(block.elements, dtype=block.dtype)


def of_step(step: Clock) -> str:
    """What is waited for when ranks meet."""
    return f"the all-reduce of its step {step}"


class StatusSync(Protocol):
    """Where ranks meet."""

    def meet(self, row: RankStatus, step: Clock) -> list[RankStatus]:
        """One row of each replica; what this rank brought is summed where it has to be."""


class GradientSync:
    """Where ranks meet who bring a Δ of all of A.

    Args:
        freight: what this rank brings.
        vectors: what of it is summed here.
        rank: whose.
        traffic: None where nobody else is there.
    """

    def __init__(self, freight: ReduceBuffer, vectors: list[Tensor], rank: int, traffic: Communicator | None) -> None:
        self._freight, self._vectors, self._rank, self._traffic = freight, vectors, rank, traffic

    def meet(self, row: RankStatus, step: Clock) -> list[RankStatus]:
        """All ranks' rows; the vectors then hold the sum of what they brought."""
        self._freight.tell(self._rank, row)
        if self._traffic is not None:
            self._traffic.all_reduce(self._vectors, of_step(step))
        return self._freight.told()

"""What each rank says of itself in an exchange: a few numbers, added to the vector that is reduced anyway.

The table has a row for each rank. A rank fills its own and leaves the others zero, so their sum is the whole table::

    rank 0   | kind | samples | finite | stop | loss | when | counters |     + zeros
    rank 1     zeros                                                              + | kind | ...

Whole numbers that may be large lie in digits that float32 holds exactly.
"""

import math
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.core.types import Nanoseconds

_BITS = 22
_MASK = (1 << _BITS) - 1
DIGITS = 3
"""Of 22 bits each: a float32 holds 24, and three cover an int64."""


class Kind(IntEnum):
    """What a rank brings."""

    nothing = 0
    """Its replica has left."""
    delta = 1
    """A Δ, new or one that waits for its round."""
    farewell = 2
    """Its replica leaves."""


class Norm(NamedTuple):
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


class Row(NamedTuple):
    """One rank's."""

    kind: Kind
    samples: int
    finite: bool
    stop: bool
    """Whether it has been asked to end the run."""
    loss: float
    entered_ns: Nanoseconds
    """When it came to the exchange, since the run began."""
    norm: Norm | None = None
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


def numbers(row: Row) -> list[float]:
    """A row as it lies in the table."""
    flags = int(row.kind) + 4 * row.finite + 8 * row.stop
    norm = () if row.norm is None else _norm_numbers(row.norm)
    return [flags, row.loss, *digits(row.samples), *digits(row.entered_ns), *norm]


def _norm_numbers(norm: Norm) -> list[float]:
    """Lengths, which float32 has room for where it has none for their squares."""
    lengths = [math.sqrt(square) for square in (norm.square, norm.together, norm.before)]
    rounded = torch.tensor(lengths, dtype=torch.float32).tolist()
    rest = [length - near for length, near in zip(lengths, rounded, strict=True)]
    return [norm.pieces, norm.samples_before, *rounded, *rest]


def _norm(place: list[float]) -> Norm:
    pieces, samples, *parts = place
    lengths = (near + rest for near, rest in zip(parts[:3], parts[3:], strict=True))
    square, together, before = (length * length for length in lengths)
    return Norm(square, int(pieces), together, before, int(samples))


def write(row: Row, place: Tensor) -> None:
    """Put a row into its place in the table."""
    values = torch.tensor(numbers(row), dtype=place.dtype)
    place[: len(values)] = values


def read(place: list[float], *, norms: bool = False) -> Row:
    """The row that was written, with norms or without."""
    flags, loss, *parts = place[:FIELDS]
    norm = _norm(place[FIELDS : FIELDS + NORMS]) if norms else None
    samples, entered = whole(parts[:DIGITS]), whole(parts[DIGITS:])
    bits = int(flags)
    return Row(Kind(bits & 3), samples, bool(bits & 4), bool(bits & 8), loss, entered, norm)


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

"""What each rank says of itself in an exchange: a few numbers, added to the vector that is reduced anyway.

The table has a row for each rank. A rank fills its own and leaves the others zero, so their sum is the whole table::

    rank 0   | kind | samples | finite | stop | loss | when | counters |     + zeros
    rank 1     zeros                                                              + | kind | ...

Whole numbers that may be large lie in digits that float32 holds exactly.
"""

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


FIELDS = 2 + DIGITS * 2
"""Numbers in a row, counters aside."""


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
    return [flags, row.loss, *digits(row.samples), *digits(row.entered_ns)]


def write(row: Row, place: Tensor) -> None:
    """Put a row into its place in the table."""
    place[:FIELDS] = torch.tensor(numbers(row), dtype=place.dtype)


def read(place: list[float]) -> Row:
    """The row that was written."""
    flags, loss, *parts = place[:FIELDS]
    samples, entered = whole(parts[:DIGITS]), whole(parts[DIGITS:])
    bits = int(flags)
    return Row(Kind(bits & 3), samples, bool(bits & 4), bool(bits & 8), loss, entered)


def write_counters(counters: list[Tensor], place: Tensor) -> None:
    """Put whole-number buffers behind a row, as digits."""
    if counters:
        flat = torch.cat([c.to(torch.int64) for c in counters])
        parts = torch.stack([flat & _MASK, (flat >> _BITS) & _MASK, flat >> (2 * _BITS)])
        place[FIELDS:] = parts.flatten()


def read_counters(table: Tensor, present: list[int]) -> Tensor:
    """The largest of each counter among these ranks."""
    parts = table[present, FIELDS:].to(torch.int64).view(len(present), DIGITS, -1)
    return (parts[:, 0] + (parts[:, 1] << _BITS) + (parts[:, 2] << (2 * _BITS))).amax(dim=0)

"""The status of each rank in an exchange, as a row of numbers that an all-reduce spreads.

A rank fills its own row of a table and leaves the others zero, so the sum over ranks is the whole table::

    rank 0   | kind | samples | finite | stop | loss | when | counters |     + zeros
    rank 1     zeros                                                              + | kind | ...

Whole numbers that may be large are stored as digits that float32 represents exactly.
"""

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch

from paceline.core.types import Nanoseconds

# Bits of one digit of an integer: a float32 represents integers of 24 bits exactly.
BITS = 22

# Digits of an integer: three cover an int64.
DIGITS = 3

# Numbers in a status row, without norms and counters.
FIELDS = 2 + DIGITS * 2

# Numbers of a DeltaNorm in a row: two counts, and each of three norms in two parts.
NORMS = 8

MASK = (1 << BITS) - 1


class StatusKind(IntEnum):
    """The contribution of a rank to an exchange."""

    left = 0
    """None: its replica has left."""
    delta = 1
    """A Δ, new or one that waits for its round."""
    leaving = 2
    """None: its replica leaves now."""


_KINDS = tuple(StatusKind)


class DeltaNorm(NamedTuple):
    """Squared norms of a rank's Δ, over the elements that count on this rank.

    Args:
        square: of Δ, or the mean over its micro-steps where these were measured.
        parts: how many parts of Δ that is a mean of: 1, or its micro-steps; 0: nothing was measured.
        combined: of the combination of these: Δ itself, its mean with the previous Δ, or the sum of all replicas' Δs.
        previous: of the previous Δ, where that was kept.
        previous_samples: samples of the previous Δ; 0: none was kept.
    """

    square: float = 0.0
    parts: int = 0
    combined: float = 0.0
    previous: float = 0.0
    previous_samples: int = 0


class RankStatus(NamedTuple):
    """The metadata of a rank's contribution to an exchange.

    >>> a = RankStatus(StatusKind.delta, 4, finite=True, stop=False, loss=0.0, entered_ns=7)
    >>> b = RankStatus(StatusKind.delta, 4, finite=True, stop=True, loss=0.5, entered_ns=9, ends=True)
    >>> RankStatus.decode(b.encode()) == b
    True
    >>> RankStatus.merge([a, b]) == b
    True

    Args:
        finite: whether its Δ is; like the loss, that of the Δ before where losses are read late (``late_losses.py``).
        stop: whether the process was asked to end the run.
        saving: whether the process is still writing a checkpoint.
        joining: whether ranks that were started again ask to join.
        ends: whether a callback of this rank ends training.
        entered_ns: when it entered the exchange, in training time.
        norm: of its Δ; None: norms are not measured in this run.
    """

    kind: StatusKind
    samples: int
    finite: bool
    stop: bool
    loss: float
    entered_ns: Nanoseconds
    norm: DeltaNorm | None = None
    saving: bool = False
    joining: bool = False
    ends: bool = False

    def encode(self) -> list[float]:
        """Return the row of the status table."""
        flags = int(self.kind) + 4 * self.finite + 8 * self.stop + 16 * self.saving + 32 * self.joining + 64 * self.ends
        row = [flags, self.loss, *to_digits(self.samples), *to_digits(self.entered_ns)]
        if self.norm is not None:
            # Roots, since squares may exceed float32; what float32 rounds off a root is a second number.
            roots = [math.sqrt(square) for square in (self.norm.square, self.norm.combined, self.norm.previous)]
            rounded = torch.tensor(roots, dtype=torch.float32).tolist()
            rests = [root - near for root, near in zip(roots, rounded, strict=True)]
            row += [self.norm.parts, self.norm.previous_samples, *rounded, *rests]
        return row

    @classmethod
    def decode(cls, row: Sequence[float], *, norms: bool = False) -> "RankStatus":
        """Rebuild the status from its row, with norms or without."""
        packed, loss, *integers = row[:FIELDS]
        flags, norm = int(packed), None
        if norms:
            parts, previous_samples, *roots = row[FIELDS : FIELDS + NORMS]
            lengths = [near + rest for near, rest in zip(roots[:3], roots[3:], strict=True)]
            square, combined, previous = (length * length for length in lengths)
            norm = DeltaNorm(square, int(parts), combined, previous, int(previous_samples))
        kind, finite, stop = _KINDS[flags & 3], flags & 4 > 0, flags & 8 > 0
        samples, entered_ns = from_digits(integers[:DIGITS]), from_digits(integers[DIGITS:])
        return cls(kind, samples, finite, stop, loss, entered_ns, norm, flags & 16 > 0, flags & 32 > 0, flags & 64 > 0)

    @staticmethod
    def merge(parts: Sequence["RankStatus"]) -> "RankStatus":
        """Combine the statuses of a replica's ranks to the replica's; the last rank knows the loss."""
        last, norms = parts[-1], [part.norm for part in parts if part.norm is not None]
        norm = None
        if norms:  # each rank measures its own elements, so squares add up
            square, combined, previous = (
                sum(column) for column in zip(*((n[0], n[2], n[3]) for n in norms), strict=True)
            )
            norm = DeltaNorm(square, norms[-1].parts, combined, previous, norms[-1].previous_samples)
        finite, stop = all(part.finite for part in parts), any(part.stop for part in parts)
        saving, ends = any(part.saving for part in parts), any(part.ends for part in parts)
        entered_ns = max(part.entered_ns for part in parts)
        return RankStatus(last.kind, last.samples, finite, stop, last.loss, entered_ns, norm, saving, ends=ends)


def to_digits(number: int) -> list[int]:
    """Split an integer into digits that a float32 represents exactly, the lowest first.

    >>> to_digits(5 + (7 << 22)), to_digits(-1)
    ([5, 7, 0], [4194303, 4194303, -1])
    """
    return [number & MASK, (number >> BITS) & MASK, number >> (2 * BITS)]


def from_digits(digits: Sequence[float]) -> int:
    """Return the integer of these digits.

    >>> from_digits(to_digits(-(2**60) + 3)) == -(2**60) + 3
    True
    """
    low, middle, high = digits
    return int(low) + (int(middle) << BITS) + (int(high) << (2 * BITS))


def by_replica(statuses: Sequence[RankStatus], replicas: int) -> list[RankStatus]:
    """Merge the statuses of all ranks to one for each replica, whose ranks are neighbours."""
    each = len(statuses) // replicas
    return [RankStatus.merge(statuses[start : start + each]) for start in range(0, len(statuses), each)]

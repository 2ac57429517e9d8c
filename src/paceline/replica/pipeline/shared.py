"""What units share, and how much of it each run of units holds or receives."""

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

BEFORE = -1
"""Made before the first unit."""

Vector: TypeAlias = NDArray[np.float64]
"""Bytes; float64 has them exactly up to 2^53."""


@dataclass(frozen=True, slots=True)
class Item:
    """Something that a part has once, however many of its units use it."""

    nbytes: int
    uses: tuple[int, ...]
    """Units."""
    made: int = BEFORE
    """The unit that makes it: the part with this unit does not count."""


def condense(items: Iterable[Item], starts: Sequence[int]) -> list[Item]:
    """The same items where units are runs of units that begin at ``starts``.

    >>> condense([Item(8, (1, 4, 5), made=0)], [0, 2, 4])
    [Item(nbytes=8, uses=(0, 2), made=0)]
    """

    def run(unit: int) -> int:
        return bisect.bisect(starts, unit) - 1

    return [replace(item, uses=tuple(sorted({run(use) for use in item.uses})), made=run(item.made)) for item in items]


class Rolling:
    """Bytes that parts (a, b) have, for all a < b at once and b growing by one at a time.

    A part (a, b) is units a .. b - 1. An item counts for it where made < a and a <= its last use before b. So unit
    b - 1, using it, adds its bytes to all a from the use before (or from where it is made) + 1 to b - 1.
    """

    def __init__(self, items: Sequence[Item], count: int) -> None:
        self._items = items
        self._last = [item.made for item in items]
        self._row = np.zeros(count)
        self._users: list[list[int]] = [[] for _ in range(count)]
        for index, item in enumerate(items):
            for use in item.uses:
                self._users[use].append(index)

    def upto(self, b: int) -> Vector:
        """The bytes of parts (0, b), ..., (b - 1, b); b must be one more than in the call before."""
        for index in self._users[b - 1]:
            self._row[self._last[index] + 1 : b] += self._items[index].nbytes
            self._last[index] = b - 1
        return self._row[:b]

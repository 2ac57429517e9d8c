"""How a vector is cut among those who step on it, each on a piece: numbers alone."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeAlias

Cut: TypeAlias = tuple[int, ...]
"""Where the pieces of a vector begin, and where the last one ends."""


class Equal(NamedTuple):
    """Pieces of one length, and what is left over."""

    each: int
    """Elements of a piece."""
    left: int
    """Fewer than there are pieces; all have them."""

    @classmethod
    def of(cls, elements: int, pieces: int) -> "Equal":
        """Those of a vector.

        >>> Equal.of(14, 3), sum(Equal.of(14, 3))
        (Equal(each=4, left=2), 6)
        """
        return cls(*divmod(elements, pieces))


def at_borders(sizes: Sequence[int], pieces: int) -> Cut:
    """Whole tensors: each begins a piece once those before it hold their share.

    >>> at_borders([4, 1, 1, 6], 3), lengths(at_borders([4, 1, 1, 6], 3))
    ((0, 4, 6, 12), [4, 2, 6])
    """
    borders = list(accumulate(sizes, initial=0))
    wanted = (borders[-1] * piece / pieces for piece in range(1, pieces))
    inner = [min(borders, key=lambda border: abs(border - w)) for w in wanted]
    return (0, *accumulate(inner, max), borders[-1])


def lengths(cut: Cut) -> list[int]:
    """Elements of each piece."""
    return [stop - start for start, stop in pairwise(cut)]

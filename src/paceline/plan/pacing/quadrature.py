"""The integral from 0 to infinity of a function that falls from 1 to 0, to a part in 10^10.

Between the marks and beyond the last of them in pieces that double: each is halved until halving it changes nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import inf
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(16)
_PRECISION = 1e-10
_HALVINGS = 40


def integral(function: Callable[[Floats], Floats], marks: Sequence[float]) -> float:
    """∫_0^∞ function.

    Args:
        function: of many points at once; at most 1, and falling faster than 1/x in the end.
        marks: above 0, growing: where it bends or jumps; the last is where its tail begins.

    >>> round(integral(lambda x: np.exp(-x), [1.0]), 9)
    1.0
    >>> round(integral(lambda x: (1 + x) ** -1.5, [1.0]), 7)
    2.0
    """
    ends = [0.0, *_doubled(marks or [1.0])]
    total = 0.0
    for a, b in pairwise(ends):
        total += _piece(function, a, b, total)
    return total + _tail(function, ends[-1], total)


def _doubled(marks: Sequence[float]) -> Iterator[float]:
    """The marks and what lies between them, none more than twice the one before it."""
    for mark, following in pairwise([*marks, marks[-1]]):
        yield mark
        while 2 * mark < following:
            mark *= 2
            yield mark


def _tail(function: Callable[[Floats], Floats], start: float, before: float) -> float:
    """Pieces that double, until one adds too little; what is beyond it falls as the last two did."""
    total, last, width, beyond = 0.0, 0.0, start or 1.0, inf
    while beyond > _PRECISION * (before + total) and start + width < _FAR:
        piece = _piece(function, start, start + width, before + total)
        beyond = _geometric(piece, last)
        total, last, start, width = total + piece, piece, start + width, 2 * width
    return total + beyond


def _geometric(piece: float, last: float) -> float:
    """All that would follow if each piece were to the one before it as this one is: infinite where they don't fall."""
    if piece == 0:
        return 0.0
    return piece * piece / (last - piece) if last > piece else inf


_FAR = 1e300
"""Near the end of the doubles."""


def _piece(function: Callable[[Floats], Floats], a: float, b: float, before: float) -> float:
    """From a to b, to a part of all until b."""
    first = _gauss(function, a, b)
    waiting, total, error = [(a, b, first, 0)], 0.0, _PRECISION * (before + first)
    while waiting:
        left, right, whole, halvings = waiting.pop()
        middle = (left + right) / 2
        halves = _gauss(function, left, middle), _gauss(function, middle, right)
        if abs(sum(halves) - whole) <= error or halvings == _HALVINGS:
            total += sum(halves)
        else:
            waiting += [(left, middle, halves[0], halvings + 1), (middle, right, halves[1], halvings + 1)]
    return total


def _gauss(function: Callable[[Floats], Floats], a: float, b: float) -> float:
    half = (b - a) / 2
    return half * float(_WEIGHTS @ function(a + half * (1 + _NODES)))

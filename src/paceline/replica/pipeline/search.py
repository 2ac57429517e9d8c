"""The best way to cut a row into contiguous non-empty parts, by dynamic programming."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from paceline.replica.pipeline.shared import Vector


@dataclass(frozen=True)
class Ends:
    """What parts that end before unit b cost: a column for each first unit ``low`` .. b - 1.

    Each array has one row, or one for each part's number; infinite where such a part is not allowed.
    """

    low: int
    added: Vector
    """Costs that add up over parts."""
    worst: Vector
    """Costs of which the largest counts."""


def search(count: int, parts: int, ends: Iterable[Ends]) -> tuple[float, tuple[int, ...]] | None:
    """The cut with the least sum of ``added`` and, of several such, the least maximum of ``worst``.

    With (s, w)_k(b) for the best cut of units 0 .. b - 1 into k parts, (s, w)_k(b) is the least, over the first unit a
    of the last part, of (s_{k-1}(a) + added, max(w_{k-1}(a), worst)). A best cut's beginning is itself best: a smaller
    sum would make the whole sum smaller, and so would, of equal sums, a smaller maximum.

    Args:
        count: n, units.
        parts: p.
        ends: for b = 1 .. n.

    Returns:
        The maximum and the units that begin parts 1 .. p - 1; None where no cut is allowed.
    """
    added = np.full((parts + 1, count + 1), np.inf)
    worst = np.full((parts + 1, count + 1), np.inf)
    first = np.zeros((parts + 1, count + 1), dtype=np.int64)
    added[0, 0] = worst[0, 0] = 0
    rows = np.arange(parts)
    for b, end in enumerate(ends, start=1):
        sums = added[:parts, end.low : b] + end.added
        least = sums.min(axis=1)
        slow = np.where(sums == least[:, None], np.maximum(worst[:parts, end.low : b], end.worst), np.inf)
        at = slow.argmin(axis=1)
        added[1:, b], worst[1:, b], first[1:, b] = least, slow[rows, at], end.low + at
    if np.isinf(added[parts, count]):
        return None
    return float(worst[parts, count]), _path(first, count, parts)


def _path(first: np.ndarray[tuple[int, ...], np.dtype[np.int64]], count: int, parts: int) -> tuple[int, ...]:
    cuts = [count]
    for part in range(parts, 1, -1):
        cuts.append(int(first[part, cuts[-1]]))
    return tuple(reversed(cuts[1:]))

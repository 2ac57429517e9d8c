"""Partition a row of items into contiguous parts, none slower than it has to be.

Where to cut a row of layers whose times hang on the part they fall to, so that the slowest part is quick as can be.

::

    f_1(e) = S_1(e) / n_1
    f_k(e) = min over s < e of max(f_{k-1}(s), (S_k(e) - S_k(s)) / n_k)        S_k: sums of what layers take in part k

How a vector is cut among those who step on it, each on a piece: numbers alone.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import nextafter
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import InputError
from paceline.core.types import Seconds

Ends: TypeAlias = list[int]
"""Where each part ends, the last one at the last layer."""

Probe: TypeAlias = Callable[[Seconds], tuple[Ends | None, Seconds]]
"""A time -> a partition that takes no longer, or None and how long it takes at least."""


def balanced(seconds: Sequence[Seconds], parts: int, turns: Sequence[int] = ()) -> tuple[int, ...]:
    """The first layer of each part after the first, each of at least one layer; exact.

    What is looked for is the least time T within which p parts can be done: by halving, then from each partition that
    is found to the next quicker one, until there is none.

    Args:
        seconds: of each layer.
        parts: p, at most as many as layers.
        turns: n_j, how many take turns at each part, which then counts as so many times faster; empty: one at each.

    Raises:
        InputError: fewer layers than parts, or turns of another number of parts.

    >>> balanced([1, 2, 1, 3, 1, 2, 2], 3)
    (3, 5)
    >>> balanced([1, 5, 1, 1], 3, (4, 1, 2))
    (2, 3)
    """
    turns = tuple(turns) or (1,) * parts
    _refuse(len(seconds), parts, turns)
    sums = [0.0, *accumulate(seconds)]
    within = _even(sums, max(seconds), turns) if len(set(turns)) == 1 else _uneven(sums, turns)
    return tuple(_quickest(within, sums, turns)[:-1])


def _refuse(layers: int, parts: int, turns: Sequence[int]) -> None:
    if not 1 <= parts <= layers:
        raise InputError(f"{layers} layers can't be cut into {parts} parts; write 1 to {layers} stages.")
    if len(turns) != parts:
        raise InputError(f"turns of {len(turns)} parts, but there are {parts}; write {parts} numbers.")


def _quickest(within: Probe, sums: Sequence[Seconds], turns: Sequence[int]) -> Ends:
    """Between what is known to be too quick and what is known to do, both moved to times that parts can take."""
    low, high = sums[-1] / sum(turns), sums[-1]
    best, _ = within(high)
    assert best is not None, "all layers together take as long as all of them"
    high = slowest(sums, best, turns)
    while high - low > _CLOSE * high:
        found, next_s = within((low + high) / 2)
        if found is None or slowest(sums, found, turns) >= high:  # the latter where sums are rounded
            low = next_s
        else:
            best, high = found, slowest(sums, found, turns)
    while (found := within(nextafter(high, 0.0))[0]) is not None and slowest(sums, found, turns) < high:
        best, high = found, slowest(sums, found, turns)
    return best


_CLOSE = 1e-12
"""What halving leaves; a handful of partitions may lie closer to each other, which are then gone through."""


def slowest(sums: Sequence[Seconds], ends: Sequence[int], turns: Sequence[int]) -> Seconds:
    """What the slowest part takes of layers whose times have these prefix sums."""
    return max((sums[end] - sums[start]) / n for (start, end), n in zip(pairwise([0, *ends]), turns, strict=True))


def _even(sums: Sequence[Seconds], longest_layer: Seconds, turns: Sequence[int]) -> Probe:
    """Each part takes as many layers as can be done in time, and leaves one for each part to come.

    Ends that are further on are never worse here, for no layer takes too long for one part but not for another. Where
    not all are taken, it takes at least the time in which some part could take one layer more.
    """
    layers, parts, many = len(sums) - 1, len(turns), turns[0]

    def within(longest: Seconds) -> tuple[Ends | None, Seconds]:
        if longest * many < longest_layer:
            return None, longest_layer / many
        ends, more = [0], sums[-1]
        for left in range(parts - 1, -1, -1):
            start = ends[-1]
            reached = bisect_right(sums, (sums[start] + longest * many) * _ROUNDING) - 1
            ends.append(min(max(start + 1, reached), layers - left))
            if ends[-1] < layers:
                more = min(more, sums[ends[-1] + 1] - sums[start])
        return (ends[1:], longest) if ends[-1] == layers else (None, max(longest, more / many))

    return within


def _uneven(sums: Sequence[Seconds], turns: Sequence[int]) -> Probe:
    """All ends that can be reached, part by part, as a layer may be too long for one part but not for the next.

    Where the last is not among them, it takes at least the time in which a part that was begun could take one more.
    """
    row = np.asarray(sums)

    def within(longest: Seconds) -> tuple[Ends | None, Seconds]:
        reach = {n: np.searchsorted(row, (row + longest * n) * _ROUNDING, side="right") - 1 for n in set(turns)}
        reached = [np.arange(len(row)) == 0]
        for n in turns:
            reached.append(_next(reached[-1], reach[n]))
        if reached[-1][-1]:
            return _back(reached, [reach[n] for n in turns]), longest
        more = min(_more(row, starts, reach[n]) / n for starts, n in zip(reached, turns, strict=False))
        return None, max(longest, more)

    return within


def _more(row: NDArray[np.float64], starts: NDArray[np.bool_], reach: NDArray[np.int64]) -> Seconds:
    """From some start to one layer beyond what can be reached from it."""
    [begin] = np.nonzero(starts & (reach < len(row) - 1))
    return float(np.min(row[reach[begin] + 1] - row[begin], initial=row[-1]))


_ROUNDING = 1 + 4e-16
"""A sum that is rounded otherwise than the difference that it stands for may not be left out."""


def _next(starts: NDArray[np.bool_], reach: NDArray[np.int64]) -> NDArray[np.bool_]:
    """From start a, a part may end at a + 1 to reach[a]."""
    [begin] = np.nonzero(starts & (reach > np.arange(len(reach))))
    size = len(reach) + 1
    change = np.bincount(begin + 1, minlength=size) - np.bincount(reach[begin] + 1, minlength=size)
    return np.cumsum(change)[:-1] > 0


def _back(reached: Sequence[NDArray[np.bool_]], reach: Sequence[NDArray[np.int64]]) -> Ends:
    """One way to the last layer, from there back."""
    ends = [len(reached[0]) - 1]
    for before, limit in zip(reached[-2:0:-1], reach[:0:-1], strict=True):
        [starts] = np.nonzero(before[: ends[-1]] & (limit[: ends[-1]] >= ends[-1]))
        ends.append(int(starts[-1]))
    return ends[::-1]


def balanced_unlike(seconds: Sequence[Sequence[Seconds]], turns: Sequence[int] = ()) -> tuple[int, ...]:
    """The first layer of each part after the first, each of at least one layer; exact, in time p · layers².

    Args:
        seconds: of each layer, for each of the p parts.
        turns: n_k, how many take turns at each part, which then counts as so many times faster; empty: one at each.

    Raises:
        InputError: fewer layers than parts.

    >>> balanced_unlike([[1, 1, 1, 1], [3, 3, 3, 3]])  # 3 layers at 1, then one at 3
    (3,)
    """
    layers, parts = len(seconds[0]), len(seconds)
    if parts > layers:
        raise InputError(f"{layers} layers can't be cut into {parts} parts; write 1 to {layers} stages.")
    sums = [np.array([0.0, *accumulate(row)]) / n for row, n in zip(seconds, turns or (1,) * parts, strict=True)]
    ends, begun = np.where(np.arange(layers + 1) == 0, np.inf, sums[0]), list[NDArray[np.intp]]()
    for row in sums[1:]:
        slowest = np.maximum(ends[:, None], row[None, :] - row[:, None])
        slowest[np.tril_indices(layers + 1)] = np.inf
        begun.append(slowest.argmin(axis=0))
        ends = slowest.min(axis=0)
    return _back_unlike(begun, layers)


def _back_unlike(begun: Sequence[NDArray[np.intp]], last: int) -> tuple[int, ...]:
    cuts = list[int]()
    for starts in reversed(begun):
        last = int(starts[last])
        cuts.append(last)
    return tuple(reversed(cuts))


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

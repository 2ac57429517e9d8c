"""Partition a row of items into contiguous parts so that the most expensive part costs as little as it can.

Three cases, each exact:

- :func:`balanced`: a part costs the sum of its items, divided by the number of replicas that share it. By bisection on
  the cost with a greedy probe, so that thousands of layers take milliseconds.
- :func:`balanced_unlike`: what an item costs depends on the part that it falls to.
- :func:`best_partition`: any costs, of which some add up over parts and of others the largest counts; parts that are
  not allowed cost infinity. By dynamic programming.

And :func:`cut_at_borders` for a vector of whole tensors. Items are layers of a model for the planner, units of a graph
for a pipeline; costs are seconds or bytes.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import nextafter
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import InputError
from paceline.core.types import Seconds

# Where each part ends, the last one at the last layer.
Ends: TypeAlias = list[int]

# A time -> a partition that takes no longer; or None, and the least time that a partition can take.
Probe: TypeAlias = Callable[[Seconds], tuple[Ends | None, Seconds]]

# What bisection leaves; a handful of partitions may be closer to each other, which are then tried one by one.
_CLOSE = 1e-12

# A sum that is rounded otherwise than the difference that it stands for may not be left out.
_ROUNDING = 1 + 4e-16


def balanced(seconds: Sequence[Seconds], parts: int, replicas: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the first layer of each part after the first; each part has at least one layer.

    The least time within which the slowest part can be done is found by bisection; from there each partition leads to
    the next faster one, until there is none.

    Args:
        seconds: of each layer.
        parts: p, at most as many as layers.
        replicas: n_j, the replicas of each part, which is then n_j times faster; empty: one of each.

    Raises:
        InputError: fewer layers than parts, or replicas of another number of parts.

    >>> balanced([1, 2, 1, 3, 1, 2, 2], 3)
    (3, 5)
    >>> balanced([1, 5, 1, 1], 3, (4, 1, 2))
    (2, 3)
    """
    replicas = tuple(replicas) or (1,) * parts
    _check_parts(len(seconds), parts)
    if len(replicas) != parts:
        raise InputError(f"turns of {len(replicas)} parts, but there are {parts}; write {parts} numbers.")
    sums = [0.0, *accumulate(seconds)]
    equal = len(set(replicas)) == 1
    probe = _probe_equal(sums, max(seconds), replicas) if equal else _probe_unequal(sums, replicas)
    # low: no partition is faster. high: what best takes. Both move to times that parts can take.
    low, high = sums[-1] / sum(replicas), sums[-1]
    best, _ = probe(high)
    assert best is not None, "all layers together take as long as all of them"
    high = slowest(sums, best, replicas)
    while high - low > _CLOSE * high:
        ends, bound = probe((low + high) / 2)
        if ends is None or slowest(sums, ends, replicas) >= high:  # the latter if sums are rounded
            low = bound
        else:
            best, high = ends, slowest(sums, ends, replicas)
    while (ends := probe(nextafter(high, 0.0))[0]) is not None and slowest(sums, ends, replicas) < high:
        best, high = ends, slowest(sums, ends, replicas)
    return tuple(best[:-1])


def _check_parts(layers: int, parts: int) -> None:
    if not 1 <= parts <= layers:
        raise InputError(f"{layers} layers can't be cut into {parts} parts; write 1 to {layers} stages.")


def slowest(sums: Sequence[Seconds], ends: Sequence[int], replicas: Sequence[int]) -> Seconds:
    """Return the time of the slowest part, given prefix sums of the layers' times."""
    return max((sums[end] - sums[start]) / n for (start, end), n in zip(pairwise([0, *ends]), replicas, strict=True))


def _probe_equal(sums: Sequence[Seconds], longest_layer: Seconds, replicas: Sequence[int]) -> Probe:
    """Give each part as many layers as fit, leaving one for each part to come.

    An end further on is never worse here, for a layer that fits into one part fits into any. If layers are left over,
    a partition takes at least the time in which some part could take one layer more.
    """
    layers, parts, n = len(sums) - 1, len(replicas), replicas[0]

    def probe(bound: Seconds) -> tuple[Ends | None, Seconds]:
        if bound * n < longest_layer:
            return None, longest_layer / n
        ends, more = [0], sums[-1]
        for left in range(parts - 1, -1, -1):
            start = ends[-1]
            reached = bisect_right(sums, (sums[start] + bound * n) * _ROUNDING) - 1
            ends.append(min(max(start + 1, reached), layers - left))
            if ends[-1] < layers:
                more = min(more, sums[ends[-1] + 1] - sums[start])
        return (ends[1:], bound) if ends[-1] == layers else (None, max(bound, more / n))

    return probe


def _probe_unequal(sums: Sequence[Seconds], replicas: Sequence[int]) -> Probe:
    """Mark all ends that can be reached, part by part, as a layer may not fit into one part but into the next.

    If the last layer is not among them, a partition takes at least the time in which a part that can begin somewhere
    could take one layer more.
    """
    row, layers = np.asarray(sums), np.arange(len(sums))

    def probe(bound: Seconds) -> tuple[Ends | None, Seconds]:
        reach = {n: np.searchsorted(row, (row + bound * n) * _ROUNDING, side="right") - 1 for n in set(replicas)}
        reached: list[NDArray[np.bool_]] = [layers == 0]
        for n in replicas:
            # From start a, a part may end at a + 1 to reach[a]: one interval opens and one closes.
            [begin] = np.nonzero(reached[-1] & (reach[n] > layers))
            opens = np.bincount(begin + 1, minlength=len(row) + 1)
            closes = np.bincount(reach[n][begin] + 1, minlength=len(row) + 1)
            reached.append(np.cumsum(opens - closes)[:-1] > 0)
        if reached[-1][-1]:
            ends = [len(row) - 1]
            for before, n in zip(reached[-2:0:-1], replicas[:0:-1], strict=True):
                [starts] = np.nonzero(before[: ends[-1]] & (reach[n][: ends[-1]] >= ends[-1]))
                ends.append(int(starts[-1]))
            return ends[::-1], bound
        least = row[-1]
        for starts_here, n in zip(reached, replicas, strict=False):
            [begin] = np.nonzero(starts_here & (reach[n] < len(row) - 1))
            more = np.min(row[reach[n][begin] + 1] - row[begin], initial=row[-1])
            least = min(least, float(more) / n)
        return None, max(bound, least)

    return probe


def balanced_unlike(seconds: Sequence[Sequence[Seconds]], replicas: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the first layer of each part after the first; each part has at least one layer.

    Args:
        seconds: of each layer, for each of the p parts.
        replicas: n_k, the replicas of each part, which is then n_k times faster; empty: one of each.

    Raises:
        InputError: fewer layers than parts.

    >>> balanced_unlike([[1, 1, 1, 1], [3, 3, 3, 3]])  # 3 layers at 1, then one at 3
    (3,)
    """
    layers, parts = len(seconds[0]), len(seconds)
    _check_parts(layers, parts)
    sums = [np.array([0.0, *accumulate(row)]) / n for row, n in zip(seconds, replicas or (1,) * parts, strict=True)]
    # The recurrence of best_partition for a maximum alone, f_k(b) = min over a < b of max(f_{k-1}(a), S_k(b) - S_k(a)),
    # for all ends b of part k at once: several times faster for the few parts and many layers of a planner's search.
    best, begins = np.where(np.arange(layers + 1) == 0, np.inf, sums[0]), list[NDArray[np.intp]]()
    for row in sums[1:]:
        longest = np.maximum(best[:, None], row[None, :] - row[:, None])
        longest[np.tril_indices(layers + 1)] = np.inf
        begins.append(longest.argmin(axis=0))
        best = longest.min(axis=0)
    cuts = [layers]
    for begin in reversed(begins):
        cuts.append(int(begin[cuts[-1]]))
    return tuple(reversed(cuts[1:]))


@dataclass(frozen=True)
class PartCosts:
    """Costs of the parts that end before item b: a column for each first item ``low`` .. b - 1.

    Each array has one row, or one for each part's number; infinite if such a part is not allowed.
    """

    low: int
    added: NDArray[np.float64]
    """Costs that add up over parts."""
    worst: NDArray[np.float64]
    """Costs of which the largest counts."""


def best_partition(count: int, parts: int, costs: Iterable[PartCosts]) -> tuple[float, tuple[int, ...]] | None:
    """Find the partition with the least sum of ``added`` and, of several such, the least maximum of ``worst``.

    With (s, w)_k(b) for the best partition of items 0 .. b - 1 into k parts, (s, w)_k(b) is the least, over the first
    item a of the last part, of (s_{k-1}(a) + added, max(w_{k-1}(a), worst)). The beginning of a best partition is
    itself best: a smaller sum would make the whole sum smaller, and so would, of equal sums, a smaller maximum.

    Args:
        count: n, items.
        parts: p.
        costs: for b = 1 .. n.

    Returns:
        The maximum and the items that begin parts 1 .. p - 1; None if no partition is allowed.
    """
    added = np.full((parts + 1, count + 1), np.inf)
    worst = np.full((parts + 1, count + 1), np.inf)
    first = np.zeros((parts + 1, count + 1), dtype=np.int64)
    added[0, 0] = worst[0, 0] = 0
    rows = np.arange(parts)
    for b, cost in enumerate(costs, start=1):
        sums = added[:parts, cost.low : b] + cost.added
        least = sums.min(axis=1)
        slow = np.where(sums == least[:, None], np.maximum(worst[:parts, cost.low : b], cost.worst), np.inf)
        at = slow.argmin(axis=1)
        added[1:, b], worst[1:, b], first[1:, b] = least, slow[rows, at], cost.low + at
    if np.isinf(added[parts, count]):
        return None
    cuts = [count]
    for part in range(parts, 1, -1):
        cuts.append(int(first[part, cuts[-1]]))
    return float(worst[parts, count]), tuple(reversed(cuts[1:]))


def cut_at_borders(sizes: Sequence[int], pieces: int) -> tuple[int, ...]:
    """Cut a vector of whole tensors: each begins a piece once those before it hold their share.

    Args:
        sizes: elements of each tensor, in order.
        pieces: how many; some may be empty.

    Returns:
        Where each piece begins, and where the last one ends.

    >>> cut_at_borders([4, 1, 1, 6], 3)
    (0, 4, 6, 12)
    """
    borders = list(accumulate(sizes, initial=0))
    shares = (borders[-1] * piece / pieces for piece in range(1, pieces))
    inner = [min(borders, key=lambda border: abs(border - share)) for share in shares]
    return (0, *accumulate(inner, max), borders[-1])

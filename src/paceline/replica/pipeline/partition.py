"""What units share, and how much of it each run of units holds or receives.

Where to cut a row of units into p parts: the slowest part as fast as can be, then as few bytes sent as can be.

::

    seconds      1    2    1 |  3    1 |  2    2        p = 3: parts of 4, 4 and 4 seconds
    values            o------|---------|--->            made by unit 1, used by unit 5: sent once, to part 2
    boundaries               3         5
"""

import bisect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import InputError, unknown
from paceline.core.partitioning import PartCosts, best_partition
from paceline.core.types import Seconds

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


Boundaries: TypeAlias = tuple[int, ...]
"""The units that parts 1, 2, ... begin with, ascending."""

NOISE = 0.01
"""Two measurements of one part differ by as much on quiet cores, so times that are nearer to each other are equal."""


@dataclass(frozen=True)
class CutRow:
    """What is known about each unit of a model, in order, and about what they share."""

    seconds: Sequence[Seconds]
    """Of each unit, forward and backward."""
    values: Sequence[Item] = ()
    """What units make for later ones: each part that uses one and did not make it receives it once."""
    held: Sequence[Item] = ()
    """Parameters: each part that uses one holds it."""
    saved: Sequence[Item] = ()
    """What is saved for backward, once for each micro-batch in flight."""


@dataclass(frozen=True)
class Limit:
    """Memory that no part may exceed: ``copies`` · what it holds + ``in_flight`` · what it saves of one micro-batch."""

    nbytes: int
    in_flight: Sequence[int]
    """Of each part, how many micro-batches it keeps at most."""
    copies: int = 1
    """How many times a parameter is held: with its gradient 2, with Adam's two moments 4."""


def partition(
    row: CutRow,
    parts: int,
    *,
    candidates: Sequence[int] | None = None,
    limit: Limit | None = None,
    turns: Sequence[int] = (),
) -> Boundaries:
    """The best boundaries for the given costs.

    T is the least time that the slowest part can have. Among the cuts whose slowest part takes at most 1.01 · T, one
    that sends fewest bytes is chosen, and of several such the fastest. Exact, by dynamic programming: with the best
    value f_k(b) of cutting units 0 .. b - 1 into k parts, f_k(b) = min over a of f_{k-1}(a) joined with what the part
    of units a .. b - 1 adds. Time O(p·n²), memory O(p·n) for n units.

    Args:
        row: the costs.
        parts: p, at least 1.
        candidates: which units may begin parts 1, 2, ...; by default all.
        limit: of memory.
        turns: how many take turns at each part, which then counts as so many times faster; empty: one at each.

    Raises:
        InputError: the parts are more than the places to cut allow, or the limit can't be met.

    >>> partition(CutRow([1, 2, 1, 3, 1, 2, 2]), 3)
    (3, 5)
    >>> partition(CutRow([1, 1, 1, 1], values=[Item(8, uses=(2, 3), made=1)]), 2, candidates=[1, 2])
    (2,)
    >>> partition(CutRow([1, 1, 1, 1]), 2, turns=(3, 1))
    (3,)
    """
    starts = [0, *sorted(set(range(1, len(row.seconds)) if candidates is None else candidates))]
    _enough(parts, len(starts), len(row.seconds))
    costs = _Costs(row, starts, limit, turns or (1,) * parts)
    slowest = costs.slowest(parts)
    if slowest is None:
        assert limit is not None, "time alone forbids nothing"
        raise _unmet(limit, *costs.neediest(parts))
    return tuple(starts[cut] for cut in costs.lightest(parts, slowest * (1 + NOISE)))


def named(cuts: Sequence[str], parts: int, modules: Mapping[str, int], nodes: Mapping[str, int]) -> Boundaries:
    """The boundaries that a user has written.

    Args:
        cuts: names of what parts 1, 2, ... begin with: full names of modules, or names of nodes of the graph.
        parts: p.
        modules: full name of a module -> the first unit that comes from it.
        nodes: name of a node -> its unit.

    Raises:
        InputError: a name is unknown, the names are out of order, too many or too few, or a part would be empty.

    >>> named(["layers.2", "head"], 3, {"layers.0": 0, "layers.2": 4, "head": 6}, {})
    (4, 6)
    """
    for name in cuts:
        if name not in modules and name not in nodes:
            raise unknown("module or node in cuts", name, modules)
    if len(cuts) != parts - 1:
        raise InputError(
            f"cuts={tuple(cuts)} names where {len(cuts)} stages begin, but of stages={parts} all after the first begin "
            f"somewhere; write stages={len(cuts) + 1} or name {parts - 1}"
        )
    begin = [modules[name] if name in modules else nodes[name] for name in cuts]
    for (before, first), (after, second) in pairwise([("the model", 0), *zip(cuts, begin, strict=True)]):
        if second < first:
            right = tuple(sorted(cuts, key=lambda name: begin[cuts.index(name)]))
            raise InputError(f"cuts={tuple(cuts)}: {after!r} comes before {before!r} in the model; write cuts={right}")
        if second == first:
            raise InputError(
                f"cuts={tuple(cuts)}: {before!r} and {after!r} begin with the same operation, so the stage between "
                "them would be empty; name a module further on"
            )
    return tuple(begin)


class _Costs:
    """What runs of units cost, between places where they may be cut."""

    def __init__(self, row: CutRow, starts: Sequence[int], limit: Limit | None, turns: Sequence[int]) -> None:
        self._count, self._limit = len(starts), limit
        runs = [math.fsum(row.seconds[a:b]) for a, b in pairwise([*starts, len(row.seconds)])]
        self._longest = max(runs)
        self._turns = np.array(turns, dtype=np.float64)[:, None]
        self._time = np.array([0.0, *accumulate(runs)])
        self._values, self._held, self._saved = (condense(each, starts) for each in (row.values, row.held, row.saved))

    def slowest(self, parts: int) -> Seconds | None:
        """The least time that the slowest of so many parts can have; None where none has memory enough."""
        # Parts filled until they reach the mean are slower than it by less than a run; only memory may ask for slower.
        for bound in (self._time[-1] / float(self._turns.sum()) + self._longest, math.inf):
            found = best_partition(self._count, parts, self._ends(bound))
            if found is not None:
                return found[0]
        return None

    def lightest(self, parts: int, bound: Seconds) -> tuple[int, ...]:
        """Where to cut into parts within ``bound`` so that fewest bytes are sent."""
        found = best_partition(self._count, parts, self._ends(bound, self._values))
        assert found is not None, "the fastest cut is one"
        return found[1]

    def neediest(self, parts: int) -> tuple[int, int]:
        """The memory of the neediest part, where that is as little as it can be, and which part it is."""
        found = best_partition(
            self._count, parts, (PartCosts(0, np.zeros(need.shape[1]), need) for need in self._needs())
        )
        assert found is not None, "nothing is forbidden"
        ends = {b: (part, a) for part, (a, b) in enumerate(pairwise([0, *found[1], self._count]))}
        each = [int(need[ends[b]]) for b, need in enumerate(self._needs(), start=1) if b in ends]
        return max(each), each.index(max(each))

    def _ends(self, bound: Seconds, values: Sequence[Item] = ()) -> Iterator[PartCosts]:
        """What parts within ``bound`` and the limit send and how long they take."""
        rolling = Rolling(values, self._count)
        needs = self._needs()
        for b in range(1, self._count + 1):
            taken = (self._time[b] - self._time[:b]) / self._turns
            low = int((taken.min(axis=0) > bound).sum())
            added = np.where(taken[:, low:] > bound, np.inf, rolling.upto(b)[low:])
            if self._limit is not None:
                added = np.where(next(needs)[:, low:] > self._limit.nbytes, np.inf, added)
            yield PartCosts(low, added, taken[:, low:])

    def _needs(self) -> Iterator[Vector]:
        """For b = 1, 2, ...: the memory of parts (0, b), ..., (b - 1, b), a row for each part's number."""
        if self._limit is None:
            return
        flights = np.array(self._limit.in_flight)[:, None]
        held, saved = Rolling(self._held, self._count), Rolling(self._saved, self._count)
        for b in range(1, self._count + 1):
            yield self._limit.copies * held.upto(b) + flights * saved.upto(b)


def _enough(parts: int, places: int, units: int) -> None:
    """Refuse more parts than there are pieces."""
    if parts < 1:
        raise InputError(f"stages={parts} must be at least 1; write stages=1")
    if parts > places:
        what = (
            f"its paceline.cut marks leave {places} pieces; write stages={places}, or add marks"
            if places < units
            else f"the model has {units} operations that can be cut apart; write stages={max(units, 1)}"
        )
        raise InputError(f"stages={parts} needs {parts - 1} places to cut the model, but {what}")


def _unmet(limit: Limit, need: int, part: int) -> InputError:
    flying = limit.in_flight[part]
    return InputError(
        f"stage_memory_bytes={limit.nbytes} can't be met: the thriftiest cut into {len(limit.in_flight)} parts needs "
        f"{need} bytes in part {part}, where {flying} micro-batch{'es are' if flying > 1 else ' is'} in flight; write "
        f"stage_memory_bytes={need}, or more stages, or recompute=all"
    )

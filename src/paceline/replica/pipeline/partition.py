"""Where to cut a row of units into p parts: the slowest part as fast as can be, then as few bytes sent as can be.

::

    seconds      1    2    1 |  3    1 |  2    2        p = 3: parts of 4, 4 and 4 seconds
    values            o------|---------|--->            computed by unit 1, used by unit 5: sent once, to part 2
    boundaries               3         5
"""

import bisect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import InputError, unknown
from paceline.core.partitioning import PartCosts, best_partition
from paceline.core.types import Seconds

# Computed before the first unit.
BEFORE = -1

# Bytes; float64 has them exactly up to 2^53.
Vector: TypeAlias = NDArray[np.float64]

# The units that parts 1, 2, ... begin with, ascending.
Boundaries: TypeAlias = tuple[int, ...]

# Two measurements of one part differ by as much on idle cores, so times closer to each other count as equal.
NOISE = 0.01


@dataclass(frozen=True, slots=True)
class SharedItem:
    """Something that a part has once, however many of its units use it.

    Args:
        uses: the units that use it.
        producer: the unit that computes it: the part with this unit does not count.
    """

    nbytes: int
    uses: tuple[int, ...]
    producer: int = BEFORE


@dataclass(frozen=True)
class UnitCosts:
    """The costs of each unit of a model, in order, and of the items that they share.

    Args:
        seconds: of each unit, forward and backward.
        values: values that units compute for later ones: each part that uses one and did not compute it receives it
            once.
        held: parameters: each part that uses one holds it.
        saved: tensors saved for backward, once for each micro-batch in flight.
    """

    seconds: Sequence[Seconds]
    values: Sequence[SharedItem] = ()
    held: Sequence[SharedItem] = ()
    saved: Sequence[SharedItem] = ()


@dataclass(frozen=True)
class MemoryLimit:
    """Memory that no part may exceed: ``copies`` · what it holds + ``in_flight`` · what it saves of one micro-batch.

    Args:
        in_flight: for each part, how many micro-batches it keeps at most.
        copies: how many times a parameter is held: with its gradient 2, with Adam's two moments 4.
    """

    nbytes: int
    in_flight: Sequence[int]
    copies: int = 1


def partition(
    costs: UnitCosts,
    parts: int,
    *,
    candidates: Sequence[int] | None = None,
    limit: MemoryLimit | None = None,
    replicas: Sequence[int] = (),
) -> Boundaries:
    """Return the best boundaries for the given costs.

    T is the least time that the slowest part can have. Among the cuts whose slowest part takes at most 1.01 · T, one
    that sends fewest bytes is chosen, and of several such the fastest. Exact, by dynamic programming: with the best
    value f_k(b) of cutting units 0 .. b - 1 into k parts, f_k(b) = min over a of f_{k-1}(a) joined with what the part
    of units a .. b - 1 adds. Time O(p·n²), memory O(p·n) for n units.

    Args:
        costs: of the units.
        parts: p, at least 1.
        candidates: the units that may begin parts 1, 2, ...; by default all.
        limit: of memory.
        replicas: of each part, which then counts as so many times faster; empty: one of each.

    Raises:
        InputError: the parts are more than the places to cut allow, or the limit can't be met.

    >>> partition(UnitCosts([1, 2, 1, 3, 1, 2, 2]), 3)
    (3, 5)
    >>> partition(UnitCosts([1, 1, 1, 1], values=[SharedItem(8, uses=(2, 3), producer=1)]), 2, candidates=[1, 2])
    (2,)
    >>> partition(UnitCosts([1, 1, 1, 1]), 2, replicas=(3, 1))
    (3,)
    """
    units = len(costs.seconds)
    starts = [0, *sorted(set(range(1, units) if candidates is None else candidates))]
    if parts < 1:
        raise InputError(f"stages={parts} must be at least 1; write stages=1")
    if parts > len(starts):
        reason = (
            f"its paceline.cut marks leave {len(starts)} pieces; write stages={len(starts)}, or add marks"
            if len(starts) < units
            else f"the model has {units} operations that can be cut apart; write stages={max(units, 1)}"
        )
        raise InputError(f"stages={parts} needs {parts - 1} places to cut the model, but {reason}")

    runs = _Runs(costs, starts, limit, replicas or (1,) * parts)
    fastest = None
    # Parts filled until they reach the mean are slower than it by less than a run; only memory may need slower ones.
    for bound in (runs.mean + runs.longest, math.inf):
        fastest = fastest or best_partition(len(starts), parts, runs.part_costs(bound))
    if fastest is None:
        assert limit is not None, "time alone forbids nothing"
        need, part = runs.least_memory(parts)
        flying = limit.in_flight[part]
        raise InputError(
            f"stage_memory_bytes={limit.nbytes} can't be met: the thriftiest cut into {len(limit.in_flight)} parts "
            f"needs {need} bytes in part {part}, where {flying} micro-batch{'es are' if flying > 1 else ' is'} in "
            f"flight; write stage_memory_bytes={need}, or more stages, or recompute=all"
        )
    lightest = best_partition(len(starts), parts, runs.part_costs(fastest[0] * (1 + NOISE), runs.values))
    assert lightest is not None, "the fastest cut is one"
    return tuple(starts[cut] for cut in lightest[1])


def named_boundaries(
    cuts: Sequence[str], parts: int, modules: Mapping[str, int], nodes: Mapping[str, int]
) -> Boundaries:
    """Return the boundaries that a user has written.

    Args:
        cuts: full names of modules, or names of nodes of the graph, that parts 1, 2, ... begin with.
        parts: p.
        modules: full name of a module -> the first unit that comes from it.
        nodes: name of a node -> its unit.

    Raises:
        InputError: a name is unknown, the names are out of order, too many or too few, or a part would be empty.

    >>> named_boundaries(["layers.2", "head"], 3, {"layers.0": 0, "layers.2": 4, "head": 6}, {})
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


def condense(items: Iterable[SharedItem], starts: Sequence[int]) -> list[SharedItem]:
    """Return the same items where the units are runs of units that begin at ``starts``.

    >>> condense([SharedItem(8, (1, 4, 5), producer=0)], [0, 2, 4])
    [SharedItem(nbytes=8, uses=(0, 2), producer=0)]
    """
    condensed: list[SharedItem] = []
    for item in items:
        uses = {bisect.bisect(starts, use) - 1 for use in item.uses}
        condensed.append(SharedItem(item.nbytes, tuple(sorted(uses)), bisect.bisect(starts, item.producer) - 1))
    return condensed


def bytes_by_start(items: Sequence[SharedItem], count: int) -> Iterator[Vector]:
    """Yield, for b = 1 .. ``count``, the bytes of the parts (0, b), ..., (b - 1, b).

    A part (a, b) is units a .. b - 1. An item counts for it if its producer < a <= its last use before b. So unit
    b - 1, using it, adds its bytes to all a from the use before (or from its producer) + 1 to b - 1. The vector is only
    valid until the next one is yielded.
    """
    last, row = [item.producer for item in items], np.zeros(count)
    users: list[list[int]] = [[] for _ in range(count)]
    for index, item in enumerate(items):
        for use in item.uses:
            users[use].append(index)
    for b in range(1, count + 1):
        for index in users[b - 1]:
            row[last[index] + 1 : b] += items[index].nbytes
            last[index] = b - 1
        yield row[:b]


class _Runs:
    """The costs of runs of units, between places where they may be cut."""

    def __init__(
        self, costs: UnitCosts, starts: Sequence[int], limit: MemoryLimit | None, replicas: Sequence[int]
    ) -> None:
        self._count, self._limit = len(starts), limit
        runs = [math.fsum(costs.seconds[a:b]) for a, b in pairwise([*starts, len(costs.seconds)])]
        self._replicas = np.array(replicas, dtype=np.float64)[:, None]
        self._time = np.array([0.0, *accumulate(runs)])
        self.longest, self.mean = max(runs), self._time[-1] / float(self._replicas.sum())
        self.values, self._held, self._saved = (
            condense(items, starts) for items in (costs.values, costs.held, costs.saved)
        )

    def part_costs(self, bound: Seconds, values: Sequence[SharedItem] = ()) -> Iterator[PartCosts]:
        """Yield the bytes sent and the times of parts within ``bound`` and the limit."""
        sent, needs = bytes_by_start(values, self._count), self._memory()
        for b in range(1, self._count + 1):
            times = (self._time[b] - self._time[:b]) / self._replicas
            low = int((times.min(axis=0) > bound).sum())
            added = np.where(times[:, low:] > bound, np.inf, next(sent)[low:])
            if self._limit is not None:
                added = np.where(next(needs)[:, low:] > self._limit.nbytes, np.inf, added)
            yield PartCosts(low, added, times[:, low:])

    def least_memory(self, parts: int) -> tuple[int, int]:
        """Return the memory of the neediest part, where that is as little as it can be, and its number."""
        costs = (PartCosts(0, np.zeros(need.shape[1]), need) for need in self._memory())
        best = best_partition(self._count, parts, costs)
        assert best is not None, "nothing is forbidden"
        ends = {b: (part, a) for part, (a, b) in enumerate(pairwise([0, *best[1], self._count]))}
        needs = [int(need[ends[b]]) for b, need in enumerate(self._memory(), start=1) if b in ends]
        return max(needs), needs.index(max(needs))

    def _memory(self) -> Iterator[Vector]:
        """Yield, for b = 1, 2, ..., the memory of parts (0, b), ..., (b - 1, b), a row for each part's number."""
        if self._limit is not None:
            in_flight = np.array(self._limit.in_flight)[:, None]
            held, saved = (bytes_by_start(items, self._count) for items in (self._held, self._saved))
            for held_bytes, saved_bytes in zip(held, saved, strict=True):
                yield self._limit.copies * held_bytes + in_flight * saved_bytes

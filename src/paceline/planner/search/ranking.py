"""Plans that divide a step the same way are of one kind, whatever their sizes.

The best so far, by closed forms, and by what plans are ranked.
"""

from collections.abc import Iterable, Iterator, Sequence
from heapq import heappush, heapreplace, merge
from itertools import count
from math import inf
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np

from paceline.planner.base import Arrangement, Cost, Plan, Recomputed, Workload
from paceline.planner.search import carried
from paceline.planner.search.candidates import Frame, Option, arrangement, options
from paceline.planner.search.cost_cache import CostCache
from paceline.planner.search.lower_bounds import Real
from paceline.planner.search.objective import Objectives


class PlanKind(NamedTuple):
    """What is said of a plan without numbers."""

    staged: bool
    sharded: bool
    turning: bool
    """Whether several take turns at a stage."""
    schedule: str
    recompute: Recomputed
    divided: int
    """ZeRO's number."""


def kind_of(a: Arrangement) -> PlanKind:
    """Of an arrangement.

    >>> kind_of(Arrangement(8, stages=4, micro_batches=8)) == kind_of(Arrangement(2, stages=16, micro_batches=64))
    True
    """
    return PlanKind(a.stages > 1, a.shards > 1, bool(a.copies), a.schedule, a.recompute, a.divided)


def kind(frame: Frame, option: Option) -> PlanKind:
    """Of what is not made into an arrangement yet."""
    made = option.schedule, option.recompute, option.divided
    return PlanKind(frame.stages > 1, frame.shards > 1, bool(frame.copies), *made)


Key: TypeAlias = tuple[float, float, float]
"""What the objective says, then bytes held, then how much is asked for beside the plainest: less is better."""

Entry: TypeAlias = tuple[tuple[float, ...], int, Arrangement]
"""A key, of which each number is negative so that more is better; then the later of equals is the worse."""

V = TypeVar("V", float, Real)

TIE = 1e-9
"""Relatively, objectives this close are equal: it is what sums of the same numbers in another order differ by."""


class Ranking:
    """The best so far, by closed forms.

    Args:
        known: the workload and the cluster.
        asked: what counts as best, and how many of them are kept.
        of_each_kind: how many more of each kind are kept of those frames that may be among the best.
    """

    def __init__(self, known: CostCache, asked: Objectives, of_each_kind: int = 0) -> None:
        self._known, self._asked, self._of_each_kind = known, asked, of_each_kind
        self.frames = self.costed = self.left_out = 0
        self._room = min(asked.memory_bytes or inf, known.cluster.device.memory_bytes)
        self._heap: list[Entry] = []
        self._kinds: dict[PlanKind, list[Entry]] = {}
        self._numbers = count()

    @property
    def last(self) -> float:
        """What the worst of those kept has for an objective; infinite as long as there is room for more."""
        return _last(self._heap, self._asked.simulated)

    def take(self, batches: Iterable[int]) -> None:
        """All frames of all batches, those first that may be best."""
        for least, batch, _, frame in merge(*(self._ordered(batch) for batch in batches)):
            if least > self.last * (1 + TIE):
                return
            self._frame(frame, batch)

    def _ordered(self, batch: int) -> Iterator[tuple[float, int, int, Frame]]:
        """Of one batch those that may fit, each with its bound and its place."""
        rows = self._known.rows(batch, self._asked)
        there = rows.workers <= self._known.limit(self._asked)
        self.frames += int(np.count_nonzero(there))
        least = self._value(rows.step_s, rows.held_bytes, batch)
        order = rows.by_held if self._asked.objective == "memory" else rows.by_step
        for place, row in enumerate(order[(there & (rows.held_bytes <= self._room))[order]]):
            yield float(least[row]), batch, place, rows.frames.at(int(row))

    def _frame(self, frame: Frame, batch: int) -> None:
        """All options that may be best, and fit.

        A step in several mini-batches takes longer than in one, and is looked at where that would hold too much.
        """
        tight, little = set[Option](), self._asked.objective == "memory"
        for option in options(frame, self._known.cluster, self._asked):
            if option.accumulated > 1 and not little and option._replace(accumulated=1) not in tight:
                continue
            if not self._fits(frame, option, batch):
                self.left_out += 1
                tight.add(option)

    def _fits(self, frame: Frame, option: Option, batch: int) -> bool:
        """Whether it does; then it is tried, if it may be among the best."""
        known = self._known
        held, step_s = known.bounds.held_bytes(frame, option), known.bounds.step_s(frame, option)
        if held > self._room or self._value(step_s, held, batch) > self._last_of(frame, option) * (1 + TIE):
            return held <= self._room
        made = arrangement(frame, option, known.cluster, self._asked)
        if made is not None and known.workload.refusal(made) is None and known.divisions.fits(made):
            return self._try(made)
        return True

    def _last_of(self, frame: Frame, option: Option) -> float:
        """What is as good as this is kept, as one of the best or of its kind."""
        if not self._of_each_kind:
            return self.last
        return max(self.last, _last(self._kinds.get(kind(frame, option), ()), self._of_each_kind))

    def _value(self, step_s: V, held: V, batch: int) -> V:
        """What the objective says."""
        if self._asked.objective == "memory":
            return held
        return step_s / (batch * self._asked.efficiency(batch, self._known.workload.global_batch))

    def _try(self, arrangement: Arrangement) -> bool:
        found = self._known.cost(arrangement)
        self.costed += 1
        if found.most.total > self._room:
            return False
        ranked = tuple(-each for each in key_of(arrangement, found, self._known.workload, self._asked))
        entry = ranked, -next(self._numbers), arrangement
        _keep(self._heap, entry, self._asked.simulated)
        if self._of_each_kind:
            _keep(self._kinds.setdefault(kind_of(arrangement), []), entry, self._of_each_kind)
        return True

    def best(self) -> Iterator[Arrangement]:
        """Those kept, best first."""
        kept = {*self._heap, *(entry for heap in self._kinds.values() for entry in heap)}
        return (arrangement for _, _, arrangement in sorted(kept, reverse=True))


def _last(heap: Sequence[Entry], room: int) -> float:
    """What the objective says of the worst of those kept; infinite as long as there is room for more."""
    return -heap[0][0][0] if len(heap) == room else inf


def _keep(heap: list[Entry], entry: Entry, room: int) -> None:
    """If it is among so many of the best."""
    if len(heap) < room:
        heappush(heap, entry)
    elif entry > heap[0]:
        heapreplace(heap, entry)


def key(plan: Plan, workload: Workload, asked: Objectives) -> Key:
    """By which plans are ranked."""
    return key_of(plan.arrangement, plan.cost, workload, asked)


def key_of(arrangement: Arrangement, found: Cost, workload: Workload, asked: Objectives) -> Key:
    """Seconds of a sample that counts, or bytes; then the other of the two; then what is asked for beside."""
    held, samples = found.most.total, arrangement.samples
    seconds = found.step_s / (samples * asked.efficiency(samples, workload.global_batch, found.staleness))
    first, second = (held, seconds) if asked.objective == "memory" else (seconds, held)
    return _rounded(first), _rounded(second), carried.plainness(arrangement)


def _rounded(number: float) -> float:
    """To ten digits, so that equals are equal."""
    return float(f"{number:.9e}")


def undominated(plans: Sequence[Plan]) -> list[Plan]:
    """Without those of the same sizes that another one beats or equals in time and in memory.

    What computes again is held to what does so too: a host's own plans leave it out where all fits.
    """
    kept: list[Plan] = []
    for plan in plans:
        if not any(_sizes(other) == _sizes(plan) and other.cost.most.total <= plan.cost.most.total for other in kept):
            kept.append(plan)
    return kept


def _sizes(plan: Plan) -> tuple[object, ...]:
    """And whether anything is computed again: who wants none of that is to find what is best without."""
    a = plan.arrangement
    again = a.recompute != "none"
    return a.replicas, a.stages, a.shards, a.copies, a.stage_shards, a.micro_batch, a.micro_batches, again

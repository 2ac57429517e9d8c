"""Search of the best ways to train a workload on a cluster: enumerated, bounded, ranked by closed forms, simulated.

::

    frames     candidates.py         every size of a step                    10^4 to 10^6, columns of numbers
    bounds     lower_bounds.py       least time and memory of each frame, in whose order they are considered, then of
                                     each of its options
    closed     cost.py               of those that may be among the best; those that don't fit are left out
    simulated  event_simulation.py   the best of these, and some of each kind

The search is exact by closed forms: a frame is left out when its least time is more than that of the last plan kept.
Among equals the one that needs less memory and then the plainest is first.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappush, heapreplace, merge
from itertools import count
from math import inf
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np

from paceline.core.errors import InputError
from paceline.planner import policies, served_plans
from paceline.planner.base import Arrangement, Cost, OverlapModel, Plan, Recomputed, Workload, divisors, merged
from paceline.planner.cluster import CachedMessages, Cluster
from paceline.planner.cost import EXACT, cost
from paceline.planner.policy_pace import Pace
from paceline.planner.search import candidates, supported
from paceline.planner.search.candidates import Frame, Option
from paceline.planner.search.event_simulation import PartTimes, part_times, steps_s
from paceline.planner.search.lower_bounds import FrameBounds, OptionBounds, Real
from paceline.planner.search.objective import Objectives
from paceline.planner.stage_division import Divisions

# Plans of each kind to simulate where alternatives are shown: closed forms don't order them as a simulation does.
OF_EACH_KIND = 3

# Plans without delays of each number of replicas that compete under all policies.
DELAY_FINALISTS = 8


class CostCache:
    """Costs of a workload on a cluster.

    Args:
        workload: that is trained.
        cluster: that it is trained on.
        overlap_model: of the runtime; None: nothing overlaps.
        calibrate: correction of each plan; None: plans are as computed.
    """

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        overlap_model: OverlapModel | None = None,
        calibrate: Callable[[Plan], Plan] | None = None,
    ) -> None:
        self.workload, self.overlap_model = workload, overlap_model or OverlapModel()
        self._calibrate = calibrate
        self.cluster = replace(cluster, messages=CachedMessages(cluster.messages))
        self.divisions = Divisions(workload, self.cluster)
        self.bounds = OptionBounds(workload, self.cluster, self.overlap_model)
        self._frame_bounds: dict[tuple[object, ...], tuple[int, FrameBounds]] = {}

    def frame_bounds(self, batch: int, objectives: Objectives) -> FrameBounds:
        """Return bounds of all frames of a batch for as many workers as there may be, or for more of them."""
        # Asynchronous pipelines are another algorithm, with stale weights: they compete where the objective counts it.
        o, pipedream = objectives, Arrangement(stages=2, schedule="pipedream")
        async_pipelines = o.statistical and candidates.is_supported(self.cluster, o, pipedream)
        key = batch, o.fixed, o.replicas, o.unbuilt, o.engine, o.most_chunks, async_pipelines
        # A curve goes from most workers to one: frames of fewer workers are among those of more.
        limit = objectives.max_workers(self.cluster)
        if key not in self._frame_bounds or self._frame_bounds[key][0] < limit:
            rows = candidates.frames(self.workload, self.cluster, o, batch)
            zero = candidates.supports_zero(self.cluster, o)
            self._frame_bounds[key] = limit, FrameBounds(self.bounds, rows, o.most_chunks, zero, async_pipelines)
        return self._frame_bounds[key][1]

    def cost(self, arrangement: Arrangement) -> Cost:
        """Return the cost by closed forms."""
        return cost(self.workload, self.cluster, arrangement, self.overlap_model, self.divisions.of(arrangement))

    def plan(self, arrangement: Arrangement, *, simulate: bool = True) -> Plan:
        """Return the plan of an arrangement, simulated if requested and if closed forms are not exact.

        Of a simulated step ``bubble`` is the remaining time without messages, ``stages`` the delay that messages add.
        """
        result = self.cost(arrangement)
        if simulate and arrangement.stages > 1 and arrangement.schedule not in EXACT:
            division = self.divisions.of(arrangement)
            times = part_times(division, arrangement, self.cluster, self.overlap_model)
            quiet_s, step_s = steps_s(arrangement, (PartTimes(times.forward, times.backward), times))
            bubble = max(0.0, quiet_s - result.terms["compute"] - result.terms["shards"])
            result = replace(result, terms={**result.terms, "stages": step_s - quiet_s, "bubble": bubble})
        workload, device = self.workload, self.cluster.device
        # Relative errors of independent sources, of workload and cluster, add in squares.
        spread, step_s = float(np.hypot(workload.spread, self.cluster.spread)), result.step_s
        rate, flops = arrangement.samples / step_s, workload.flops
        utilisation = None if flops is None else flops * rate / (arrangement.workers * device.flops_per_s)
        strategy = supported.strategy(arrangement, device.kind) if supported.supports(arrangement) else None
        sources = merged(workload.provenance, self.cluster.provenance, device.provenance)
        low_s, high_s = step_s / (1 + spread), step_s * (1 + spread)
        plan = Plan(arrangement, result, low_s, high_s, rate, utilisation, strategy, simulate, sources)
        return plan if self._calibrate is None else self._calibrate(plan)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Plans found by a search, and how many were considered."""

    plans: tuple[Plan, ...]
    """Best first; empty where nothing fits."""
    frames: int
    """Number of frames."""
    costed: int
    """Arrangements whose cost was computed."""
    left_out: int
    """Arrangements that exceed a worker's memory."""


def search(
    workload: Workload,
    cluster: Cluster,
    objectives: Objectives | None = None,
    overlap_model: OverlapModel | None = None,
    cost_cache: CostCache | None = None,
    *,
    simulate: bool = True,
    of_each_kind: int = 0,
) -> SearchResult:
    """Return the best plans, best first, each with the Strategy that train takes.

    Args:
        workload: that is trained.
        cluster: that it is trained on.
        objectives: objective and limits; None: the most samples a second.
        overlap_model: of the runtime; None: nothing overlaps.
        cost_cache: of an earlier search of the same workload, cluster and overlap model.
        simulate: whether to simulate the best; otherwise closed forms are all.
        of_each_kind: number of plans to simulate of each kind in addition, of frames that may be among the best.

    Raises:
        InputError: no number of workers can divide the batch.
    """
    objectives, cache = objectives or Objectives(), cost_cache or CostCache(workload, cluster, overlap_model)
    if objectives.delay is not None or objectives.engine == "ray":
        return _search_policies(cache, objectives)
    return _search_synchronous(cache, objectives, simulate=simulate, of_each_kind=of_each_kind)


def _search_synchronous(
    cache: CostCache, objectives: Objectives, *, simulate: bool = True, of_each_kind: int = 0
) -> SearchResult:
    workload, cluster = cache.workload, cache.cluster
    ranking = Ranking(cache, objectives, of_each_kind)
    ranking.take(objectives.batches(workload, objectives.max_workers(cluster)))
    if not ranking.frames and objectives.replicas is None:
        raise InputError(
            f"a batch of {workload.global_batch} samples can't be divided among {cluster.workers} workers; write "
            f"global_batch={cluster.workers}, or fewer workers."
        )
    best, max_bytes = (cache.plan(each, simulate=simulate) for each in ranking.best()), objectives.max_bytes(cluster)
    fitting = [plan for plan in best if plan.cost.peak.total <= max_bytes]  # a calibration may make them larger
    plans = undominated(sorted(fitting, key=lambda plan: key(plan, workload, objectives)))
    return SearchResult(tuple(plans), ranking.frames, ranking.costed, ranking.left_out)


def _search_policies(cache: CostCache, objectives: Objectives) -> SearchResult:
    """Waiting is longer the more replicas wait for each other: the best plans of each number of replicas compete."""
    workload, cluster, most = cache.workload, cache.cluster, objectives.max_workers(cache.cluster)
    if objectives.replicas:
        counts = [objectives.replicas]
    elif objectives.fixed == "replica":
        counts = list(range(1, most + 1))
    else:
        counts = sorted({r for batch in objectives.batches(workload) for r in divisors(batch) if r <= most})
    own = replace(objectives, delay=None, simulated=DELAY_FINALISTS)
    results, paced = list[SearchResult](), list[tuple[Plan, Pace]]()
    for replicas in counts:
        if objectives.engine != "ray":
            results.append(_search_synchronous(cache, replace(own, replicas=replicas)))
            plans = results[-1].plans
            paced += policies.compete([*plans, *_undivided(plans, cache, own)], cluster, objectives)
        fitting = min(most, served_plans.most_workers(replicas, cluster))
        if served_plans.compete(cluster, objectives) and fitting:
            results.append(_search_synchronous(cache, replace(own, replicas=replicas, engine="ray", workers=fitting)))
            paced += served_plans.served_plans(results[-1].plans, workload, cluster, objectives)
    ranked = policies.ranked(paced, workload, objectives)
    totals = (sum(getattr(result, name) for result in results) for name in ("frames", "costed", "left_out"))
    return SearchResult(tuple(ranked[: objectives.simulated]), *totals)


def _undivided(plans: Sequence[Plan], cache: CostCache, objectives: Objectives) -> list[Plan]:
    """Return those plans that divide the optimizer's state with it whole, if they fit: other policies divide none."""
    known = [plan.arrangement for plan in plans]
    whole = dict.fromkeys(replace(arrangement, divided=0) for arrangement in known if arrangement.divided)
    found = [cache.plan(arrangement) for arrangement in whole if arrangement not in known]
    return [plan for plan in found if plan.cost.peak.total <= objectives.max_bytes(cache.cluster)]


# -------------------------------------------------------------------------------------------------------------- ranking


class PlanKind(NamedTuple):
    """A plan without its numbers: plans of one kind divide a step the same way, whatever their sizes."""

    staged: bool
    sharded: bool
    replicated_stages: bool
    schedule: str
    recompute: Recomputed
    divided: int
    """ZeRO's stage."""


def kind_of(sizes: Arrangement | Frame, option: Arrangement | Option) -> PlanKind:
    """Return the kind of a frame with an option, or of an arrangement, which is both.

    >>> small, large = Arrangement(8, stages=4, micro_batches=8), Arrangement(2, stages=16, micro_batches=64)
    >>> kind_of(small, small) == kind_of(large, large)
    True
    """
    uneven = bool(sizes.copies)
    return PlanKind(sizes.stages > 1, sizes.shards > 1, uneven, option.schedule, option.recompute, option.divided)


# The objective, then peak bytes, then the complexity relative to the plainest strategy: less is better.
Key: TypeAlias = tuple[float, float, float]

# A key with each number negated, so that a heap's first is the worst; of equal ones the later is the worse.
Entry: TypeAlias = tuple[tuple[float, ...], int, Arrangement]

V = TypeVar("V", float, Real)

# Objectives this close, relatively, are equal: sums of the same numbers in another order differ by so much.
TIE = 1e-9


class Ranking:
    """The best arrangements so far.

    Args:
        cost_cache: the workload and the cluster.
        objectives: the objective, and the number of arrangements to keep.
        of_each_kind: number to keep of each kind in addition, of those frames that may be among the best.
    """

    def __init__(self, cost_cache: CostCache, objectives: Objectives, of_each_kind: int = 0) -> None:
        self._cache, self._objectives, self._of_each_kind = cost_cache, objectives, of_each_kind
        self.frames = self.costed = self.left_out = 0
        self._max_bytes = objectives.max_bytes(cost_cache.cluster)
        self._heap: list[Entry] = []
        self._kinds: dict[PlanKind, list[Entry]] = {}
        self._numbers = count()

    def take(self, batches: Iterable[int]) -> None:
        """Rank all frames of all batches, in order of their bounds, until the rest can't be among the best."""
        for_memory = self._objectives.objective == "memory"
        # Lazily merged: most frames are never even made into an object.
        for least, batch, _, frame in merge(*map(self._ordered, batches)):
            if least > _worst(self._heap, self._objectives.simulated) * (1 + TIE):
                return
            too_large = set[Option]()
            for option in candidates.options(frame, self._cache.cluster, self._objectives):
                # A step of several mini-batches takes longer than one of a single mini-batch, and is considered only
                # where the latter does not fit.
                if option.accumulated > 1 and not for_memory and option._replace(accumulated=1) not in too_large:
                    continue
                if not self._fits(frame, option, batch):
                    self.left_out += 1
                    too_large.add(option)

    def _ordered(self, batch: int) -> Iterator[tuple[float, int, int, Frame]]:
        """Yield the frames of one batch that may fit, each with its bound and its place."""
        bounds, objectives = self._cache.frame_bounds(batch, self._objectives), self._objectives
        possible = bounds.workers <= objectives.max_workers(self._cache.cluster)
        self.frames += int(np.count_nonzero(possible))
        least = self._value(bounds.step_s, bounds.memory_bytes, batch)
        order = bounds.by_memory if objectives.objective == "memory" else bounds.by_step
        fitting = order[(possible & (bounds.memory_bytes <= self._max_bytes))[order]]
        for place, row in enumerate(fitting):
            yield float(least[row]), batch, place, bounds.frames.at(int(row))

    def _fits(self, frame: Frame, option: Option, batch: int) -> bool:
        """Return True if it fits; then it is ranked, if its bounds say that it may be among the best."""
        cache, objectives = self._cache, self._objectives
        least_bytes, least_s = cache.bounds.memory_bytes(frame, option), cache.bounds.step_s(frame, option)
        # Bounds first: they take microseconds, a cost takes a hundred times as long.
        if least_bytes > self._max_bytes:
            return False
        worst = _worst(self._heap, objectives.simulated)
        if self._of_each_kind:
            worst = max(worst, _worst(self._kinds.get(kind_of(frame, option), ()), self._of_each_kind))
        if self._value(least_s, least_bytes, batch) > worst * (1 + TIE):
            return True
        candidate = candidates.arrangement(frame, option, cache.cluster, objectives)
        if candidate is None or cache.workload.refusal(candidate) is not None or not cache.divisions.fits(candidate):
            return True
        cost = cache.cost(candidate)
        self.costed += 1
        if cost.peak.total > self._max_bytes:
            return False
        # heapq keeps the smallest first, which is to be the worst.
        negated = tuple(-each for each in key_of(candidate, cost, cache.workload, objectives))
        entry = negated, -next(self._numbers), candidate
        _keep(self._heap, entry, objectives.simulated)
        if self._of_each_kind:
            _keep(self._kinds.setdefault(kind_of(candidate, candidate), []), entry, self._of_each_kind)
        return True

    def _value(self, step_s: V, memory_bytes: V, batch: int) -> V:
        """Return the objective of one or of many."""
        if self._objectives.objective == "memory":
            return memory_bytes
        return step_s / (batch * self._objectives.efficiency(batch, self._cache.workload.global_batch))

    def best(self) -> Iterator[Arrangement]:
        """Return the arrangements that are kept, best first."""
        kept = {*self._heap, *(entry for heap in self._kinds.values() for entry in heap)}
        return (arrangement for _, _, arrangement in sorted(kept, reverse=True))


def _worst(heap: Sequence[Entry], limit: int) -> float:
    """Return the objective of the worst entry kept; infinite as long as there is room for more."""
    return -heap[0][0][0] if len(heap) == limit else inf


def _keep(heap: list[Entry], entry: Entry, limit: int) -> None:
    """Keep an entry if it is among so many of the best."""
    if len(heap) < limit:
        heappush(heap, entry)
    elif entry > heap[0]:
        heapreplace(heap, entry)


def key(plan: Plan, workload: Workload, objectives: Objectives) -> Key:
    """Return the key by which plans are ranked."""
    return key_of(plan.arrangement, plan.cost, workload, objectives)


def key_of(arrangement: Arrangement, cost: Cost, workload: Workload, objectives: Objectives) -> Key:
    """Return (seconds of an effective sample, peak bytes, complexity), for objective="memory" the first two swapped.

    Both are rounded to ten digits, so that equal ones are equal.
    """
    samples, peak_bytes = arrangement.samples, cost.peak.total
    seconds = cost.step_s / (samples * objectives.efficiency(samples, workload.global_batch, cost.staleness))
    first, second = (peak_bytes, seconds) if objectives.objective == "memory" else (seconds, peak_bytes)
    return float(f"{first:.9e}"), float(f"{second:.9e}"), supported.plainness(arrangement)


def undominated(plans: Sequence[Plan]) -> list[Plan]:
    """Leave out plans that another one of the same sizes beats or equals in time and in memory.

    Plans with recomputation are compared among themselves: a host's own plans leave it out where all fits.
    """
    kept = list[tuple[object, Plan]]()
    for plan in plans:
        a = plan.arrangement
        recomputes = a.recompute != "none"
        sizes = a.replicas, a.stages, a.shards, a.copies, a.stage_shards, a.micro_batch, a.micro_batches, recomputes
        peak_bytes = plan.cost.peak.total
        if not any(other == sizes and each.cost.peak.total <= peak_bytes for other, each in kept):
            kept.append((sizes, plan))
    return [plan for _, plan in kept]

"""Feasibility: where a model does not fit, the smallest change that makes it fit.

The plain way is changed, in which every worker is a replica that processes its part of the batch at once. A change is
one of :data:`CHANGES`; one of them is smaller than two, and earlier ones are smaller than later ones.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import inf
from typing import Literal, TypeAlias

from paceline.core.formatting import bytes_text
from paceline.planner.base import Arrangement, Cost, Recomputed, divisors
from paceline.planner.search import supported
from paceline.planner.search.candidates import Frame, Option, is_supported
from paceline.planner.search.objective import Objectives
from paceline.planner.search.search import CostCache, search

Change: TypeAlias = Literal["micro-batch", "recompute", "optimizer", "parameters", "stages", "shards"]

CHANGES: Mapping[Change, str] = {
    "micro-batch": "a smaller micro-batch",
    "recompute": "recomputation",
    "optimizer": "dividing the optimizer's state among replicas (ZeRO-1)",
    "parameters": "dividing parameters among replicas (FSDP)",
    "stages": "more stages",
    "shards": "more shards",
}

# Largest multiple of the hosts that is tried.
MOST_TIMES = 4096


@dataclass(frozen=True, slots=True)
class Fit:
    """Smallest change that fits, in words."""

    text: str
    arrangement: Arrangement | None
    """None: the plain way fits, or nothing does with so many workers."""
    fits: bool
    """True if any arrangement fits, with so many workers."""


def smallest_change(cost_cache: CostCache, objectives: Objectives) -> Fit:
    """Find the smallest change of the plain way that fits.

    Args:
        cost_cache: the workload and the cluster.
        objectives: has the limits of workers and of memory.
    """
    max_bytes = objectives.max_bytes(cost_cache.cluster)
    plain = _sizes(cost_cache, objectives, (), 1, 1)[0]
    plain_bytes = cost_cache.cost(plain).peak.total
    if plain_bytes <= max_bytes:
        return Fit(f"plain replicas fit: {bytes_text(plain_bytes)} of {bytes_text(max_bytes)}", None, True)
    lacks = f"plain replicas need {bytes_text(plain_bytes)} on a worker, which has {bytes_text(max_bytes)}"
    for count in range(1, len(CHANGES) + 1):
        for changes in combinations(CHANGES, count):
            if best := _fastest(cost_cache, objectives, changes, max_bytes):
                strategy = supported.strategy(best[0], cost_cache.cluster.device.kind)
                words = " and ".join(CHANGES[change] for change in changes)
                peak = bytes_text(best[1].peak.total)
                text = f"{lacks}; the smallest change that fits is {words}: {strategy}, {peak}"
                return Fit(text, best[0], True)
    workers, needed = objectives.max_workers(cost_cache.cluster), _needed_cluster(cost_cache, objectives)
    return Fit(f"{lacks}; no change fits with {workers} workers: {needed}", None, False)


def _fastest(
    cost_cache: CostCache, objectives: Objectives, changes: Sequence[Change], max_bytes: float
) -> tuple[Arrangement, Cost] | None:
    """Return the fastest arrangement that has these changes alone, and fits.

    Bounds exclude those that are slower or too large before their cost is computed.
    """
    best: tuple[Arrangement, Cost] | None = None
    cluster, bounds = cost_cache.cluster, cost_cache.bounds
    for a in _changed(cost_cache, objectives, changes):
        frame = Frame(a.replicas, a.stages, a.shards, int(a.micro_batch), a.micro_batches)
        option = Option(a.schedule, a.chunks, a.recompute, a.divided)
        best_s = inf if best is None else best[1].step_s
        if bounds.memory_bytes(frame, option) > max_bytes or bounds.step_s(frame, option) > best_s:
            continue
        trains = supported.supports(a) and is_supported(cluster, objectives, a)
        if not trains or cost_cache.workload.refusal(a) is not None or not cost_cache.divisions.fits(a):
            continue
        cost = cost_cache.cost(a)
        size = cost.peak.total
        if size <= max_bytes and (best is None or (cost.step_s, size) < (best_s, best[1].peak.total)):
            best = a, cost
    return best


def _changed(cost_cache: CostCache, objectives: Objectives, changes: Sequence[Change]) -> Iterator[Arrangement]:
    """Yield all arrangements with these changes; a pipeline always has micro-batches."""
    workers = objectives.max_workers(cost_cache.cluster)
    layers = len(cost_cache.divisions.layers(_sizes(cost_cache, objectives, (), 1, 1)[0])[0])
    stages = range(2, min(layers, workers) + 1) if "stages" in changes else (1,)
    shards = range(2, workers + 1) if "shards" in changes else (1,)
    divided = 3 if "parameters" in changes else 1 if "optimizer" in changes else 0
    for p, t in product(stages, shards):
        if p * t > workers or cost_cache.workload.refusal(Arrangement(shards=t)) is not None:
            continue
        recomputed: Sequence[Recomputed] = ("none",)
        if "recompute" in changes:
            recomputed = ("stage",) if t > 1 else ("full", "stage") if p > 1 else ("full",)
        for size, recompute in product(_sizes(cost_cache, objectives, changes, p, t), recomputed):
            yield replace(size, stages=p, shards=t, recompute=recompute, divided=divided)


def _sizes(
    cost_cache: CostCache, objectives: Objectives, changes: Sequence[Change], stages: int, shards: int
) -> list[Arrangement]:
    """Return replicas, as many as the batch can be divided among, and the micro-batches that their part is cut into."""
    most, batch = objectives.max_workers(cost_cache.cluster) // (stages * shards), cost_cache.workload.global_batch
    replicas, own = most, batch
    if objectives.fixed == "global":
        replicas = max(r for r in divisors(batch) if r <= most)
        own = batch // replicas
    cuts = reversed(divisors(own)) if "micro-batch" in changes or stages > 1 else (own,)
    return [Arrangement(replicas, micro_batch=b, micro_batches=own // b) for b in cuts]


def _needed_cluster(cost_cache: CostCache, objectives: Objectives) -> str:
    """Return in words how many hosts of the kind it takes, or how much memory."""
    workload, cluster, workers = cost_cache.workload, cost_cache.cluster, objectives.max_workers(cost_cache.cluster)

    def fits(times: int) -> bool:
        larger = replace(cluster, hosts=cluster.hosts * times)
        more = replace(objectives, workers=workers * times, simulated=1, delay=None)
        return bool(search(workload, larger, more, cost_cache.overlap_model, simulate=False).plans)

    unlimited = replace(cluster, device=replace(cluster.device, memory_bytes=inf))
    smallest = replace(objectives, objective="memory", memory_bytes=None, simulated=1, delay=None)
    best = search(workload, unlimited, smallest, cost_cache.overlap_model, simulate=False).plans[0]
    least = f"workers with {bytes_text(best.cost.peak.total)}, which the smallest way holds"
    times = next((2**k for k in range(1, MOST_TIMES.bit_length()) if fits(2**k)), None)
    if times is None:
        return f"nor with {MOST_TIMES} times as many; {least}"
    # Doubled until it fits, then halved: feasibility grows with the number of hosts.
    between = range(times // 2 + 1, times)
    times = times // 2 + 1 + bisect_left(between, True, key=fits)
    return f"it takes {times} times as many of them, {workers * times}; or {least}"

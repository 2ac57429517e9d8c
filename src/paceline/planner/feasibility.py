"""Where a model does not fit: the smallest change that does.

What is changed is the plain way, every worker a replica that computes its part of the batch at once. A change is one of
:data:`CHANGES`; one of them is smaller than two, and earlier ones are smaller than later ones.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import inf
from typing import Literal, TypeAlias

from paceline.core.formatting import bytes_text
from paceline.planner.base import Arrangement, Cost, Recomputed
from paceline.planner.search import carried
from paceline.planner.search.candidates import Frame, Option, can, divisors
from paceline.planner.search.cost_cache import CostCache
from paceline.planner.search.objective import Objectives
from paceline.planner.search.search import search

Change: TypeAlias = Literal["micro-batch", "recompute", "optimizer", "parameters", "stages", "shards"]

CHANGES: Mapping[Change, str] = {
    "micro-batch": "a smaller micro-batch",
    "recompute": "recomputation",
    "optimizer": "dividing the optimizer's state among replicas (ZeRO-1)",
    "parameters": "dividing parameters among replicas (FSDP)",
    "stages": "more stages",
    "shards": "more shards",
}

MOST_TIMES = 4096
"""How many times as many hosts are looked at."""


@dataclass(frozen=True, slots=True)
class Fit:
    """What was found."""

    text: str
    arrangement: Arrangement | None
    """None: the plain way fits, or nothing does with so many workers."""
    fits: bool
    """Whether anything does, with so many workers."""


def smallest_change(known: CostCache, asked: Objectives) -> Fit:
    """What has to be changed of the plain way so that it fits.

    Args:
        known: the workload and the cluster.
        asked: says how many workers there are and what one can hold.
    """
    room = min(asked.memory_bytes or inf, known.cluster.device.memory_bytes)
    plain = _plain(known, asked)
    needs = known.cost(plain).most.total
    if needs <= room:
        return Fit(f"plain replicas fit: {bytes_text(needs)} of {bytes_text(room)}", None, True)
    lacks = f"plain replicas need {bytes_text(needs)} on a worker, which has {bytes_text(room)}"
    for count in range(1, len(CHANGES) + 1):
        for changes in combinations(CHANGES, count):
            if found := _quickest(known, asked, changes, room):
                said = carried.strategy(found[0], known.cluster.device.kind)
                what = " and ".join(CHANGES[change] for change in changes)
                text = f"{lacks}; the smallest change that fits is {what}: {said}, {bytes_text(found[1].most.total)}"
                return Fit(text, found[0], True)
    return Fit(f"{lacks}; no change fits with {_workers(known, asked)} workers: {_more(known, asked)}", None, False)


def _workers(known: CostCache, asked: Objectives) -> int:
    return min(known.cluster.workers, asked.workers or known.cluster.workers)


def _plain(known: CostCache, asked: Objectives) -> Arrangement:
    """As many replicas as the batch can be divided among."""
    batch = known.workload.global_batch
    if asked.fixed == "replica":
        return Arrangement(_workers(known, asked), micro_batch=batch)
    replicas = max(r for r in divisors(batch) if r <= _workers(known, asked))
    return Arrangement(replicas, micro_batch=batch // replicas)


def _quickest(
    known: CostCache, asked: Objectives, changes: Sequence[Change], room: float
) -> tuple[Arrangement, Cost] | None:
    """Of all that change nothing else, and fit; bounds leave out what is slower or larger before it is costed."""
    best: tuple[Arrangement, Cost] | None = None
    for made in _changed(known, asked, changes):
        if _hopeful(known, made, room, inf if best is None else best[1].step_s) and _carried(known, asked, made):
            found = known.cost(made)
            if found.most.total <= room and (best is None or _key(found) < _key(best[1])):
                best = made, found
    return best


def _key(cost: Cost) -> tuple[float, float]:
    return cost.step_s, cost.most.total


def _hopeful(known: CostCache, made: Arrangement, room: float, best_s: float) -> bool:
    frame = Frame(made.replicas, made.stages, made.shards, int(made.micro_batch), made.micro_batches)
    option = Option(made.schedule, made.chunks, made.recompute, made.divided)
    return known.bounds.held_bytes(frame, option) <= room and known.bounds.step_s(frame, option) <= best_s


def _carried(known: CostCache, asked: Objectives, made: Arrangement) -> bool:
    can_be = carried.never(made) is None and known.workload.refusal(made) is None
    return can_be and can(known.cluster, asked, made) and known.divisions.fits(made)


def _changed(known: CostCache, asked: Objectives, changes: Sequence[Change]) -> Iterator[Arrangement]:
    """A pipeline has micro-batches in any case: b is of a batch cut into a multiple of its stages."""
    workers, plain = _workers(known, asked), _plain(known, asked)
    layers = known.divisions.count(plain)
    stages = range(2, min(layers, workers) + 1) if "stages" in changes else (1,)
    shards = range(2, workers + 1) if "shards" in changes else (1,)
    divided = 3 if "parameters" in changes else 1 if "optimizer" in changes else 0
    for p, t in product(stages, shards):
        if p * t > workers or known.workload.refusal(Arrangement(shards=t)) is not None:
            continue
        for size in _sizes(known, asked, workers // (p * t), cut="micro-batch" in changes or p > 1):
            for recompute in _recomputes(p, t) if "recompute" in changes else ("none",):
                yield replace(size, stages=p, shards=t, recompute=recompute, divided=divided)


def _recomputes(stages: int, shards: int) -> Sequence[Recomputed]:
    return ("stage",) if shards > 1 else ("full", "stage") if stages > 1 else ("full",)


def _sizes(known: CostCache, asked: Objectives, most: int, *, cut: bool) -> Iterator[Arrangement]:
    batch = known.workload.global_batch
    replicas = most if asked.fixed == "replica" else max(r for r in divisors(batch) if r <= most)
    own = batch if asked.fixed == "replica" else batch // replicas
    for b in reversed(divisors(own)) if cut else (own,):
        yield Arrangement(replicas, micro_batch=b, micro_batches=own // b)


def _more(known: CostCache, asked: Objectives) -> str:
    """How many hosts of the kind it takes, or how much memory."""
    times = next((n for n in _doubled() if _fits(known, asked, n)), None)
    if times is None:
        return f"nor with {MOST_TIMES} times as many; {_least(known, asked)}"
    low, high = times // 2, times
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(known, asked, middle) else (middle, high)
    return f"it takes {high} times as many of them, {_workers(known, asked) * high}; or {_least(known, asked)}"


def _doubled() -> Iterator[int]:
    return (2**k for k in range(1, MOST_TIMES.bit_length()))


def _fits(known: CostCache, asked: Objectives, times: int) -> bool:
    cluster = replace(known.cluster, hosts=known.cluster.hosts * times)
    more = replace(asked, workers=_workers(known, asked) * times, simulated=1, delay=None)
    return bool(search(known.workload, cluster, more, known.habits, simulate=False).plans)


def _least(known: CostCache, asked: Objectives) -> str:
    """What the worker of the smallest arrangement holds."""
    cluster = replace(known.cluster, device=replace(known.cluster.device, memory_bytes=inf))
    smallest = replace(asked, objective="memory", memory_bytes=None, simulated=1, delay=None)
    best = search(known.workload, cluster, smallest, known.habits, simulate=False).plans[0]
    return f"workers with {bytes_text(best.cost.most.total)}, which the smallest way holds"

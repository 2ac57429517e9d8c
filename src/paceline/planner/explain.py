"""Why one plan is ahead of another, the scaling curve, and which resource shortens the step most.

The same workload and cluster with a tenth more of one thing.

Why one plan is before another, and what the first of them would gain by.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from math import log2
from typing import Any, Literal, TypeAlias, final

from paceline.core.formatting import bytes_text, seconds_text
from paceline.core.types import Seconds
from paceline.planner.base import TERMS, Arrangement, Collective, Held, LayerCost, OverlapModel, Plan, Workload
from paceline.planner.cluster import Cluster, Described, DeviceGroup, Messages
from paceline.planner.cost import cost
from paceline.planner.search.cost_cache import CostCache
from paceline.planner.search.objective import Objectives
from paceline.planner.search.search import search

HALF = 1.5
"""What twice the workers must give, in times of samples a second, to be worth it: half of what they could."""


@dataclass(frozen=True, slots=True)
class Point:
    """The best that so many workers can do, by closed forms."""

    workers: int
    samples_per_s: float
    """0 where nothing fits."""
    strategy: str


@dataclass(frozen=True, slots=True)
class Curve:
    """From one worker to all of them."""

    points: tuple[Point, ...]

    @property
    def knee(self) -> int | None:
        """The workers from which on twice as many give less than one and a half times as much; None: there is none."""
        fitting = [point for point in self.points if point.samples_per_s]
        for fewer, more in pairwise(fitting):
            times, gained = more.workers / fewer.workers, more.samples_per_s / fewer.samples_per_s
            if gained < HALF ** log2(times):
                return fewer.workers
        return None


def curve(
    workload: Workload,
    cluster: Cluster,
    asked: Objectives,
    habits: OverlapModel | None = None,
    known: CostCache | None = None,
) -> Curve:
    """The best for 1, 2, 4, ... workers and for all; of many for 1, 4, 16, ....

    Args:
        workload: what is trained.
        cluster: all of it.
        asked: what counts as best.
        habits: of who carries it out.
        known: of searches before.
    """
    asked, known = replace(asked, simulated=1, delay=None), known or CostCache.of(workload, cluster, habits)
    most = min(cluster.workers, asked.workers or cluster.workers)
    points = [_point(known, asked.of_workers(count)) for count in reversed(steps(most))]  # all frames are known first
    return Curve(tuple(reversed(points)))


FINE = 64
"""Up to so many workers each doubling is looked at, of more each fourfold."""


def curve_of(plans: Sequence[Plan], most: int) -> Curve:
    """Of plans that were made for each number of workers by itself."""
    found = []
    for count in steps(most):
        fitting = [plan for plan in plans if plan.arrangement.workers <= count and plan.strategy is not None]
        best = max(fitting, key=lambda plan: plan.samples_per_s, default=None)
        found.append(Point(count, best.samples_per_s, str(best.strategy)) if best else Point(count, 0.0, ""))
    return Curve(tuple(found))


def steps(most: int) -> Sequence[int]:
    """Up to so many.

    >>> steps(6), steps(1), steps(100)
    ([1, 2, 4, 6], [1], [1, 4, 16, 64, 100])
    """
    each = 1 if most <= FINE else 2
    return [*(2**k for k in range(0, most.bit_length(), each) if 2**k < most), most]


def _point(known: CostCache, asked: Objectives) -> Point:
    found = search(known.workload, known.cluster, asked, known=known, simulate=False).plans
    assert asked.workers is not None
    if not found:
        return Point(asked.workers, 0.0, "")
    return Point(asked.workers, found[0].samples_per_s, str(found[0].strategy))


Resource: TypeAlias = Literal["compute", "memory", "inside", "between", "latency"]

RESOURCES: Mapping[Resource, str] = {
    "compute": "10 % more operations a second",
    "memory": "10 % more memory bandwidth",
    "inside": "10 % more bandwidth inside hosts",
    "between": "10 % more bandwidth between hosts",
    "latency": "10 % less latency of messages",
}

MORE = 1.1


def quicker(workload: Workload, cluster: Cluster, resource: Resource) -> tuple[Workload, Cluster] | None:
    """With more of it; None where times were measured as they are, and it can't be told what would change."""
    if resource in ("compute", "memory"):
        return _devices(workload, cluster, resource)
    return workload, replace(cluster, messages=_messages(cluster.messages, resource))


def _devices(workload: Workload, cluster: Cluster, resource: Resource) -> tuple[Workload, Cluster] | None:
    name = "flops_per_s" if resource == "compute" else "memory_bytes_per_s"
    device = replace(cluster.device, **{name: getattr(cluster.device, name) * MORE})
    described: Any = workload
    if getattr(workload, "device", None) == cluster.device:
        return replace(described, device=device), replace(cluster, device=device)
    if resource == "memory":  # of measured layers it is not known what part of them waits for memory
        return workload, replace(cluster, device=device)
    return Sooner(workload), cluster


def _messages(messages: Messages, resource: Resource) -> Messages:
    if not isinstance(messages, Described):
        return Scaled(messages, resource)
    links = messages.links
    match resource:
        case "inside":
            links = replace(links, inside_bytes_per_s=links.inside_bytes_per_s * MORE)
        case "between":
            links = replace(links, between_bytes_per_s=links.between_bytes_per_s * MORE)
        case _:
            latencies = links.latency_s / MORE, links.between_latency_s / MORE
            links = replace(links, latency_s=latencies[0], between_latency_s=latencies[1])
    return replace(messages, links=links)


@final
@dataclass(frozen=True)
class Scaled(Messages):
    """Measured ones; of a group on several hosts all bytes count as between them.

    Args:
        messages: as they were measured.
        resource: of which there is more: ``inside``, ``between`` or ``latency``.
    """

    messages: Messages
    resource: Resource

    def seconds(self, collective: Collective, size_bytes: float, group: DeviceGroup) -> Seconds:
        found = self.messages.seconds(collective, size_bytes, group)
        if self.resource == "latency":
            return found - self.messages.seconds(collective, 1, group) * (1 - 1 / MORE)
        inside = group.hosts == 1
        if inside != (self.resource == "inside"):
            return found
        return self.messages.seconds(collective, size_bytes / MORE, group)


@final
class Sooner(Workload):
    """Measured layers, each of which takes a tenth less.

    Args:
        workload: as it was measured.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self.name, self.global_batch = workload.name, workload.global_batch
        self.numerics, self.sample_words = workload.numerics, workload.sample_words
        self.provenance, self.spread = workload.provenance, workload.spread

    def layers(self, arrangement: Arrangement) -> Sequence[LayerCost]:
        return [_sooner(layer) for layer in self._workload.layers(arrangement)]

    def refusal(self, arrangement: Arrangement) -> str | None:
        return self._workload.refusal(arrangement)

    def flops(self) -> float | None:
        return self._workload.flops()


def _sooner(layer: LayerCost) -> LayerCost:
    return replace(layer, forward_s=layer.forward_s / MORE, backward_s=layer.backward_s / MORE)


TERM_WORDS: Mapping[str, str] = {
    "compute": "computing",
    "shards": "collectives of shards",
    "bubble": "the pipeline's bubble",
    "stages": "messages between stages",
    "replicas": "summing over replicas",
    "optimizer": "the update",
    "waiting": "waiting for others and what a step takes beside",
}

EQUAL = 1e-6
"""Relatively: less than a plan can mean."""


def explained(plans: Sequence[Plan], asked: Objectives) -> tuple[Plan, ...]:
    """The same, each but the first with why the first was preferred."""
    return tuple(
        plan if not number or plan.why_not else replace(plan, why_not=why_not(plan, plans[0], asked))
        for number, plan in enumerate(plans)
    )


def why_not(plan: Plan, best: Plan, asked: Objectives) -> str:
    """The largest term in which it is worse, for as many samples as the best has in a step.

    Args:
        plan: one that is not the best.
        best: that is.
        asked: the objective.
    """
    if asked.objective == "memory":
        held = plan.cost.most.total - best.cost.most.total
        if held > EQUAL * best.cost.most.total:
            return f"holds {bytes_text(held)} more, most of it {_worst_held(plan.cost.most, best.cost.most)}"
    worse = _worse_s(plan, best)
    total = sum(worse.values())
    if asked.counts and _worth(plan) != _worth(best):
        return _why_not_batch(plan, best, asked)
    if total > EQUAL * best.cost.step_s:
        return _slower(worse, total)
    more = plan.cost.most.total - best.cost.most.total
    return f"as fast, and holds {bytes_text(more)} more" if more > 0 else "as fast and as small, but not as plain"


def _worse_s(plan: Plan, best: Plan) -> dict[str, Seconds]:
    """By how much, term by term."""
    scale = best.arrangement.samples / plan.arrangement.samples
    return {name: plan.cost.terms[name] * scale - best.cost.terms[name] for name in TERMS}


def _slower(worse: Mapping[str, Seconds], total: Seconds) -> str:
    name = max(TERMS, key=lambda term: worse[term])
    said = f"{seconds_text(total)} slower: {TERM_WORDS[name]} takes {seconds_text(worse[name])} more"
    better = min(TERMS, key=lambda term: worse[term])
    gained = f", though {TERM_WORDS[better]} takes {seconds_text(-worse[better])} less"
    return said + (gained if worse[better] < -EQUAL * abs(worse[name]) else "")


def _worth(plan: Plan) -> tuple[float, float]:
    """What it hangs on what a sample is worth."""
    return plan.arrangement.samples, plan.cost.staleness


def _why_not_batch(plan: Plan, best: Plan, asked: Objectives) -> str:
    samples, reference = plan.arrangement.samples, best.arrangement.samples
    old, of_best = plan.cost.staleness, asked.efficiency(reference, reference, best.cost.staleness)
    worth = asked.efficiency(samples, reference, old) / of_best
    rate = plan.samples_per_s / best.samples_per_s
    said = f"{rate:.2f} times the samples a second, each worth {worth:.2f} times as much in batches of {samples:,.0f}"
    return said + (f" from weights that are {old:.2g} updates old" if old else "")


def _worst_held(held: Held, best: Held) -> str:
    return max((each.name for each in fields(Held)), key=lambda name: getattr(held, name) - getattr(best, name))


@dataclass(frozen=True, slots=True)
class Gain:
    """What a tenth more of something would change of a step."""

    resource: Resource
    seconds: Seconds
    """Less of a step."""
    share: float
    """Of the step."""

    def __str__(self) -> str:
        return f"{RESOURCES[self.resource]}: a step takes {seconds_text(self.seconds)} less ({self.share:.1%})"


def gains(plan: Plan, workload: Workload, cluster: Cluster, habits: OverlapModel | None = None) -> tuple[Gain, ...]:
    """Of each resource, the largest first: the first of them is what holds the plan up most.

    By closed forms, of the same arrangement; what would be best then may gain more.
    """
    base = cost(workload, cluster, plan.arrangement, habits).step_s
    found = []
    for resource in RESOURCES:
        changed = quicker(workload, cluster, resource)
        if changed is not None:
            less = base - cost(*changed, plan.arrangement, habits).step_s
            found.append(Gain(resource, less, less / plan.cost.step_s))
    return tuple(sorted(found, key=lambda gain: -gain.seconds))

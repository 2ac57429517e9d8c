"""Explanation of plans: why one is ahead of another, the scaling curve, and the resource that limits the best most."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from math import log2
from typing import Any, Literal, TypeAlias, final

from paceline.clock.times import Delay
from paceline.core.formatting import bytes_text, seconds_text
from paceline.core.types import Seconds
from paceline.planner.base import TERMS, Arrangement, Collective, LayerCost, OverlapModel, Plan, WorkerMemory, Workload
from paceline.planner.cluster import Cluster, Described, DeviceGroup, Messages
from paceline.planner.cost import cost
from paceline.planner.program.measured_workload import MeasuredWorkload
from paceline.planner.search.objective import Objectives
from paceline.planner.search.search import CostCache, search
from paceline.planner.served_plans import served_step_s

# -------------------------------------------------------------------------------------------------------- scaling curve

# Factor in samples a second that makes twice the workers worth it: half of the possible gain.
HALF = 1.5

# Up to so many workers the curve has a point for each doubling, beyond for each fourfold.
FINE = 64


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Best plan of so many workers, by closed forms."""

    workers: int
    samples_per_s: float
    """0 where nothing fits."""
    strategy: str


@dataclass(frozen=True, slots=True)
class ScalingCurve:
    """Samples a second from one worker to all of them."""

    points: tuple[CurvePoint, ...]

    @property
    def knee(self) -> int | None:
        """Workers from which on twice as many give less than one and a half times as much; None: there is none."""
        fitting = [point for point in self.points if point.samples_per_s]
        for fewer, more in pairwise(fitting):
            times, gained = more.workers / fewer.workers, more.samples_per_s / fewer.samples_per_s
            if gained < HALF ** log2(times):
                return fewer.workers
        return None


def curve(cost_cache: CostCache, objectives: Objectives) -> ScalingCurve:
    """Search the best plans for 1, 2, 4, ... workers and for all, by closed forms; of many for 1, 4, 16, ...."""
    objectives, points = replace(objectives, simulated=1, delay=None), list[CurvePoint]()
    counts = worker_counts(objectives.max_workers(cost_cache.cluster))
    for count in reversed(counts):  # the bounds of most workers contain those of fewer
        limited = replace(objectives, workers=count)
        plans = search(cost_cache.workload, cost_cache.cluster, limited, cost_cache=cost_cache, simulate=False).plans
        points.append(_point(count, plans[0] if plans else None))
    return ScalingCurve(tuple(reversed(points)))


def curve_of(plans: Sequence[Plan], most: int) -> ScalingCurve:
    """Return the curve of plans that were made for each number of workers by itself."""
    points = []
    for count in worker_counts(most):
        fitting = [plan for plan in plans if plan.arrangement.workers <= count and plan.strategy is not None]
        points.append(_point(count, max(fitting, key=lambda plan: plan.samples_per_s, default=None)))
    return ScalingCurve(tuple(points))


def _point(workers: int, best: Plan | None) -> CurvePoint:
    return CurvePoint(workers, best.samples_per_s, str(best.strategy)) if best else CurvePoint(workers, 0.0, "")


def worker_counts(most: int) -> Sequence[int]:
    """Return the numbers of workers of a curve.

    >>> worker_counts(6), worker_counts(1), worker_counts(100)
    ([1, 2, 4, 6], [1], [1, 4, 16, 64, 100])
    """
    each = 1 if most <= FINE else 2
    return [*(2**k for k in range(0, most.bit_length(), each) if 2**k < most), most]


# ---------------------------------------------------------------------------------------------------------- bottlenecks

Resource: TypeAlias = Literal["compute", "memory", "inside", "between", "latency"]

RESOURCES: Mapping[Resource, str] = {
    "compute": "10 % more operations a second",
    "memory": "10 % more memory bandwidth",
    "inside": "10 % more bandwidth inside hosts",
    "between": "10 % more bandwidth between hosts",
    "latency": "10 % less latency of messages",
}

MORE = 1.1


@dataclass(frozen=True, slots=True)
class Gain:
    """Reduction of a step's time by a tenth more of a resource."""

    resource: Resource
    seconds: Seconds
    share: float
    """Share of the step."""

    def __str__(self) -> str:
        return f"{RESOURCES[self.resource]}: a step takes {seconds_text(self.seconds)} less ({self.share:.1%})"


def gains(
    plan: Plan,
    workload: Workload,
    cluster: Cluster,
    overlap_model: OverlapModel | None = None,
    delay: Delay | None = None,
) -> tuple[Gain, ...]:
    """Return the gain of each resource, the largest first: that is the bottleneck.

    By closed forms, for the same arrangement; the best arrangement of such a cluster may gain more. Delays count where
    a plan has servers.
    """

    def step_s(workload: Workload, cluster: Cluster) -> Seconds:
        costs = cost(workload, cluster, plan.arrangement, overlap_model)
        return served_step_s(plan, costs, workload, cluster, delay) if plan.servers else costs.step_s

    base_s, result = step_s(workload, cluster), list[Gain]()
    for resource in RESOURCES:
        changed = with_more(workload, cluster, resource)
        less_s = base_s - step_s(*changed)
        result.append(Gain(resource, less_s, less_s / plan.cost.step_s))
    return tuple(sorted(result, key=lambda gain: -gain.seconds))


def with_more(workload: Workload, cluster: Cluster, resource: Resource) -> tuple[Workload, Cluster]:
    """Return both with a tenth more of a resource."""
    name, messages = f"{resource}_bytes_per_s", cluster.messages
    if resource in ("compute", "memory"):
        name = "flops_per_s" if resource == "compute" else name
        device = replace(cluster.device, **{name: getattr(cluster.device, name) * MORE})
        described: Any = workload
        if getattr(workload, "device", None) == cluster.device:
            return replace(described, device=device), replace(cluster, device=device)
        if resource == "memory":  # which part of measured layers waits for memory is not known
            return workload, replace(cluster, device=device)
        faster = workload.faster(MORE) if isinstance(workload, MeasuredWorkload) else FasterLayers(workload)
        return faster, cluster
    if not isinstance(messages, Described):
        return workload, replace(cluster, messages=FasterMessages(messages, resource))
    links = messages.links
    if resource == "latency":
        links = replace(links, latency_s=links.latency_s / MORE, between_latency_s=links.between_latency_s / MORE)
    else:
        links = replace(links, **{name: getattr(links, name) * MORE})
    return workload, replace(cluster, messages=replace(messages, links=links))


@final
@dataclass(frozen=True)
class FasterMessages(Messages):
    """Measured messages with more of a resource; of a group on several hosts all bytes count as between them.

    Args:
        messages: as they were measured.
        resource: ``inside``, ``between`` or ``latency``.
    """

    messages: Messages
    resource: Resource

    def seconds(self, collective: Collective, size_bytes: float, group: DeviceGroup) -> Seconds:
        # The time of a message of one byte stands for the latency.
        measured_s = self.messages.seconds(collective, size_bytes, group)
        if self.resource == "latency":
            return measured_s - self.messages.seconds(collective, 1, group) * (1 - 1 / MORE)
        if (group.hosts == 1) != (self.resource == "inside"):
            return measured_s
        return self.messages.seconds(collective, size_bytes / MORE, group)


@final
class FasterLayers(Workload):
    """Layers of given times, each of which takes a tenth less.

    Args:
        workload: as it is.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        for name in ("name", "global_batch", "numerics", "provenance", "spread", "flops"):
            setattr(self, name, getattr(workload, name))

    def layers(self, arrangement: Arrangement) -> Sequence[LayerCost]:
        layers = self._workload.layers(arrangement)
        return [replace(each, forward_s=each.forward_s / MORE, backward_s=each.backward_s / MORE) for each in layers]

    def refusal(self, arrangement: Arrangement) -> str | None:
        return self._workload.refusal(arrangement)


# -------------------------------------------------------------------------------------------------------------- why not

TERM_WORDS: Mapping[str, str] = {
    "compute": "computing",
    "shards": "collectives of shards",
    "bubble": "the pipeline's bubble",
    "stages": "messages between stages",
    "replicas": "summing over replicas",
    "optimizer": "the update",
    "waiting": "waiting for others and overhead",
}

# Relative difference below which plans are equal.
EQUAL = 1e-6


def explained(plans: Sequence[Plan], objectives: Objectives) -> tuple[Plan, ...]:
    """Return the same plans, each but the first with why the first was preferred."""
    reasons = (plan.why_not or why_not(plan, plans[0], objectives) for plan in plans[1:])
    return *plans[:1], *(replace(plan, why_not=reason) for plan, reason in zip(plans[1:], reasons, strict=True))


def why_not(plan: Plan, best: Plan, objectives: Objectives) -> str:
    """Return the largest term in which a plan is worse, for as many samples as the best has in a step.

    Args:
        plan: one that is not the best.
        best: that is.
        objectives: of the search.
    """
    more_bytes = plan.cost.peak.total - best.cost.peak.total
    if objectives.objective == "memory" and more_bytes > EQUAL * best.cost.peak.total:
        names = [each.name for each in fields(WorkerMemory)]
        worst = max(names, key=lambda name: getattr(plan.cost.peak, name) - getattr(best.cost.peak, name))
        return f"holds {bytes_text(more_bytes)} more, most of it {worst}"
    own, reference = plan.arrangement.samples, best.arrangement.samples
    if objectives.statistical and (own, plan.cost.staleness) != (reference, best.cost.staleness):
        old, best_worth = plan.cost.staleness, objectives.efficiency(reference, reference, best.cost.staleness)
        worth = objectives.efficiency(own, reference, old) / best_worth
        rate = plan.samples_per_s / best.samples_per_s
        text = f"{rate:.2f} times the samples a second, each worth {worth:.2f} times as much in batches of {own:,.0f}"
        return text + (f" from weights that are {old:.2g} updates old" if old else "")
    worse_s = {name: plan.cost.terms[name] * (reference / own) - best.cost.terms[name] for name in TERMS}
    total_s = sum(worse_s.values())
    if total_s > EQUAL * best.cost.step_s:
        worst = max(TERMS, key=lambda term: worse_s[term])
        better = min(TERMS, key=lambda term: worse_s[term])
        text = f"{seconds_text(total_s)} slower: {TERM_WORDS[worst]} takes {seconds_text(worse_s[worst])} more"
        gained = f", though {TERM_WORDS[better]} takes {seconds_text(-worse_s[better])} less"
        return text + (gained if worse_s[better] < -EQUAL * abs(worse_s[worst]) else "")
    if more_bytes > 0:
        return f"as fast, and holds {bytes_text(more_bytes)} more"
    return "as fast and as small, but not as plain"

"""Why one plan is before another, and what the first of them would gain by."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from paceline.core.types import Seconds
from paceline.plan.answers.quicker import RESOURCES, Resource, quicker
from paceline.plan.base import TERMS, Held, Plan, Workload
from paceline.plan.cluster import Cluster
from paceline.plan.cost import cost
from paceline.plan.habits import Habits
from paceline.plan.searching.asked import Asked
from paceline.plan.words import bytes_text, seconds_text

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


def explained(plans: Sequence[Plan], asked: Asked) -> tuple[Plan, ...]:
    """The same, each but the first with why the first was preferred."""
    return tuple(
        plan if not number or plan.why_not else replace(plan, why_not=why_not(plan, plans[0], asked))
        for number, plan in enumerate(plans)
    )


def why_not(plan: Plan, best: Plan, asked: Asked) -> str:
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


def _why_not_batch(plan: Plan, best: Plan, asked: Asked) -> str:
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


def gains(plan: Plan, workload: Workload, cluster: Cluster, habits: Habits | None = None) -> tuple[Gain, ...]:
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

"""With replicas that are slow at times, every F that can be had competes with waiting for all of them.

A plan under a policy takes, for as many batches as there are replicas, what pace.py says; what that is more than its
own step is ``waiting``. Δs that are stale are worth less where the objective counts that (:meth:`Asked.efficiency`). A
policy that changes on its way has the pace of a run that ends when it has changed, simulated from its start.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from paceline.aggregation import SmoothSwitch, Synchronous, parse
from paceline.core.errors import InputError
from paceline.plan.base import Plan, Workload
from paceline.plan.cluster import Cluster
from paceline.plan.pacing.arrivals import Pace
from paceline.plan.pacing.pace import waiting
from paceline.plan.searching import carried
from paceline.plan.searching.asked import Asked

ENTERED = 8
"""Of each number of replicas so many of the best without delays are looked at."""


SWITCH_EVERY = 500
"""Δs between two steps of smooth-switch's K, as where nothing is said."""


class Paced(NamedTuple):
    """A plan under a policy."""

    plan: Plan
    pace: Pace


def compete(plans: Iterable[Plan], workload: Workload, cluster: Cluster, asked: Asked) -> list[Plan]:
    """All plans under all policies, best first.

    Args:
        plans: without delays, synchronous.
        workload: what is trained.
        cluster: on what.
        asked: with a delay.
    """
    paced = [found for plan in plans for policy in policies(plan, cluster) if (found := under(plan, policy, asked))]
    return [each.plan for each in sorted(paced, key=lambda each: seconds_of_a_sample(each, workload, asked))]


def policies(plan: Plan, cluster: Cluster) -> Iterator[str]:
    """That could carry it: some backups, K of P, whose others go on or are cancelled, nobody waits, a bound on
    staleness, switching, local steps."""
    replicas = plan.arrangement.replicas
    yield "synchronous"
    if replicas == 1 or not loose(plan, cluster):
        return
    yield from (f"synchronous:backups={b}" for b in sorted({1, replicas // 10, replicas // 4}) if 0 < b < replicas)
    few = sorted({replicas // 4, replicas // 2})
    most = sorted({replicas // 2, replicas * 3 // 4, replicas - 1})
    yield from (f"buffered:k={k}" for k in few if 1 < k < replicas)
    yield from (f"buffered:k={k},cancel=true" for k in most if 1 <= k < replicas)
    yield from ("asynchronous", "stale-synchronous:bound=3", f"smooth-switch:every={SWITCH_EVERY}")
    if plan.strategy is not None and plan.strategy.accumulate == 1:  # replicas that take own steps send no gradients
        yield "local-steps:period=8"


def loose(plan: Plan, cluster: Cluster) -> bool:
    """Whether other policies than the synchronous one are carried: on one host, by processes that share A."""
    arrangement = plan.arrangement
    if arrangement.workers > cluster.devices_per_host or arrangement.divided:
        return False
    if cluster.device.kind == "cuda" and carried.pipelined(arrangement):
        return False
    return carried.engine_of(arrangement, 2**62) == "local"


def under(plan: Plan, policy: str, asked: Asked) -> Paced | None:
    """A plan with the time that a policy takes; None where the policy can't be had with so many replicas."""
    assert plan.strategy is not None, "search proposes what is carried alone"
    replicas, before = plan.arrangement.replicas, plan.cost.step_s
    try:
        pace = waiting(policy, replicas, before, str(asked.delay), arrivals=arrivals(policy, replicas))
    except InputError:
        return None
    step_s = pace.step_s(replicas)
    terms = {**plan.cost.terms, "waiting": plan.cost.terms["waiting"] + step_s - before}
    times = step_s / before
    found = replace(
        plan,
        cost=replace(plan.cost, terms=terms),
        low_s=plan.low_s * times,
        high_s=plan.high_s * times,
        samples_per_s=plan.samples_per_s / times,
        utilisation=None if plan.utilisation is None else plan.utilisation / times,
        strategy=replace(plan.strategy, aggregation=parse(policy)),
        provenance={**plan.provenance, "waiting": _told(pace, asked)},
    )
    return Paced(found, pace)


def arrivals(policy: str, replicas: int) -> int | None:
    """Δs of a run that ends when a policy has changed from nobody waits to all wait; None: it goes on as it is.

    >>> arrivals("smooth-switch:every=500", 4), arrivals("asynchronous", 4)
    (2000, None)
    """
    match parse(policy):
        case SmoothSwitch(every=int() | float() as every):
            return round(every * replicas)
    return None


def _told(pace: Pace, asked: Asked) -> str:
    how = f"with --delay {str(asked.delay)!r}: {pace.batches:.3g} Δs an update, {pace.staleness:.2f} updates old"
    unsaid = "" if asked.counts or pace.staleness == 0 else "; what staleness costs is not counted in samples a second"
    return how + unsaid


def seconds_of_a_sample(paced: Paced, workload: Workload, asked: Asked) -> tuple[float, float, bool]:
    """That counts; then bytes; then whether it is something else than synchronous."""
    plan, pace = paced
    of_update = plan.arrangement.samples * pace.batches / plan.arrangement.replicas
    worth = asked.efficiency(of_update, workload.global_batch, pace.staleness + plan.cost.staleness)
    held = plan.cost.most.total
    seconds = 1 / (plan.samples_per_s * worth)
    strict = plan.strategy is not None and plan.strategy.aggregation == Synchronous()
    first, second = (held, seconds) if asked.objective == "memory" else (seconds, held)
    return float(f"{first:.9e}"), second, not strict

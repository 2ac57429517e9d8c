"""Which plans are worth showing: the best of each kind, not five sizes of one.

Kinds are those of :mod:`paceline.planner.search.ranking`, and with delays the policy too. A plan is left out where a
better one of its kind is shown and the two can't be told apart: within what both may lie off, by the interval in which
nine of ten steps are to lie. The best plan is always shown, and all that are shown stay in their order.

The sources' rules of thumb, beside the numbers, and whether the two agree.

All that is said of a search: the best plans, why they are, what fits, and how far one gets with more workers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.aggregation import Synchronous
from paceline.planner.base import Arrangement, OverlapModel, Plan, Workload
from paceline.planner.cluster import Cluster
from paceline.planner.explain import Curve, Gain, curve, curve_of, explained, gains
from paceline.planner.feasibility import Fit, smallest_change
from paceline.planner.search.cost_cache import CostCache
from paceline.planner.search.objective import Objectives
from paceline.planner.search.ranking import key, kind_of
from paceline.planner.search.search import OF_EACH_KIND, search


@dataclass(frozen=True, slots=True)
class Alternatives:
    """What is shown of plans."""

    plans: tuple[Plan, ...]
    left_out: int
    """As good as one that is shown and of its kind, before the last that is shown; after all where fewer are shown."""


def alternatives(plans: Sequence[Plan], workload: Workload, asked: Objectives, count: int) -> Alternatives:
    """The first so many that differ.

    Args:
        plans: the best first.
        workload: what they train.
        asked: the objective.
        count: how many are shown at the most.
    """
    shown, left_out = list[Plan](), 0
    for plan in plans:
        if len(shown) == count:
            break
        if any(_alike(plan, better) and _near(plan, better, workload, asked) for better in shown):
            left_out += 1
        else:
            shown.append(plan)
    return Alternatives(tuple(shown), left_out)


def _alike(plan: Plan, better: Plan) -> bool:
    """Of one kind; what can't be had stands for nothing else."""
    policies = [type(each.strategy.aggregation) for each in (plan, better) if each.strategy is not None]
    same = len(set(policies)) == 1 and kind_of(plan.arrangement) == kind_of(better.arrangement)
    return same and not plan.why_not and not better.why_not


def _near(plan: Plan, better: Plan, workload: Workload, asked: Objectives) -> bool:
    """Whether the two intervals overlap."""
    off = (better.high_s / better.cost.step_s) * (plan.cost.step_s / plan.low_s)
    return key(plan, workload, asked)[0] <= key(better, workload, asked)[0] * off


SMALL_BATCH = 64
FEW_NODES, MANY_NODES = 32, 50


@dataclass(frozen=True, slots=True)
class Rule:
    """One of them."""

    rule: str
    numbers: str
    """What they say, for this workload on this cluster."""
    agrees: bool | None
    """None: it has nothing to say here."""

    def __str__(self) -> str:
        verdict = {True: "the numbers agree", False: "the numbers disagree", None: "does not apply"}[self.agrees]
        return f"{self.rule}: {verdict}; {self.numbers}"


def rules(best: Plan, every: Sequence[Plan], fit: Fit, known: CostCache, asked: Objectives) -> tuple[Rule, ...]:
    """All four.

    Args:
        best: of what is carried.
        every: the best of all, carried yet or not: rules know nothing of that.
        fit: what had to be changed of the plain way.
        known: the workload and the cluster.
        asked: what for.
    """
    return _small(best, fit, known), _shards(every, known), _stages(best, known), _pace(best, asked)


def _small(best: Plan, fit: Fit, known: CostCache) -> Rule:
    """Of the introduction that both sources share."""
    rule = f"batch < {SMALL_BATCH} and the model fits a worker: data parallel"
    fits = fit.fits and fit.arrangement is None and known.workload.global_batch < SMALL_BATCH
    a = best.arrangement
    plain = a.stages == a.shards == 1
    numbers = f"batch {known.workload.global_batch}, best is {_mesh(a)}"
    return Rule(rule, numbers, plain if fits else None)


def _shards(every: Sequence[Plan], known: CostCache) -> Rule:
    """Of the best that has any."""
    rule, each = "shards inside a host", known.cluster.devices_per_host
    divided = [plan.arrangement for plan in every if plan.arrangement.shards > 1]
    if known.cluster.hosts == 1 or not divided:
        return Rule(rule, "one host" if known.cluster.hosts == 1 else "none of the best has shards", None)
    return Rule(rule, f"the best with shards is {_mesh(divided[0])}", divided[0].shards <= each)


def _stages(best: Plan, known: CostCache) -> Rule:
    rule, a, each = "a pipeline across hosts", best.arrangement, known.cluster.devices_per_host
    if a.workers <= each:
        return Rule(rule, "the best stays on one host", None)
    if a.stages == a.shards == 1:
        return Rule(rule, "no replica of the best is larger than a worker", None)
    between = a.stages > 1 and a.stages * a.shards > each
    return Rule(rule, f"best is {_mesh(a)}, {each} workers a host", between)


def _pace(best: Plan, asked: Objectives) -> Rule:
    rule = f"synchronous up to {FEW_NODES}-{MANY_NODES} nodes, looser beyond or where workers differ"
    replicas = best.arrangement.replicas
    if replicas == 1:
        return Rule(rule, "the best is one replica, which waits for nobody", None)
    if best.strategy is None or (asked.delay is None and replicas <= MANY_NODES):
        return Rule(rule, f"{replicas} replicas that take the same time: synchronous", True)
    if asked.delay is None:
        return Rule(rule, f"{replicas} replicas, but nothing says that they differ; --delay does", None)
    strict = isinstance(best.strategy.aggregation, Synchronous)
    said = "synchronous" if strict else "looser"
    return Rule(rule, f"with this delay {said} is best of {replicas} replicas", not strict)


def _mesh(a: Arrangement) -> str:
    stages = list(a.copies) if a.copies else a.stages
    return f"replicas={a.replicas} stages={stages} shards={a.shards}"


SHOWN = 5
"""Of the best."""


@dataclass(frozen=True, slots=True)
class PlanReport:
    """To which strategy, how fast, how much memory, and why."""

    name: str
    workload: Workload
    cluster: Cluster
    asked: Objectives
    plans: tuple[Plan, ...]
    """The five best that differ; empty where nothing fits."""
    left_out: int
    """Others of these kinds, that can't be told from one of them."""
    gains: tuple[Gain, ...]
    curve: Curve
    fit: Fit
    rules: tuple[Rule, ...]
    beyond: Plan | None
    """A better one that is not carried on such devices yet."""

    @property
    def workers(self) -> int:
        """That may be used."""
        return _workers(self.cluster, self.asked)


def _workers(cluster: Cluster, asked: Objectives) -> int:
    return min(cluster.workers, asked.workers or cluster.workers)


def answer(
    name: str,
    plans: Sequence[Plan],
    workload: Workload,
    cluster: Cluster,
    asked: Objectives,
    habits: OverlapModel | None = None,
    known: CostCache | None = None,
    *,
    measured: bool = False,
) -> PlanReport:
    """What is to be said of plans.

    Args:
        name: of the workload.
        plans: that a search has found, the best first.
        workload: what is trained.
        cluster: on what.
        asked: what for.
        habits: as of the search.
        known: what that search has found out.
        measured: whether plans were made for each number of workers by itself, on this host.
    """
    known = known or CostCache.of(workload, cluster, habits)
    carried = [plan for plan in plans if plan.strategy is not None]
    differing = alternatives(carried, workload, asked, SHOWN)
    shown = explained(differing.plans, asked)
    every = plans[: 2 * SHOWN] if _all_carried(cluster, asked) and not measured else _every(known, asked)
    fit = smallest_change(known, asked)
    return PlanReport(
        name,
        workload,
        cluster,
        asked,
        shown,
        differing.left_out,
        gains(shown[0], workload, cluster, habits) if shown else (),
        curve_of(plans, _workers(cluster, asked)) if measured else curve(workload, cluster, asked, habits, known),
        fit,
        rules(shown[0], every, fit, known, asked) if shown else (),
        _beyond(shown, every, known, asked),
    )


def _all_carried(cluster: Cluster, asked: Objectives) -> bool:
    """Whether what was asked for is all there is."""
    return asked.delay is None and (asked.unbuilt or (cluster.device.kind == "cpu" and asked.engine is None))


def _every(known: CostCache, asked: Objectives) -> tuple[Plan, ...]:
    """The best, carried on such devices yet or not."""
    every = replace(asked, unbuilt=True, delay=None, simulated=2 * SHOWN)
    return search(known.workload, known.cluster, every, known=known, of_each_kind=OF_EACH_KIND).plans


def _beyond(plans: Sequence[Plan], every: Sequence[Plan], known: CostCache, asked: Objectives) -> Plan | None:
    """The best of all, if it is better than the best that is carried."""
    if asked.unbuilt or known.cluster.device.kind == "cpu" or not every:
        return None
    if plans and key(plans[0], known.workload, asked) <= key(every[0], known.workload, asked):
        return None
    return every[0]

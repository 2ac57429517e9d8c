"""Report of a search: the best plans that differ, why they are best, what fits, scaling, and rules of thumb."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.aggregation import Synchronous
from paceline.planner.base import Arrangement, OverlapModel, Plan, Workload, merged
from paceline.planner.cluster import Cluster
from paceline.planner.explain import Gain, ScalingCurve, curve, curve_of, explained, gains
from paceline.planner.feasibility import Fit, smallest_change
from paceline.planner.search import supported
from paceline.planner.search.objective import Objectives
from paceline.planner.search.search import OF_EACH_KIND, CostCache, key, kind_of, search

# Plans of a report.
SHOWN = 5

SMALL_BATCH = 64
FEW_NODES, MANY_NODES = 32, 50


def alternatives(
    plans: Sequence[Plan], workload: Workload, objectives: Objectives, count: int
) -> tuple[tuple[Plan, ...], int]:
    """Return the first so many that differ, in their order: the best of each kind, not five sizes of one.

    A plan is left out where a better one of its kind and policy is shown and the intervals overlap in which nine of ten
    of their steps are. Unsupported plans don't stand for others.

    Args:
        plans: the best first.
        workload: of the plans.
        objectives: of the search.
        count: maximal number of plans.

    Returns:
        The plans to show, and the number of plans before the last of these (of all, where fewer are shown) that equal
        one of these of their kind.
    """

    def equals(plan: Plan, better: Plan) -> bool:
        policies = [type(each.strategy.aggregation) for each in (plan, better) if each.strategy is not None]
        kinds = [kind_of(each.arrangement, each.arrangement) for each in (plan, better)]
        if len(set(policies)) != 1 or kinds[0] != kinds[1] or plan.why_not or better.why_not:
            return False
        # Intervals overlap if the faster one's end is beyond the slower one's begin, in relative terms.
        spread = (better.high_s / better.cost.step_s) * (plan.cost.step_s / plan.low_s)
        return key(plan, workload, objectives)[0] <= key(better, workload, objectives)[0] * spread

    shown, left_out = list[Plan](), 0
    for plan in plans:
        if len(shown) == count:
            break
        if any(equals(plan, better) for better in shown):
            left_out += 1
        else:
            shown.append(plan)
    return tuple(shown), left_out


# ------------------------------------------------------------------------------------------------------- rules of thumb


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of thumb, compared with the numbers."""

    rule: str
    numbers: str
    """Numbers of this workload on this cluster."""
    agrees: bool | None
    """None: the rule does not apply."""

    def __str__(self) -> str:
        verdict = {True: "the numbers agree", False: "the numbers disagree", None: "does not apply"}[self.agrees]
        return f"{self.rule}: {verdict}; {self.numbers}"


def rules(
    best: Plan, every: Sequence[Plan], fit: Fit, cost_cache: CostCache, objectives: Objectives
) -> tuple[Rule, ...]:
    """Compare the sources' four rules of thumb with the numbers.

    Args:
        best: the best supported plan.
        every: the best of all, without limits of the objectives; other than proposed ones aren't named.
        fit: the smallest change that fits.
        cost_cache: the workload and the cluster.
        objectives: of the search.
    """
    a, each, batch = best.arrangement, cost_cache.cluster.devices_per_host, cost_cache.workload.global_batch
    plain_fits = fit.fits and fit.arrangement is None and batch < SMALL_BATCH
    small = Rule(
        f"batch < {SMALL_BATCH} and the model fits a worker: data parallel",
        f"batch {batch}, best is {_mesh(a)}",
        a.stages == a.shards == 1 if plain_fits else None,
    )
    sharded, rule = [plan.arrangement for plan in every if plan.arrangement.shards > 1], "shards inside a host"
    if cost_cache.cluster.hosts == 1:
        shards = Rule(rule, "one host", None)
    elif not sharded:
        shards = Rule(rule, "none of the best has shards", None)
    else:
        shards = Rule(rule, f"the best with shards is {_mesh(sharded[0])}", sharded[0].shards <= each)
    rule = "a pipeline across hosts"
    if a.workers <= each:
        stages = Rule(rule, "the best stays on one host", None)
    elif a.stages == a.shards == 1:
        stages = Rule(rule, "no replica of the best is larger than a worker", None)
    else:
        between = a.stages > 1 and a.stages * a.shards > each
        stages = Rule(rule, f"best is {_mesh(a)}, {each} workers a host", between)
    return small, shards, stages, _policy_rule(best, objectives)


def _policy_rule(best: Plan, objectives: Objectives) -> Rule:
    rule = f"synchronous up to {FEW_NODES}-{MANY_NODES} nodes, looser beyond or where workers differ"
    replicas = best.arrangement.replicas
    if replicas == 1:
        return Rule(rule, "the best is one replica, which never waits", None)
    alike = objectives.delay is None and best.servers is None
    if best.strategy is None or (alike and replicas <= MANY_NODES):
        return Rule(rule, f"{replicas} replicas that take the same time: synchronous", True)
    if objectives.delay is None and best.servers is not None:
        return Rule(rule, f"{replicas} replicas that take the same time, which is what links decide on", None)
    if alike:
        return Rule(rule, f"{replicas} replicas, but nothing says that they differ; --delay does", None)
    strict = isinstance(best.strategy.aggregation, Synchronous)
    kind = "synchronous" if strict else "looser"
    return Rule(rule, f"with this delay {kind} is best of {replicas} replicas", not strict)


def _mesh(a: Arrangement) -> str:
    stages = list(a.copies) if a.copies else a.stages
    return f"replicas={a.replicas} stages={stages} shards={a.shards}"


# --------------------------------------------------------------------------------------------------------------- report


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Best strategies, their time and memory, and the reasons."""

    name: str
    workload: Workload
    cluster: Cluster
    objectives: Objectives
    plans: tuple[Plan, ...]
    """The five best that differ; empty where nothing fits."""
    left_out: int
    """Other plans of these kinds that equal one of them."""
    gains: tuple[Gain, ...]
    curve: ScalingCurve
    fit: Fit
    rules: tuple[Rule, ...]
    beyond: Plan | None
    """A better plan that is not supported on such devices yet: counted, and never named."""

    @property
    def workers(self) -> int:
        """Number of workers that plans may have."""
        return self.objectives.max_workers(self.cluster)

    @property
    def provenance(self) -> dict[str, str]:
        """Sources of all numbers, and those of the best plan."""
        sources = merged(self.workload.provenance, self.cluster.provenance, self.cluster.device.provenance)
        return sources | (dict(self.plans[0].provenance) if self.plans else {})

    def json(self, program: str) -> dict[str, Any]:
        """Return the report as JSON."""
        each = self.cluster.devices_per_host
        return {
            "program": self.name,
            "cluster": self.cluster.name,
            "workers": self.workers,
            "objective": self.objectives.objective,
            "fits": bool(self.plans),
            "plans": [plan_json(plan, program, each) for plan in self.plans],
            "left_out": self.left_out,
            "bottlenecks": [asdict(gain) for gain in self.gains],
            "curve": {"points": [asdict(point) for point in self.curve.points], "knee": self.curve.knee},
            "fit": {"text": self.fit.text, "fits": self.fit.fits},
            "rules": [asdict(rule) for rule in self.rules],
            "beyond": None if self.beyond is None else unnamed_json(self.beyond),
            "provenance": self.provenance,
        }


def answer(
    name: str,
    plans: Sequence[Plan],
    workload: Workload,
    cluster: Cluster,
    objectives: Objectives,
    overlap_model: OverlapModel | None = None,
    cost_cache: CostCache | None = None,
    *,
    measured: bool = False,
) -> PlanReport:
    """Return the report of a search.

    Args:
        name: of the workload.
        plans: of the search, the best first.
        workload: that is trained.
        cluster: that it is trained on.
        objectives: of the search.
        overlap_model: of the search.
        cost_cache: of that search.
        measured: whether plans were made for each number of workers by itself, on this host.
    """
    cost_cache = cost_cache or CostCache(workload, cluster, overlap_model)
    possible = [plan for plan in plans if plan.strategy is not None]
    differing, left_out = alternatives(possible, workload, objectives, SHOWN)
    shown = explained(differing, objectives)
    cpu = cluster.device.kind == "cpu"
    all_supported = objectives.unbuilt or (cpu and objectives.engine is None)
    every = plans[: 2 * SHOWN]
    if objectives.delay is not None or not all_supported or measured:
        engine = None if objectives.engine == "ray" else objectives.engine
        unlimited = replace(objectives, engine=engine, unbuilt=True, delay=None, simulated=2 * SHOWN)
        every = search(workload, cluster, unlimited, cost_cache=cost_cache, of_each_kind=OF_EACH_KIND).plans
    beyond = None
    if every and not objectives.unbuilt and not cpu and objectives.delay is None:
        best, beyond = every[0], every[0]
        if shown and key(shown[0], workload, objectives) <= key(best, workload, objectives):
            beyond = None
    fit = smallest_change(cost_cache, objectives)
    resources = gains(shown[0], workload, cluster, overlap_model, objectives.delay) if shown else ()
    scaling = curve_of(plans, objectives.max_workers(cluster)) if measured else curve(cost_cache, objectives)
    named = [plan for plan in every if objectives.unbuilt or _runs(plan, cluster)]
    compared = rules(shown[0], named, fit, cost_cache, objectives) if shown else ()
    return PlanReport(name, workload, cluster, objectives, shown, left_out, resources, scaling, fit, compared, beyond)


# ----------------------------------------------------------------------------------------------------------------- JSON

# Terms of a step that are communication.
EXPOSED = ("shards", "stages", "replicas")


def exposed(plan: Plan) -> float:
    """Return the share of a step that is communication which does not overlap with compute."""
    return sum(plan.cost.terms[name] for name in EXPOSED) / plan.cost.step_s


def _runs(plan: Plan, cluster: Cluster) -> bool:
    """Return True if the devices of a cluster run a plan, by any engine."""
    return supported.supports(plan.arrangement, cluster.device.kind)


def command_of(plan: Plan, program: str, devices_per_host: int) -> str | None:
    """Return the command that runs a plan; None where it is not supported on its devices."""
    if plan.strategy is None or not supported.supports(plan.arrangement, plan.strategy.device):
        return None
    engine = "ray" if plan.servers else supported.engine_of(plan.arrangement, devices_per_host)
    return supported.command(program, plan.strategy, engine, devices_per_host)


def unnamed_json(plan: Plan) -> dict[str, Any]:
    """Return the JSON of a plan that is not supported on its devices: a step's seconds, and samples a second."""
    return {"step_s": plan.cost.step_s, "samples_per_s": plan.samples_per_s}


def plan_json(plan: Plan, program: str, devices_per_host: int) -> dict[str, Any]:
    """Return the JSON of one plan: numbers in seconds, bytes and samples."""
    cost = plan.cost
    rates = {name: getattr(plan, name) for name in ("low_s", "high_s", "samples_per_s", "utilisation")}
    return {
        "strategy": None if plan.strategy is None else str(plan.strategy),
        "command": command_of(plan, program, devices_per_host),
        "arrangement": asdict(plan.arrangement) | {"workers": plan.arrangement.workers},
        "step_s": cost.step_s,
        **rates,
        "bubble": cost.terms["bubble"] / cost.step_s,
        "exposed_communication": exposed(plan),
        "terms_s": dict(cost.terms),
        "peak_bytes": cost.peak.total,
        "memory_bytes": [asdict(memory) | {"total": memory.total} for memory in cost.memory],
        "sent_bytes": dict(cost.sent_bytes),
        "servers": None if plan.servers is None else plan.servers.json(),
        "simulated": plan.simulated,
        "why_not": plan.why_not,
        "provenance": dict(plan.provenance),
    }

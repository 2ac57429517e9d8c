"""The sources' rules of thumb, beside the numbers, and whether the two agree."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.aggregation import Synchronous
from paceline.plan.answers.fitting import Fit
from paceline.plan.base import Arrangement, Plan
from paceline.plan.searching.asked import Asked
from paceline.plan.searching.known import Known

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


def rules(best: Plan, every: Sequence[Plan], fit: Fit, known: Known, asked: Asked) -> tuple[Rule, ...]:
    """All four.

    Args:
        best: of what is carried.
        every: the best of all, carried yet or not: rules know nothing of that.
        fit: what had to be changed of the plain way.
        known: the workload and the cluster.
        asked: what for.
    """
    return _small(best, fit, known), _shards(every, known), _stages(best, known), _pace(best, asked)


def _small(best: Plan, fit: Fit, known: Known) -> Rule:
    """Of the introduction that both sources share."""
    rule = f"batch < {SMALL_BATCH} and the model fits a worker: data parallel"
    fits = fit.fits and fit.arrangement is None and known.workload.global_batch < SMALL_BATCH
    a = best.arrangement
    plain = a.stages == a.shards == 1
    numbers = f"batch {known.workload.global_batch}, best is {_mesh(a)}"
    return Rule(rule, numbers, plain if fits else None)


def _shards(every: Sequence[Plan], known: Known) -> Rule:
    """Of the best that has any."""
    rule, each = "shards inside a host", known.cluster.devices_per_host
    divided = [plan.arrangement for plan in every if plan.arrangement.shards > 1]
    if known.cluster.hosts == 1 or not divided:
        return Rule(rule, "one host" if known.cluster.hosts == 1 else "none of the best has shards", None)
    return Rule(rule, f"the best with shards is {_mesh(divided[0])}", divided[0].shards <= each)


def _stages(best: Plan, known: Known) -> Rule:
    rule, a, each = "a pipeline across hosts", best.arrangement, known.cluster.devices_per_host
    if a.workers <= each:
        return Rule(rule, "the best stays on one host", None)
    if a.stages == a.shards == 1:
        return Rule(rule, "no replica of the best is larger than a worker", None)
    between = a.stages > 1 and a.stages * a.shards > each
    return Rule(rule, f"best is {_mesh(a)}, {each} workers a host", between)


def _pace(best: Plan, asked: Asked) -> Rule:
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

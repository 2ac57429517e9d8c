"""All that is said of a search: the best plans, why they are, what fits, and how far one gets with more workers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.plan.answers.alternatives import alternatives
from paceline.plan.answers.curve import Curve, curve, curve_of
from paceline.plan.answers.explain import Gain, explained, gains
from paceline.plan.answers.fitting import Fit, smallest_change
from paceline.plan.answers.rules import Rule, rules
from paceline.plan.base import Plan, Workload
from paceline.plan.cluster import Cluster
from paceline.plan.habits import Habits
from paceline.plan.searching.asked import Asked
from paceline.plan.searching.known import Known
from paceline.plan.searching.ranking import key
from paceline.plan.searching.search import OF_EACH_KIND, search

SHOWN = 5
"""Of the best."""


@dataclass(frozen=True, slots=True)
class Answer:
    """To which strategy, how fast, how much memory, and why."""

    name: str
    workload: Workload
    cluster: Cluster
    asked: Asked
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


def _workers(cluster: Cluster, asked: Asked) -> int:
    return min(cluster.workers, asked.workers or cluster.workers)


def answer(
    name: str,
    plans: Sequence[Plan],
    workload: Workload,
    cluster: Cluster,
    asked: Asked,
    habits: Habits | None = None,
    known: Known | None = None,
    *,
    measured: bool = False,
) -> Answer:
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
    known = known or Known.of(workload, cluster, habits)
    carried = [plan for plan in plans if plan.strategy is not None]
    differing = alternatives(carried, workload, asked, SHOWN)
    shown = explained(differing.plans, asked)
    every = plans[: 2 * SHOWN] if _all_carried(cluster, asked) and not measured else _every(known, asked)
    fit = smallest_change(known, asked)
    return Answer(
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


def _all_carried(cluster: Cluster, asked: Asked) -> bool:
    """Whether what was asked for is all there is."""
    return asked.delay is None and (asked.unbuilt or (cluster.device.kind == "cpu" and asked.engine is None))


def _every(known: Known, asked: Asked) -> tuple[Plan, ...]:
    """The best, carried on such devices yet or not."""
    every = replace(asked, unbuilt=True, delay=None, simulated=2 * SHOWN)
    return search(known.workload, known.cluster, every, known=known, of_each_kind=OF_EACH_KIND).plans


def _beyond(plans: Sequence[Plan], every: Sequence[Plan], known: Known, asked: Asked) -> Plan | None:
    """The best of all, if it is better than the best that is carried."""
    if asked.unbuilt or known.cluster.device.kind == "cpu" or not every:
        return None
    if plans and key(plans[0], known.workload, asked) <= key(every[0], known.workload, asked):
        return None
    return every[0]

"""Plans of a program for this host: what was measured of it, every arrangement, and the best few foretold anew."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.errors import InputError
from paceline.plan.base import Plan, Workload
from paceline.plan.cluster import Cluster
from paceline.plan.host.by_pieces import foretell
from paceline.plan.host.closed import asked_here, closed_plans, once, workload_of
from paceline.plan.host.here import cores
from paceline.plan.host.measured import MeasuredWorkload, cluster_of
from paceline.plan.host.profile import Profile, kind
from paceline.plan.host.profiling import Tell, profile, silent
from paceline.plan.searching.asked import Asked
from paceline.plan.searching.carried import plainness
from paceline.plan.searching.ranking import key
from paceline.program import Program

FORETOLD = 4
"""So many of the best are foretold from pieces."""

TIMES = 3
"""What is not measured may look better than what was: then it is measured too, up to so many times as many plans."""

EVEN = 0.05
"""Plans that differ by less are as good: pieces foretell steps within 2 to 6 % here (benchmarks/hybrid)."""

NEAR = 0.5
"""A kind of replica that has less than this share of the best's samples a second by closed forms, which are not so far
off, is not foretold before others."""


@dataclass(frozen=True)
class Found:
    """Plans of a program, the best first, and what they were made of."""

    plans: Sequence[Plan]
    profile: Profile
    workload: MeasuredWorkload
    cluster: Cluster
    asked: Asked


def plans_here(
    program: Program,
    asked: Asked,
    known: Profile | None = None,
    tell: Tell = silent,
    *,
    foretold: int = FORETOLD,
) -> Found:
    """Of a program.

    Args:
        program: what is to be trained.
        asked: the objective and the most workers; None of them: as many as this host has cores. Where replicas are to
            be delayed, what policies make of it is simulated, and nothing is foretold from pieces.
        known: its profile; None: it is measured.
        tell: of how far it is.
        foretold: how many of the best are foretold from their pieces; 0: none.

    Raises:
        InputError: the program can't make a step, or more workers than cores are asked for.
    """
    most = asked.workers or cores()
    if most > cores():
        raise InputError(
            f"workers={most}, but this process may use {cores()} cores, and workers that share one can't be measured; "
            f"write workers={cores()}, or cluster= for another machine"
        )
    measured = known or profile(program, most, tell)
    asked = asked_here(program, asked, most)
    workload = workload_of(program, measured, most)

    def by(plan: Plan) -> float:
        return rank(plan, workload, asked)

    every = [plan for count in range(1, most + 1) for plan in closed_plans(program, measured, asked, count)]
    ranked = sorted(every if asked.objective == "memory" else once(every), key=by)
    chosen = select(apart(ranked), 0 if asked.delay else foretold, workload, asked)
    anew = list[Plan]()
    while chosen and len(anew) < TIMES * foretold:
        anew += foretell(chosen, program, measured, tell)
        ranked = [plan for plan in ranked if plan not in chosen]
        found = [by(plan) for plan in had(anew)]
        chosen = [plan for plan in apart(ranked) if not found or by(plan) < min(found)][:foretold]
    best = plainest_first(sorted(had(anew), key=by), workload, asked)
    others = sorted([*best[1:], *ranked], key=by)
    plans = [*best[:1], *others, *(plan for plan in anew if plan.why_not)]
    return Found(plans, measured, workload, cluster_of(measured, most), asked)


def apart(plans: Sequence[Plan]) -> list[Plan]:
    """Those whose steps end: what never does is not put together of the pieces of one."""
    return [plan for plan in plans if not plan.cost.staleness]


def had(plans: Sequence[Plan]) -> list[Plan]:
    """Those that can be had."""
    return [plan for plan in plans if not plan.why_not]


def select(ranked: Sequence[Plan], count: int, workload: Workload, asked: Asked) -> list[Plan]:
    """The best of each kind of replica that is near the best of all, then the best of all: so many, in their order."""
    near = [plan for plan in ranked if plan.samples_per_s >= NEAR * ranked[0].samples_per_s]
    chosen = list(firsts(near, workload, asked).values())
    wanted = [*chosen, *(plan for plan in ranked if plan not in chosen)][:count]
    return [plan for plan in ranked if plan in wanted]


def firsts(ranked: Sequence[Plan], workload: Workload, asked: Asked) -> dict[str, Plan]:
    """The best of each kind of replica; of those that can't be told from it the plainest."""
    by_kind: dict[str, list[Plan]] = {}
    for plan in ranked:
        by_kind.setdefault(kind(plan.arrangement), []).append(plan)
    return {name: plainest_first(plans, workload, asked)[0] for name, plans in by_kind.items()}


def plainest_first(ranked: Sequence[Plan], workload: Workload, asked: Asked) -> list[Plan]:
    """The plainest of those that can't be told from the best comes first: measuring again may turn them round."""
    if not ranked:
        return []
    best = rank(ranked[0], workload, asked)
    even = [plan for plan in ranked if rank(plan, workload, asked) - best <= EVEN * abs(best)]
    first = min(even, key=lambda plan: plainness(plan.arrangement))
    return [first, *(plan for plan in ranked if plan is not first)]


def rank(plan: Plan, workload: Workload, asked: Asked) -> float:
    """What is less of the better plan: the first thing that a search ranks by."""
    return key(plan, workload, asked)[0]

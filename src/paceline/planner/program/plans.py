"""Plans of a program for this host: every arrangement, the best few predicted anew from components.

Plans of a program for this host: what was measured of it, every arrangement, and the best few foretold anew.

strategy="auto": the best plan of a program for this host, and in one line why.

Closed forms rank what may be done; the best of it differs by little. So the best few are measured: computing of every
stage or shard as it is cut for them, their collectives, messages, copies and updates, put together as
``times="measured"`` does, and what a short run of the same kind took compared with its own components.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from paceline.comm.fork_server import ForkServer
from paceline.core.errors import InputError, WorkerError
from paceline.core.types import Seconds
from paceline.engine.step_profile.predict import NEEDS
from paceline.planner.base import TERMS, Cost, Plan, Workload
from paceline.planner.cluster import Cluster
from paceline.planner.program.closed_form import (
    STAGED,
    asked_here,
    closed_plans,
    cores,
    job_for,
    once,
    pieces_of,
    staged_s,
    workload_of,
)
from paceline.planner.program.measured_workload import MeasuredWorkload, cluster_of
from paceline.planner.program.profile import Pieces, Profile, ShortRun, kind
from paceline.planner.program.profiling import Tell, profile, silent
from paceline.planner.program.short_runs import in_a_line
from paceline.planner.search.objective import Objectives
from paceline.planner.search.ranking import key
from paceline.planner.search.supported import plainness
from paceline.program import Program
from paceline.strategy import AUTO, Strategy

TOLD = "foretold from its pieces, each measured here on processes that were as busy as they will be"


def foretell(plans: Sequence[Plan], program: Program, profile: Profile, tell: Tell = silent) -> list[Plan]:
    """The same plans with what their pieces take; one that can't be had after all says why.

    Args:
        plans: that hold a strategy.
        program: what they are for.
        profile: of the program, measured on this host.
        tell: of how far it is.
    """
    fork_server, found = ForkServer.start(NEEDS), list[Plan]()
    try:
        for number, plan in enumerate(plans):
            tell(f"pieces of {plan.strategy}", number / len(plans))
            found.append(_foretold(plan, program, profile, fork_server))
    finally:
        fork_server.close()
    return found


def _foretold(plan: Plan, program: Program, profile: Profile, fork_server: ForkServer) -> Plan:
    assert plan.strategy is not None, "a plan that is not supported can't be measured"
    run = profile.runs.get(kind(plan.arrangement))
    if run is not None and run.arrangement == plan.arrangement:
        return with_pieces(plan, run.pieces, run)
    try:
        found = pieces_of(job_for(program, plan.strategy), fork_server, profile.at_work(plan.arrangement.workers))
    except (InputError, WorkerError) as error:
        return replace(plan, why_not=f"it can't be had: {in_a_line(error)}")
    return with_pieces(plan, found, run)


def with_pieces(plan: Plan, found: Pieces, run: ShortRun | None) -> Plan:
    """A plan that says so: what its replicas compute is split as the closed forms split it.

    Args:
        plan: by closed forms.
        found: its pieces.
        run: of its kind, which says what a step takes beside; None: there is none.
    """
    found, beside_s = (found.times(run.share), run.beside_s) if run else (found, 0.0)
    step_s = found.step_s + beside_s
    scale = step_s / plan.cost.step_s
    low_s, high_s = (step_s + (each - 1.0) * found.compute_s for each in (found.low, found.high))
    return replace(
        plan,
        cost=replace(plan.cost, terms=terms(plan.cost, found, step_s)),
        low_s=low_s,
        high_s=high_s,
        samples_per_s=plan.arrangement.samples / step_s,
        utilisation=None if plan.utilisation is None else plan.utilisation / scale,
        provenance={**plan.provenance, "compute": TOLD},
    )


def terms(before: Cost, found: Pieces, step_s: Seconds) -> dict[str, Seconds]:
    """Those of a plan, summing up to what was measured."""
    closed_s = staged_s(before)
    share = {name: before.terms[name] / closed_s if closed_s else float(name == "compute") for name in STAGED}
    made = dict.fromkeys(TERMS, 0.0) | {name: found.compute_s * share[name] for name in STAGED}
    made["optimizer"], made["replicas"] = found.update_s, found.copies_s
    made["waiting"] = step_s - sum(made.values())
    return made


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
    asked: Objectives


def plans_here(
    program: Program,
    asked: Objectives,
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


def select(ranked: Sequence[Plan], count: int, workload: Workload, asked: Objectives) -> list[Plan]:
    """The best of each kind of replica that is near the best of all, then the best of all: so many, in their order."""
    near = [plan for plan in ranked if plan.samples_per_s >= NEAR * ranked[0].samples_per_s]
    chosen = list(firsts(near, workload, asked).values())
    wanted = [*chosen, *(plan for plan in ranked if plan not in chosen)][:count]
    return [plan for plan in ranked if plan in wanted]


def firsts(ranked: Sequence[Plan], workload: Workload, asked: Objectives) -> dict[str, Plan]:
    """The best of each kind of replica; of those that can't be told from it the plainest."""
    by_kind: dict[str, list[Plan]] = {}
    for plan in ranked:
        by_kind.setdefault(kind(plan.arrangement), []).append(plan)
    return {name: plainest_first(plans, workload, asked)[0] for name, plans in by_kind.items()}


def plainest_first(ranked: Sequence[Plan], workload: Workload, asked: Objectives) -> list[Plan]:
    """The plainest of those that can't be told from the best comes first: measuring again may turn them round."""
    if not ranked:
        return []
    best = rank(ranked[0], workload, asked)
    even = [plan for plan in ranked if rank(plan, workload, asked) - best <= EVEN * abs(best)]
    first = min(even, key=lambda plan: plainness(plan.arrangement))
    return [first, *(plan for plan in ranked if plan is not first)]


def rank(plan: Plan, workload: Workload, asked: Objectives) -> float:
    """What is less of the better plan: the first thing that a search ranks by."""
    return key(plan, workload, asked)[0]


TRIED = 3
"""Plans that are foretold from their pieces before one of them is chosen."""


class Chosen(NamedTuple):
    """What to train with."""

    strategy: Strategy
    why: str


def choose(program: Program, tell: Tell = silent, known: Profile | None = None) -> Chosen:
    """The strategy that trains most samples a second here.

    Args:
        program: what is to be trained.
        tell: of how far it is.
        known: the program's profile; None: it is measured, which takes some seconds.

    Raises:
        InputError: nothing fits this host.
    """
    found = plans_here(program, Objectives(), known, tell, foretold=TRIED)
    if not found.plans or found.plans[0].why_not or found.plans[0].strategy is None:
        raise InputError(
            f"strategy={AUTO}: no way to train {program.name} fits this host's memory; run paceline plan for the "
            "smallest change that does, or write a strategy"
        )
    return Chosen(found.plans[0].strategy, why(found.plans))


def refuse(strategy: str, engine: str) -> None:
    """Raise InputError where there is nothing to choose by.

    Args:
        strategy: ``auto``, and nothing else.
        engine: by name, that is to carry what is chosen: this host's.
    """
    if strategy.split() != [AUTO]:
        rest = " ".join(strategy.split()[1:])
        raise InputError(
            f"strategy={strategy!r}: {AUTO} chooses every field, and measures this host's cores; write {AUTO} alone, "
            f"or the strategy itself: 'replicas=2 {rest}'"
        )
    if engine != "local":
        raise InputError(f"strategy={AUTO} {_REASONS.get(engine, _OTHER)}")


_OTHER = "measures this host's cores, which only engine=local has for itself; write engine=local, or a strategy"
_REASONS = {
    "virtual": "looks for what takes least real time, but engine=virtual has a time of its own; write engine=local, or "
    "a strategy",
    "distributed": "would measure on each rank by itself; run paceline plan once, and write the strategy that it names",
}


def why(plans: Sequence[Plan]) -> str:
    """In words: what it is expected to make, beside one process and the next best."""
    best, others = plans[0], [plan for plan in plans[1:] if not plan.why_not]
    said = [f"{best.samples_per_s:,.0f} samples/s are foretold"]
    alone = next((plan for plan in others if plan.arrangement.workers == 1), None)
    said += [
        f"{best.samples_per_s / plan.samples_per_s:.2f} times {plan.strategy}'s" for plan in _beside(alone, others)
    ]
    return f"{AUTO}: {best.strategy}: {', '.join(said)}"


def _beside(alone: Plan | None, others: Sequence[Plan]) -> list[Plan]:
    """The next best, and one process."""
    next_best = list(others[:1])
    return next_best if alone is None or alone in next_best else [*next_best, alone]

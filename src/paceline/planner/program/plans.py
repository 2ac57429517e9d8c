"""Plans of a program for this host: measure it, rank every arrangement, predict the best few from components.

::

    profile     operators, messages, updates and short runs, measured on this host
    rank        every arrangement by closed forms, corrected by the short run of its kind
    predict     the best of each kind anew, from components measured on processes as busy as its workers will be

``strategy="auto"`` takes the best of these plans and states in one line why.

Closed forms rank all arrangements, but the best differ by little. So the best few are measured: compute of every
stage or shard of their own cut, collectives, messages, copies and updates, put together as ``times="measured"`` does,
corrected by the difference between a short run of the same kind and that run's own components.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from paceline.comm.fork_server import ForkServer
from paceline.core.errors import InputError, WorkerError
from paceline.core.types import Seconds
from paceline.engine.step_profile.forecast import NEEDS
from paceline.planner.base import TERMS, Cost, Plan, Workload
from paceline.planner.cluster import Cluster
from paceline.planner.program.closed_form import (
    STAGED,
    closed_plans,
    cores,
    host_objectives,
    job_for,
    once,
    pieces_of,
    staged_s,
    workload_of,
)
from paceline.planner.program.measured_workload import MeasuredWorkload, cluster_of
from paceline.planner.program.profile import Pieces, Profile, ShortRun, kind
from paceline.planner.program.profiling import Notify, profile, silent
from paceline.planner.program.short_runs import in_a_line
from paceline.planner.search.objective import Objectives
from paceline.planner.search.search import key
from paceline.planner.search.supported import plainness
from paceline.program import Program
from paceline.strategy import AUTO, Strategy

PREDICTED = "predicted from its components, each measured here on processes that were as busy as its workers will be"


def predict_from_components(
    plans: Sequence[Plan], program: Program, profile: Profile, notify: Notify = silent
) -> list[Plan]:
    """Return the same plans with times from their components; one that can't run after all states why.

    Args:
        plans: plans with a strategy.
        program: to train.
        profile: of the program, measured on this host.
        notify: called with the progress.
    """
    fork_server, predicted = ForkServer.start(NEEDS), list[Plan]()
    try:
        for number, plan in enumerate(plans):
            notify(f"components of {plan.strategy}", number / len(plans))
            predicted.append(_predict(plan, program, profile, fork_server))
    finally:
        fork_server.close()
    return predicted


def _predict(plan: Plan, program: Program, profile: Profile, fork_server: ForkServer) -> Plan:
    assert plan.strategy is not None, "a plan that is not supported can't be measured"
    run = profile.runs.get(kind(plan.arrangement))
    if run is not None and run.arrangement == plan.arrangement:
        return with_pieces(plan, run.pieces, run)
    try:
        pieces = pieces_of(job_for(program, plan.strategy), fork_server, profile.at_work(plan.arrangement.workers))
    except (InputError, WorkerError) as error:
        return replace(plan, why_not=f"it can't run: {in_a_line(error)}")
    return with_pieces(plan, pieces, run)


def with_pieces(plan: Plan, pieces: Pieces, run: ShortRun | None) -> Plan:
    """Return the plan with its components' times; compute is split into terms as the closed forms split it.

    Args:
        plan: by closed forms.
        pieces: its measured components.
        run: the short run of its kind, for the overhead of a step; None: there is none.
    """
    pieces, overhead_s = (pieces.times(run.share), run.beside_s) if run else (pieces, 0.0)
    step_s = pieces.step_s + overhead_s
    scale = step_s / plan.cost.step_s
    low_s, high_s = (step_s + (each - 1.0) * pieces.compute_s for each in (pieces.low, pieces.high))
    return replace(
        plan,
        cost=replace(plan.cost, terms=terms(plan.cost, pieces, step_s)),
        low_s=low_s,
        high_s=high_s,
        samples_per_s=plan.arrangement.samples / step_s,
        utilisation=None if plan.utilisation is None else plan.utilisation / scale,
        provenance={**plan.provenance, "compute": PREDICTED},
    )


def terms(closed: Cost, pieces: Pieces, step_s: Seconds) -> dict[str, Seconds]:
    """Return the terms of a plan's step, which sum to the measured time."""
    closed_s = staged_s(closed)
    share = {name: closed.terms[name] / closed_s if closed_s else float(name == "compute") for name in STAGED}
    measured = dict.fromkeys(TERMS, 0.0) | {name: pieces.compute_s * share[name] for name in STAGED}
    measured["optimizer"], measured["replicas"] = pieces.update_s, pieces.copies_s
    measured["waiting"] = step_s - sum(measured.values())  # last: the remainder, "waiting" itself is still 0
    return measured


PREDICTED_PLANS = 4
"""Number of the best plans that are predicted from components."""

TIMES = 3
"""A plan by closed forms may look better than measured ones: it is measured too, up to so many times as many plans."""

EVEN = 0.05
"""Plans that differ by less are as good: components predict steps within 2 to 6 % here (benchmarks/hybrid)."""

NEAR = 0.5
"""A kind of replica with less than this share of the best's samples per second by closed forms, whose error is smaller,
is not predicted before others."""


@dataclass(frozen=True)
class ProgramPlans:
    """Plans of a program, the best first, and their inputs."""

    plans: Sequence[Plan]
    profile: Profile
    workload: MeasuredWorkload
    cluster: Cluster
    objectives: Objectives


def plans_here(
    program: Program,
    objectives: Objectives,
    saved: Profile | None = None,
    notify: Notify = silent,
    *,
    predicted: int = PREDICTED_PLANS,
) -> ProgramPlans:
    """Rank the plans of a program for this host.

    Args:
        program: to train.
        objectives: the objective and the most workers; None of them: as many as this host has cores. Where replicas
            are delayed, policies are simulated, and nothing is predicted from components.
        saved: its profile; None: it is measured.
        notify: called with the progress.
        predicted: number of the best plans that are predicted from their components; 0: none.

    Raises:
        InputError: the program can't make a step, or ``objectives`` has more workers than there are cores.
    """
    most = objectives.workers or cores()
    if most > cores():
        raise InputError(
            f"workers={most}, but this process may use {cores()} cores, and workers that share one can't be measured; "
            f"write workers={cores()}, or cluster= for another machine"
        )
    measured = saved or profile(program, most, notify)
    objectives = host_objectives(program, objectives, most)
    workload = workload_of(program, measured, most)

    def by(plan: Plan) -> float:
        return rank(plan, workload, objectives)

    plans = [plan for count in range(1, most + 1) for plan in closed_plans(program, measured, objectives, count)]
    ranked = sorted(plans if objectives.objective == "memory" else once(plans), key=by)
    chosen = select(flushing(ranked), 0 if objectives.delay else predicted, workload, objectives)
    anew = list[Plan]()
    # until no plan by closed forms ranks before the best measured one
    while chosen and len(anew) < TIMES * predicted:
        anew += predict_from_components(chosen, program, measured, notify)
        ranked = [plan for plan in ranked if plan not in chosen]
        ranks = [by(plan) for plan in feasible(anew)]
        chosen = [plan for plan in flushing(ranked) if not ranks or by(plan) < min(ranks)][:predicted]
    best = plainest_first(sorted(feasible(anew), key=by), workload, objectives)
    others = sorted([*best[1:], *ranked], key=by)
    plans = [*best[:1], *others, *(plan for plan in anew if plan.why_not)]
    return ProgramPlans(plans, measured, workload, cluster_of(measured, most), objectives)


def flushing(plans: Sequence[Plan]) -> list[Plan]:
    """Return the plans whose pipelines flush: without a flush a step is not the sum of one step's components."""
    return [plan for plan in plans if not plan.cost.staleness]


def feasible(plans: Sequence[Plan]) -> list[Plan]:
    """Return the plans that can run."""
    return [plan for plan in plans if not plan.why_not]


def select(ranked: Sequence[Plan], count: int, workload: Workload, objectives: Objectives) -> list[Plan]:
    """Select the best of each kind of replica near the best of all, then the best of all: so many, in their order."""
    near = [plan for plan in ranked if plan.samples_per_s >= NEAR * ranked[0].samples_per_s]
    chosen = list(firsts(near, workload, objectives).values())
    wanted = [*chosen, *(plan for plan in ranked if plan not in chosen)][:count]
    return [plan for plan in ranked if plan in wanted]


def firsts(ranked: Sequence[Plan], workload: Workload, objectives: Objectives) -> dict[str, Plan]:
    """Return the best of each kind of replica; of those as good as it the plainest."""
    by_kind: dict[str, list[Plan]] = {}
    for plan in ranked:
        by_kind.setdefault(kind(plan.arrangement), []).append(plan)
    return {name: plainest_first(plans, workload, objectives)[0] for name, plans in by_kind.items()}


def plainest_first(ranked: Sequence[Plan], workload: Workload, objectives: Objectives) -> list[Plan]:
    """Move the plainest of those as good as the best to the front: measuring again may reverse their order."""
    if not ranked:
        return []
    best = rank(ranked[0], workload, objectives)
    even = [plan for plan in ranked if rank(plan, workload, objectives) - best <= EVEN * abs(best)]
    first = min(even, key=lambda plan: plainness(plan.arrangement))
    return [first, *(plan for plan in ranked if plan is not first)]


def rank(plan: Plan, workload: Workload, objectives: Objectives) -> float:
    """Return the figure that is lower for the better plan: the first criterion of a search."""
    return key(plan, workload, objectives)[0]


TRIED = 3
"""Number of plans that are predicted from their components before one of them is chosen."""


class Chosen(NamedTuple):
    """The chosen strategy, and the reason in one line."""

    strategy: Strategy
    why: str


def choose(program: Program, notify: Notify = silent, saved: Profile | None = None) -> Chosen:
    """Choose the strategy that trains most samples per second on this host.

    Args:
        program: to train.
        notify: called with the progress.
        saved: the program's profile; None: it is measured, which takes seconds.

    Raises:
        InputError: nothing fits this host.
    """
    found = plans_here(program, Objectives(), saved, notify, predicted=TRIED)
    if not found.plans or found.plans[0].why_not or found.plans[0].strategy is None:
        raise InputError(
            f"strategy={AUTO}: no way to train {program.name} fits this host's memory; run paceline plan for the "
            "smallest change that does, or write a strategy"
        )
    return Chosen(found.plans[0].strategy, why(found.plans))


def refuse(strategy: str, engine: str) -> None:
    """Raise InputError where the automatic choice does not apply.

    Args:
        strategy: ``auto``, and nothing else.
        engine: name of the engine that is to run the strategy; only this host's is supported.
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
    """Describe the expected rate, compared with one process and the next best."""
    best, others = plans[0], [plan for plan in plans[1:] if not plan.why_not]
    parts = [f"{best.samples_per_s:,.0f} samples/s are predicted"]
    compared = list(others[:1])
    alone = next((plan for plan in others if plan.arrangement.workers == 1), None)
    if alone is not None and alone not in compared:
        compared.append(alone)
    parts += [f"{best.samples_per_s / plan.samples_per_s:.2f} times {plan.strategy}'s" for plan in compared]
    return f"{AUTO}: {best.strategy}: {', '.join(parts)}"

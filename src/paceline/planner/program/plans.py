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

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple, TypeAlias

from paceline.comm.fork_server import ForkServer
from paceline.core.errors import InputError, WorkerError
from paceline.engine.step_profile.forecast import NEEDS
from paceline.planner.base import TERMS, Plan
from paceline.planner.cluster import Cluster
from paceline.planner.program import closed_form
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
    predicted = list[Plan]()
    with closing(ForkServer.start(NEEDS)) as fork_server:
        for number, plan in enumerate(plans):
            assert plan.strategy is not None, "a plan that is not supported can't be measured"
            notify(f"components of {plan.strategy}", number / len(plans))
            run, busy = profile.runs.get(kind(plan.arrangement)), profile.at_work(plan.arrangement.workers)
            if run is not None and run.arrangement == plan.arrangement:
                predicted.append(with_pieces(plan, run.pieces, run))
                continue
            try:
                pieces = closed_form.pieces_of(closed_form.job_for(program, plan.strategy), fork_server, busy)
            except (InputError, WorkerError) as error:
                predicted.append(replace(plan, why_not=f"it can't run: {in_a_line(error)}"))
            else:
                predicted.append(with_pieces(plan, pieces, run))
    return predicted


def with_pieces(plan: Plan, pieces: Pieces, run: ShortRun | None) -> Plan:
    """Return the plan with its components' times; compute is split into terms as the closed forms split it.

    The terms sum to the time of the step.

    Args:
        plan: by closed forms.
        pieces: its measured components.
        run: the short run of its kind, for the overhead of a step; None: there is none.
    """
    overhead_s = 0.0
    if run is not None:
        overhead_s = max(0.0, run.step_s - run.pieces.step_s)
        # the ratio is below 1 where the run's components count something twice or were slowed
        pieces = pieces.times(min(1.0, run.step_s / run.pieces.step_s))
    step_s, closed, closed_s = pieces.step_s + overhead_s, plan.cost, closed_form.staged_s(plan.cost)
    terms = dict.fromkeys(TERMS, 0.0)
    for name in closed_form.STAGED:
        share = closed.terms[name] / closed_s if closed_s else float(name == "compute")
        terms[name] = pieces.compute_s * share
    terms["optimizer"], terms["replicas"] = pieces.update_s, pieces.copies_s
    terms["waiting"] = step_s - sum(terms.values())  # last: the remainder, "waiting" itself is still 0
    low_s, high_s = (step_s + (each - 1.0) * pieces.compute_s for each in (pieces.low, pieces.high))
    return replace(
        plan,
        cost=replace(closed, terms=terms),
        low_s=low_s,
        high_s=high_s,
        samples_per_s=plan.arrangement.samples / step_s,
        utilisation=None if plan.utilisation is None else plan.utilisation / (step_s / closed.step_s),
        provenance={**plan.provenance, "compute": PREDICTED},
    )


# Number of the best plans that are predicted from components.
PREDICTED_PLANS = 4

# A plan by closed forms may look better than measured ones: it is measured too, up to so many times as many plans.
TIMES = 3

# Plans that differ by less are as good: components predict steps within 2 to 6 % here (benchmarks/hybrid).
EVEN = 0.05

# A kind of replica with less than this share of the best's samples per second by closed forms, whose error is smaller,
# is not predicted before others.
NEAR = 0.5


# Returns a figure that is lower for the better plan.
Rank: TypeAlias = Callable[[Plan], float]


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
    cores = closed_form.cores()
    most = objectives.workers or cores
    if most > cores:
        raise InputError(
            f"workers={most}, but this process may use {cores} cores, and workers that share one can't be measured; "
            f"write workers={cores}, or cluster= for another machine"
        )
    measured = saved or profile(program, most, notify)
    objectives = closed_form.host_objectives(program, objectives, most)
    workload = closed_form.workload_of(program, measured, most)

    def by(plan: Plan) -> float:
        return key(plan, workload, objectives)[0]  # lower for the better plan: the first criterion of a search

    counts = range(1, most + 1)
    plans = [plan for n in counts for plan in closed_form.closed_plans(program, measured, objectives, n)]
    ranked = sorted(plans if objectives.objective == "memory" else closed_form.once(plans), key=by)
    # only pipelines that flush: without a flush a step is not the sum of one step's components
    flushing = [plan for plan in ranked if not plan.cost.staleness]
    chosen = select(flushing, 0 if objectives.delay else predicted, by)
    anew = list[Plan]()
    # until no plan by closed forms ranks before the best measured one
    while chosen and len(anew) < TIMES * predicted:
        anew += predict_from_components(chosen, program, measured, notify)
        ranked, flushing = ([plan for plan in each if plan not in chosen] for each in (ranked, flushing))
        best_rank = min((by(plan) for plan in anew if not plan.why_not), default=inf)
        chosen = [plan for plan in flushing if by(plan) < best_rank][:predicted]
    best = plainest_first(sorted((plan for plan in anew if not plan.why_not), key=by), by)
    others = sorted([*best[1:], *ranked], key=by)
    plans = [*best[:1], *others, *(plan for plan in anew if plan.why_not)]
    return ProgramPlans(plans, measured, workload, cluster_of(measured, most), objectives)


def select(ranked: Sequence[Plan], count: int, by: Rank) -> list[Plan]:
    """Select the best of each kind of replica near the best of all, then the best of all: so many, in their order."""
    near = [plan for plan in ranked if plan.samples_per_s >= NEAR * ranked[0].samples_per_s]
    chosen = list(firsts(near, by).values())
    wanted = [*chosen, *(plan for plan in ranked if plan not in chosen)][:count]
    return [plan for plan in ranked if plan in wanted]


def firsts(ranked: Sequence[Plan], by: Rank) -> dict[str, Plan]:
    """Return the best of each kind of replica; of those as good as it the plainest."""
    by_kind: dict[str, list[Plan]] = {}
    for plan in ranked:
        by_kind.setdefault(kind(plan.arrangement), []).append(plan)
    return {name: plainest_first(plans, by)[0] for name, plans in by_kind.items()}


def plainest_first(ranked: Sequence[Plan], by: Rank) -> list[Plan]:
    """Move the plainest of those as good as the best to the front: measuring again may reverse their order."""
    if not ranked:
        return []
    best = by(ranked[0])
    even = [plan for plan in ranked if by(plan) - best <= EVEN * abs(best)]
    first = min(even, key=lambda plan: plainness(plan.arrangement))
    return [first, *(plan for plan in ranked if plan is not first)]


# Number of plans that are predicted from their components before one of them is chosen.
TRIED = 3


class Chosen(NamedTuple):
    """The chosen strategy, and the reason in one line."""

    strategy: Strategy
    why: str
    plan: Plan | None = None
    """What was predicted of it."""


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
    return Chosen(found.plans[0].strategy, why(found.plans), found.plans[0])


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

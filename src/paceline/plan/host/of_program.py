"""Plans of a program for this host: what was measured of it, every arrangement, and the best few foretold anew."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from paceline.core.errors import InputError
from paceline.plan.base import Arrangement, Held, Plan, Workload
from paceline.plan.cluster import Cluster
from paceline.plan.host.by_pieces import foretell
from paceline.plan.host.here import cores
from paceline.plan.host.measured import MeasuredWorkload, cluster_of
from paceline.plan.host.profile import Profile, kind
from paceline.plan.host.profiling import Tell, profile, silent
from paceline.plan.searching.asked import Asked
from paceline.plan.searching.carried import plainness
from paceline.plan.searching.ranking import key
from paceline.plan.searching.search import search
from paceline.program import Program

FORETOLD = 4
"""So many of the best are foretold from pieces."""

KEPT = 200
"""Of a search for each number of workers, so that each kind of replica is among them."""

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
    empty: bool | None = True,
) -> Found:
    """Of a program.

    Args:
        program: what is to be trained.
        asked: the objective and the most workers; None of them: as many as this host has cores. Where replicas are to
            be delayed, what policies make of it is simulated, and nothing is foretold from pieces.
        known: its profile; None: it is measured.
        tell: of how far it is.
        foretold: how many of the best are foretold from their pieces; 0: none.
        empty: whether runs without a model are made for a profile, see there.

    Raises:
        InputError: the program can't make a step, or more workers than cores are asked for.
    """
    most = asked.workers or cores()
    if most > cores():
        raise InputError(
            f"workers={most}, but this process may use {cores()} cores, and workers that share one can't be measured; "
            f"write workers={cores()}, or cluster= for another machine"
        )
    measured = known or profile(program, most, tell, empty=empty)
    own = program.global_batch_size is None
    asked = replace(asked, workers=most, engine="local", fixed="replica" if own else "global", simulated=KEPT)
    workload = workload_of(program, measured, most)

    def by(plan: Plan) -> float:
        return rank(plan, workload, asked)

    every = [plan for count in range(1, most + 1) for plan in _of_workers(program, measured, asked, count)]
    ranked = sorted(every if asked.objective == "memory" else once(every), key=by)
    chosen = select(ranked, 0 if asked.delay else foretold, workload, asked)
    anew = foretell(chosen, program, measured, tell) if chosen else []
    best = plainest_first(sorted((plan for plan in anew if not plan.why_not), key=by), workload, asked)
    others = [*best[1:], *(plan for plan in ranked if plan not in chosen)]
    best = [*best[:1], *sorted(others, key=by), *(plan for plan in anew if plan.why_not)]
    return Found(best, measured, workload, cluster_of(measured, most), asked)


def workload_of(program: Program, measured: Profile, workers: int) -> MeasuredWorkload:
    """For so many workers at work at the same time; its batch is one replica's, where a program says no global one."""
    return MeasuredWorkload(measured, workers, program.global_batch_size or measured.batch)


def once(plans: Sequence[Plan]) -> Sequence[Plan]:
    """Those that compute nothing again, which costs time, where some of them fit."""
    return [plan for plan in plans if plan.arrangement.recompute == "none"] or plans


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


def _of_workers(program: Program, measured: Profile, asked: Asked, count: int) -> Iterator[Plan]:
    """Those that have exactly so many: how long operators take depends on how many are at work."""
    workload, cluster = workload_of(program, measured, count), cluster_of(measured, count)
    for plan in search(workload, cluster, asked.of_workers(count)).plans:
        said = plan.strategy
        accumulates = program.global_batch_size is None and said is not None and said.accumulate > 1
        if said is not None and plan.arrangement.workers == count and not accumulates:
            yield with_beside(plan, measured)


def with_beside(plan: Plan, measured: Profile) -> Plan:
    """With what a step of its kind takes, and its workers hold, beside what the model asks for."""
    arrangement, cost = plan.arrangement, plan.cost
    added = max(-0.9 * cost.step_s, measured.beside(arrangement)) + measured.actions(arrangement)
    terms = {**cost.terms, "waiting": cost.terms["waiting"] + added}
    held = tuple(_held(each, arrangement, measured) for each in cost.held)
    scale = (cost.step_s + added) / cost.step_s
    return replace(
        plan,
        cost=replace(cost, terms=terms, held=held),
        low_s=plan.low_s * scale,
        high_s=plan.high_s * scale,
        samples_per_s=plan.samples_per_s / scale,
        utilisation=None if plan.utilisation is None else plan.utilisation / scale,
    )


def _held(held: Held, arrangement: Arrangement, measured: Profile) -> Held:
    """Replicas of one worker have no optimizer: who holds A has it."""
    whole = kind(arrangement) in ("alone", "replicas")
    return replace(held, context=measured.base(arrangement), optimizer=0.0 if whole else held.optimizer)


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

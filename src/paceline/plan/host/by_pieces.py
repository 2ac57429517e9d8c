"""Plans for this host foretold once more, from the pieces of their steps, each measured by itself.

Closed forms rank what may be done; what is best of it differs by little. So the best few are measured: computing of
every stage or shard as it is cut for them, their collectives, messages, copies and updates, put together as
``times="measured"`` does, and what a short run of the same kind took beside its own pieces.
"""

from collections.abc import Sequence
from dataclasses import replace

from paceline.comm.nursery import Nursery
from paceline.core.errors import InputError, WorkerError
from paceline.core.types import Seconds
from paceline.engine.virtual.pieces.forecast import NEEDS
from paceline.plan.base import TERMS, Cost, Plan
from paceline.plan.host.closed import STAGED, staged_s
from paceline.plan.host.here import job_for
from paceline.plan.host.pieces import pieces_of
from paceline.plan.host.profile import Pieces, Profile, ShortRun, kind
from paceline.plan.host.profiling import Tell, silent
from paceline.plan.host.short_runs import in_a_line
from paceline.program import Program

TOLD = "foretold from its pieces, each measured here on processes that were as busy as they will be"


def foretell(plans: Sequence[Plan], program: Program, profile: Profile, tell: Tell = silent) -> list[Plan]:
    """The same plans with what their pieces take; one that can't be had after all says why.

    Args:
        plans: that hold a strategy.
        program: what they are for.
        profile: of the program, measured on this host.
        tell: of how far it is.
    """
    nursery, found = Nursery.start(NEEDS), list[Plan]()
    try:
        for number, plan in enumerate(plans):
            tell(f"pieces of {plan.strategy}", number / len(plans))
            found.append(_foretold(plan, program, profile, nursery))
    finally:
        nursery.close()
    return found


def _foretold(plan: Plan, program: Program, profile: Profile, nursery: Nursery) -> Plan:
    assert plan.strategy is not None, "what is not carried is not foretold"
    run = profile.runs.get(kind(plan.arrangement))
    if run is not None and run.arrangement == plan.arrangement:
        return with_pieces(plan, run.pieces, run)
    try:
        found = pieces_of(job_for(program, plan.strategy), nursery, profile.at_work(plan.arrangement.workers))
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

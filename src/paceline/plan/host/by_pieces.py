"""Plans for this host foretold once more, from the pieces of their steps, each measured by itself.

Closed forms rank what may be done; what is best of it differs by little. So the best few are measured: computing of
every stage or shard as it is cut for them, their collectives, messages, copies and updates, put together as
``times="measured"`` does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from paceline.comm.nursery import Nursery
from paceline.core.errors import InputError, WorkerError
from paceline.core.types import Seconds
from paceline.engine.virtual.pieces.forecast import NEEDS, Forecast, forecast, update_s
from paceline.plan.base import TERMS, Plan
from paceline.plan.host.here import job_for
from paceline.plan.host.profile import Profile
from paceline.plan.host.profiling import Tell, silent
from paceline.program import Program

STAGED = ("compute", "shards", "bubble", "stages")
"""Terms of what the workers of a replica do together."""

SPREADS_WITH = 9
"""Of fewer passes the 5th and the 95th of 100 say nothing."""

TOLD = "foretold from its pieces, each measured here on processes that were as busy as they will be"


@dataclass(frozen=True)
class Pieces:
    """Of one step."""

    compute_s: Seconds
    """Of the workers of a replica, from the first to the last of them."""
    copies_s: Seconds
    """To have A and to give Δ."""
    update_s: Seconds
    beside_s: Seconds
    low: float
    """The 5th of 100 passes, of their median."""
    high: float
    """The 95th."""

    @property
    def step_s(self) -> Seconds:
        """All of it; what is beside may be below 0, where something else counts twice."""
        return max(self.compute_s, self.compute_s + self.copies_s + self.update_s + self.beside_s)


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
    try:
        job = job_for(program, plan.strategy)
        seen = forecast(job, nursery)
    except (InputError, WorkerError) as error:  # of a failed worker the first line, without its traceback
        return replace(plan, why_not=f"it can't be had: {str(error).partition(chr(10))[0]}")
    return with_pieces(plan, pieces(plan, seen, update_s(job, plan.strategy.replicas, seen.steps_on), profile))


def pieces(plan: Plan, seen: Forecast, updated_s: Seconds, profile: Profile) -> Pieces:
    """What was measured, and how far one pass differs from another."""
    busy, compute_s = profile.at_work(plan.arrangement.workers), median(seen.compute_s)
    low, high = busy.low, busy.high
    if len(seen.compute_s) >= SPREADS_WITH:
        low, high = (float(each) / compute_s for each in np.quantile(list(seen.compute_s), (0.05, 0.95)))
    return Pieces(
        compute_s, seen.pull_s + seen.push_s, updated_s, profile.beside(plan.arrangement), min(low, 1.0), max(high, 1.0)
    )


def with_pieces(plan: Plan, found: Pieces) -> Plan:
    """A plan that says so: what its replicas compute is split as the closed forms split it."""
    step_s, scale = found.step_s, found.step_s / plan.cost.step_s
    low_s, high_s = (step_s + (each - 1.0) * found.compute_s for each in (found.low, found.high))
    return replace(
        plan,
        cost=replace(plan.cost, terms=terms(plan.cost.terms, found)),
        low_s=low_s,
        high_s=high_s,
        samples_per_s=plan.arrangement.samples / step_s,
        utilisation=None if plan.utilisation is None else plan.utilisation / scale,
        provenance={**plan.provenance, "compute": TOLD},
    )


def terms(before: Mapping[str, Seconds], found: Pieces) -> dict[str, Seconds]:
    """Those of a plan, summing up to what was measured."""
    closed_s = sum(before[name] for name in STAGED)
    share = {name: before[name] / closed_s if closed_s else float(name == "compute") for name in STAGED}
    made = dict.fromkeys(TERMS, 0.0) | {name: found.compute_s * share[name] for name in STAGED}
    made["optimizer"], made["replicas"] = found.update_s, found.copies_s
    made["waiting"] = found.step_s - sum(made.values())
    return made

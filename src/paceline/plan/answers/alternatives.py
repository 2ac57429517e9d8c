"""Which plans are worth showing: the best of each kind, not five sizes of one.

Kinds are those of :mod:`paceline.plan.searching.kinds`, and with delays the policy as well. A plan is left out where a
better one of its kind is shown and the two can't be told apart: within what both may lie off, by the interval in which
nine of ten steps are to lie. The best plan is always shown, and all that are shown stay in their order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.plan.base import Plan, Workload
from paceline.plan.searching.asked import Asked
from paceline.plan.searching.kinds import kind_of
from paceline.plan.searching.ranking import key


@dataclass(frozen=True, slots=True)
class Alternatives:
    """What is shown of plans."""

    plans: tuple[Plan, ...]
    left_out: int
    """As good as one that is shown and of its kind, before the last that is shown; after all where fewer are shown."""


def alternatives(plans: Sequence[Plan], workload: Workload, asked: Asked, count: int) -> Alternatives:
    """The first so many that differ.

    Args:
        plans: the best first.
        workload: what they train.
        asked: the objective.
        count: how many are shown at the most.
    """
    shown, left_out = list[Plan](), 0
    for plan in plans:
        if len(shown) == count:
            break
        if any(_alike(plan, better) and _near(plan, better, workload, asked) for better in shown):
            left_out += 1
        else:
            shown.append(plan)
    return Alternatives(tuple(shown), left_out)


def _alike(plan: Plan, better: Plan) -> bool:
    """Of one kind; what can't be had stands for nothing else."""
    policies = [type(each.strategy.aggregation) for each in (plan, better) if each.strategy is not None]
    same = len(set(policies)) == 1 and kind_of(plan.arrangement) == kind_of(better.arrangement)
    return same and not plan.why_not and not better.why_not


def _near(plan: Plan, better: Plan, workload: Workload, asked: Asked) -> bool:
    """Whether the two intervals overlap."""
    off = (better.high_s / better.cost.step_s) * (plan.cost.step_s / plan.low_s)
    return key(plan, workload, asked)[0] <= key(better, workload, asked)[0] * off

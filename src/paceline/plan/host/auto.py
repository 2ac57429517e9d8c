"""strategy="auto": the best plan of a program for this host, and in one line why."""

from collections.abc import Sequence
from typing import NamedTuple

from paceline.core.errors import InputError
from paceline.plan.base import Plan
from paceline.plan.host.of_program import plans_here
from paceline.plan.host.profile import Profile
from paceline.plan.host.profiling import Tell, silent
from paceline.plan.searching.asked import Asked
from paceline.program import Program
from paceline.strategy import AUTO, Strategy

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
    found = plans_here(program, Asked(), known, tell, foretold=TRIED)
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

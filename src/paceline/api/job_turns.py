"""Whose turn it is among jobs on shared workers, and when a job leaves; nothing here trains.

Two jobs, ``priority`` by decrease of loss per second::

    weights of a, b    job    loss in its slice
    new, new           b      2.3 -> 1.3 in 2 s
    new, 0.5           a      2.3 -> 2.1 in 2 s
    0.1, 0.5           b      with probability 5/6, but for η
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paceline.core.conditions import Condition
from paceline.core.errors import InputError, PacelineError
from paceline.core.records import Record
from paceline.core.text_form import text_of
from paceline.core.types import Seconds
from paceline.parameter_scheduling.schedulers import Scheduler, coerce
from paceline.shared_runs import Slice


def ranking(scheduler: Scheduler[Any] | str, jobs: int) -> Scheduler[Any]:
    """Return the scheduler, as it ranks all jobs: the first that has not left is next.

    Of jobs drawn one after another without replacement, the first of those that are left is one of these in proportion
    to its weight.
    """
    scheduler = coerce(scheduler)
    if scheduler.at_once != 1:
        raise InputError(f"at_once={scheduler.at_once}, but one job at a time has the workers; leave at_once out")
    return replace(scheduler, candidates=jobs)


@dataclass(frozen=True)
class JobBudget:
    """What ends a job, and all of it."""

    seconds: Seconds | None
    steps: int | None
    until: Mapping[str, str]
    conditions: Mapping[str, Condition]

    def done(self, made: Slice) -> bool:
        """Return whether a job leaves after this slice."""
        condition = self.conditions.get(made.job)
        met = condition is not None and condition.met(made.records[-1])
        return met or (self.steps is not None and made.steps >= self.steps)


class JobTurns:
    """Whose turn it is: follows from the slices that were made, and the seed, alone."""

    def __init__(
        self,
        jobs: list[str],
        order: Scheduler[Any],
        loss: str,
        slice_steps: int,
        budget: JobBudget,
        seed: int,
    ) -> None:
        self.jobs, self.budget = jobs, budget
        self._order, self._loss, self._slice_steps = order, loss, slice_steps
        self._state = order.start(len(jobs), seed)
        self.slices: list[Slice] = []
        self._left = set[str]()

    def of(self, job: str) -> list[Slice]:
        """Return the slices of a job."""
        return [each for each in self.slices if each.job == job]

    def next(self) -> tuple[str, int] | None:
        """Return the next job and its budget in steps; None: there is none, or the time is over."""
        if self.ended() is not None:
            return None
        ranked = [self.jobs[i] for i in self._order.propose(self._state)]
        job = next((job for job in ranked if job not in self._left), None)
        if job is None:
            raise InputError(
                f"{text_of(self._order)} proposed {ranked} only; propose as many different blocks as candidates says"
            )
        steps = self._slice_steps + (own[-1].steps if (own := self.of(job)) else 0)
        return job, steps if self.budget.steps is None else min(steps, self.budget.steps)

    def note(self, made: Slice) -> None:
        """Take a slice that was made."""
        done, own = self.budget.done(made), self.of(made.job)
        moved = 0.0 if done else self._rate(own[-1].records[-1] if own else made.records[0], made)
        chosen = np.array([self.jobs.index(made.job)])
        self._state = self._order.updated(self._state, chosen, np.array([moved]))
        self.slices.append(made)
        if done:
            self._left.add(made.job)

    def ended(self) -> str | None:
        """Return why no other slice is made; None: one is."""
        if len(self._left) == len(self.jobs):
            return "all jobs have left"
        seconds, spent = self.budget.seconds, sum(each.seconds for each in self.slices)
        return f"{seconds:g} s are over" if seconds is not None and spent >= seconds else None

    def fraction(self) -> float:
        """Return which share of the budget is spent, as far as it is known."""
        shares = [len(self._left) / len(self.jobs)]
        if self.budget.seconds is not None:
            shares.append(sum(each.seconds for each in self.slices) / self.budget.seconds)
        if self.budget.steps is not None:
            made = sum(own[-1].steps for job in self.jobs if (own := self.of(job)))
            shares.append(made / (self.budget.steps * len(self.jobs)))
        return min(1.0, max(shares))

    def _rate(self, before: Record, made: Slice) -> float:
        """Return by how much a job's loss has decreased in a second of its last slice; infinite: unknown."""
        if made.seconds <= 0:
            raise PacelineError(
                f"a slice of {made.job} has taken no time, of which a decrease of loss per second could be had; write "
                "times='compute=0.01'"
            )
        losses = getattr(before, self._loss), getattr(made.records[-1], self._loss)
        if None in losses:  # saved, but killed before it was evaluated
            return math.inf
        return max(0.0, losses[0] - losses[1]) / made.seconds if all(map(math.isfinite, losses)) else 0.0

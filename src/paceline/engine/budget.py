"""The budget of a run: when it is evaluated, how much of it is used, how many steps each replica may still make.

How much of the budget each replica may still spend.
"""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from paceline.core.data_order import DataOrder
from paceline.core.types import ReplicaId

if TYPE_CHECKING:  # the planner simulates budgets, and needs no torch
    from paceline.engine.base import Budget, BudgetUnit


class EvalSchedule:
    """The evaluation points of a budget, from 0 on, in its unit."""

    def __init__(self, budget: "Budget") -> None:
        self._every, self._passed = budget.evaluate_every, 0

    @property
    def next(self) -> float:
        """Where the next point lies."""
        return self._passed * self._every

    def reached(self, progress: float) -> bool:
        """Whether the next point lies at or before ``progress`` (up to rounding); then all up to there are passed."""
        reach = progress * (1 + 1e-12)
        if self.next > reach:
            return False
        self._passed = int(reach / self._every) + 1
        return True

    def step_over(self) -> float:
        """Pass the next point, and say where it lay."""
        at = self.next
        self._passed += 1
        return at


class BudgetMeter:
    """How much of a budget is spent, in its unit, from what has happened.

    Args:
        unit: of the budget.
        per_unit: micro-steps of all replicas in one step, or samples in one epoch; not used for seconds.
    """

    def __init__(self, unit: "BudgetUnit", per_unit: float) -> None:
        self._unit, self._per_unit = unit, per_unit

    def spent(self, time_s: float, micro_steps: int, samples: int) -> float:
        """Seconds, steps or epochs, whichever the budget counts."""
        if self._unit == "seconds":
            return time_s
        return (micro_steps if self._unit == "steps" else samples) / self._per_unit


class StepQuota(Protocol):
    """Grants micro-steps for one Δ at a time."""

    def grant(self, replica: ReplicaId) -> int:
        """How many micro-steps this replica's next Δ takes; 0: it is done."""

    def surely(self, replica: ReplicaId) -> int:
        """How many further Δs it will be granted, whatever the others do until then; at least."""


class Unbounded:
    """Time alone ends the run."""

    def __init__(self, micro_steps: int) -> None:
        self._micro_steps = micro_steps

    def grant(self, replica: ReplicaId) -> int:
        del replica
        return self._micro_steps

    def surely(self, replica: ReplicaId) -> int:
        del replica
        return sys.maxsize


class Steps:
    """Each replica makes its own number of steps.

    Args:
        steps: for each replica.
        micro_steps: of one Δ.
        per_step: micro-steps that count as one step: all of an accumulated gradient's, one of a local step's.
    """

    def __init__(self, steps: int, replicas: int, micro_steps: int, per_step: int) -> None:
        self._left = [steps * per_step] * replicas
        self._micro_steps = micro_steps

    def grant(self, replica: ReplicaId) -> int:
        granted = min(self._micro_steps, self._left[replica])
        self._left[replica] -= granted
        return granted

    def surely(self, replica: ReplicaId) -> int:
        return self._left[replica] // self._micro_steps


class Epochs:
    """All replicas together pass over the training set this many times.

    A batch is granted while fewer samples have been granted than the passes have, so synchronous replicas make exactly
    that many passes, and free-running ones overshoot by less than a batch.
    """

    def __init__(self, epochs: float, order: DataOrder, micro_steps: int, samples: int) -> None:
        self._size: Callable[[ReplicaId, int], int] = order.size
        self._left = round(epochs * samples, 6)  # 0.07 · 100 is a little more than 7
        self._micro_steps = micro_steps
        self._next: dict[ReplicaId, int] = {}

    def grant(self, replica: ReplicaId) -> int:
        granted = 0
        while granted < self._micro_steps and self._left > 0:
            k = self._next.get(replica, 0)
            self._next[replica] = k + 1
            self._left -= self._size(replica, k)
            granted += 1
        return granted

    def surely(self, replica: ReplicaId) -> int:
        del replica
        return 0

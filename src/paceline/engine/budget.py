"""The budget of a run: when it is evaluated, and how many micro-steps each replica may still make."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from paceline.core.data_order import DataOrder
from paceline.core.types import ReplicaId

if TYPE_CHECKING:  # the planner simulates budgets without torch
    from paceline.engine.base import Budget


class EvalSchedule:
    """Evaluation points of a budget, in its unit.

    Args:
        budget: of the run.
        passed: number of points that were evaluated before; the first is at 0.
    """

    def __init__(self, budget: "Budget", passed: int = 0) -> None:
        self._every, self.passed = budget.evaluate_every, passed
        self.next = passed * self._every
        """The next evaluation point."""

    def reached(self, spent: float) -> bool:
        """Return whether ``spent`` has reached the next point (up to rounding), and pass all points up to there."""
        reach = spent * (1 + 1e-12)
        if self.next > reach:
            return False
        self.passed = int(reach / self._every) + 1
        self.next = self.passed * self._every
        return True

    def step_over(self) -> float:
        """Pass the next point and return it."""
        point = self.next
        self.passed += 1
        self.next = self.passed * self._every  # a product, since sums would drift
        return point


class StepQuota(Protocol):
    """Grants each replica the micro-steps of one Δ at a time."""

    def grant(self, replica: ReplicaId) -> int:
        """Return how many micro-steps this replica's next Δ takes; 0: its share of the budget is spent."""

    def spent(self, replica: ReplicaId) -> bool:
        """Return whether a replica would be granted nothing."""

    def guaranteed(self, replica: ReplicaId) -> int:
        """Return how many further Δs it will at least be granted, whatever the other replicas do until then."""


@dataclass(frozen=True)
class Unbounded:
    """Quota of a budget in seconds: time alone ends the run."""

    micro_steps: int

    def grant(self, replica: ReplicaId) -> int:
        del replica
        return self.micro_steps

    def spent(self, replica: ReplicaId) -> bool:
        del replica
        return False

    def guaranteed(self, replica: ReplicaId) -> int:
        del replica
        return sys.maxsize


class Steps:
    """Quota of a budget in steps: each replica makes its own number of them.

    Args:
        left: micro-steps that each replica may make.
        micro_steps: of one Δ.
    """

    def __init__(self, left: Sequence[int], micro_steps: int) -> None:
        self._left, self._micro_steps = list(left), micro_steps

    def grant(self, replica: ReplicaId) -> int:
        granted = min(self._micro_steps, self._left[replica])
        self._left[replica] -= granted
        return granted

    def spent(self, replica: ReplicaId) -> bool:
        return self._left[replica] <= 0

    def guaranteed(self, replica: ReplicaId) -> int:
        return self._left[replica] // self._micro_steps


class Epochs:
    """Quota of a budget in epochs: all replicas together pass over the training set this many times.

    A batch is granted while fewer samples have been granted than the passes have, so synchronous replicas make exactly
    that many passes, and free-running ones overshoot by less than a batch.

    Args:
        left: samples that all replicas together may take.
        order: of the data.
        micro_steps: of one Δ.
        taken: batches that each replica has taken of the order.
    """

    def __init__(self, left: float, order: DataOrder, micro_steps: int, taken: Sequence[int]) -> None:
        self._batch_size = order.size
        self._left = round(left, 6)  # 0.07 · 100 is a little more than 7
        self._micro_steps = micro_steps
        self._next = list(taken)

    def grant(self, replica: ReplicaId) -> int:
        granted = 0
        while granted < self._micro_steps and self._left > 0:
            k = self._next[replica]
            self._next[replica] = k + 1
            self._left -= self._batch_size(replica, k)
            granted += 1
        return granted

    def spent(self, replica: ReplicaId) -> bool:
        del replica
        return self._left <= 0

    def guaranteed(self, replica: ReplicaId) -> int:
        del replica
        return 0

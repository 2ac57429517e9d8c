"""The budget of a run: when it is evaluated, and how many micro-steps each replica may still make."""

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from paceline.core.data_order import BatchRange, DataOrder
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

    @property
    def micro_steps(self) -> int:
        """Return the micro-steps of one Δ."""

    def grant(self, replica: ReplicaId, batches: BatchRange) -> int:
        """Return how many of these batches this replica's next Δ may take; 0: its share of the budget is spent."""

    def refund(self, batches: BatchRange) -> None:
        """Take back what was granted for batches whose Δ will never arrive."""

    def spent(self, replica: ReplicaId) -> bool:
        """Return whether a replica would be granted nothing."""

    def guaranteed(self, replica: ReplicaId) -> int:
        """Return how many further Δs it will at least be granted, whatever the other replicas do until then."""

    def join(self, replica: ReplicaId, present: Collection[ReplicaId]) -> None:
        """Let a replica that comes later spend as much as the one of ``present`` that has most of it left."""


@dataclass(frozen=True)
class Unbounded:
    """Quota of a budget in seconds: time alone ends the run."""

    micro_steps: int

    def grant(self, replica: ReplicaId, batches: BatchRange) -> int:
        del replica
        return batches.size

    def refund(self, batches: BatchRange) -> None:
        """Do nothing."""

    def spent(self, replica: ReplicaId) -> bool:
        del replica
        return False

    def guaranteed(self, replica: ReplicaId) -> int:
        del replica
        return sys.maxsize

    def join(self, replica: ReplicaId, present: Collection[ReplicaId]) -> None:
        """Do nothing."""


class Steps:
    """Quota of a budget in steps: each replica makes its own number of them.

    Args:
        left: micro-steps that each replica may make.
        micro_steps: of one Δ.
    """

    def __init__(self, left: Sequence[int], micro_steps: int) -> None:
        self._left, self.micro_steps = list(left), micro_steps

    def grant(self, replica: ReplicaId, batches: BatchRange) -> int:
        granted = min(batches.size, self._left[replica])
        self._left[replica] -= granted
        return granted

    def refund(self, batches: BatchRange) -> None:
        """Do nothing: the replica whose steps they were has died."""

    def spent(self, replica: ReplicaId) -> bool:
        return self._left[replica] <= 0

    def guaranteed(self, replica: ReplicaId) -> int:
        return self._left[replica] // self.micro_steps

    def join(self, replica: ReplicaId, present: Collection[ReplicaId]) -> None:
        self._left[replica] = max((self._left[other] for other in present), default=self._left[replica])


class Epochs:
    """Quota of a budget in epochs: all replicas together pass over the training set this many times.

    A batch is granted while fewer samples have been granted than the passes have, so synchronous replicas make exactly
    that many passes, and free-running ones overshoot by less than a batch.

    Args:
        left: samples that all replicas together may take.
        order: of the data.
        micro_steps: of one Δ.
    """

    def __init__(self, left: float, order: DataOrder, micro_steps: int) -> None:
        self._size = order.size
        self._left = round(left, 6)  # 0.07 · 100 is a little more than 7
        self.micro_steps = micro_steps

    def grant(self, replica: ReplicaId, batches: BatchRange) -> int:
        del replica
        granted = 0
        for k in batches.numbers:
            if self._left <= 0:
                break
            self._left -= self._size(batches.stream, k)
            granted += 1
        return granted

    def refund(self, batches: BatchRange) -> None:
        self._left += sum(self._size(batches.stream, k) for k in batches.numbers)

    def spent(self, replica: ReplicaId) -> bool:
        del replica
        return self._left <= 0

    def guaranteed(self, replica: ReplicaId) -> int:
        del replica
        return 0

    def join(self, replica: ReplicaId, present: Collection[ReplicaId]) -> None:
        """Do nothing: all replicas spend the same."""

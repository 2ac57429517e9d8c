"""How much of the budget each replica may still spend."""

import sys
from collections.abc import Callable
from typing import Protocol

from paceline.core.order import Order
from paceline.core.types import ReplicaId


class Allowance(Protocol):
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

    def __init__(self, epochs: float, order: Order, micro_steps: int, samples: int) -> None:
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

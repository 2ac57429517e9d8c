"""What a user's own loop is given."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from paceline.core.types import ReplicaId
from paceline.replica.base import Batch


class TrainingEnded(Exception):  # noqa: N818 (an end, not an error)
    """Raised by ``worker.step`` after the last step; a loop may let it pass, it ends the loop and nothing else."""


class Worker(ABC):
    """One replica, as its loop sees it.

    >>> def loop(worker):
    ...     for batch in worker.batches():
    ...         loss = worker.step(batch)
    """

    def __init__(self, replica: ReplicaId, replicas: int) -> None:
        self.replica, self.replicas = replica, replicas

    @property
    @abstractmethod
    def going(self) -> bool:
        """Whether there is a further step to make; waits until that is known."""

    @abstractmethod
    def batches(self) -> Iterator[Batch]:
        """This replica's batches, for as long as the budget lasts."""

    @abstractmethod
    def step(self, batch: Any) -> float:
        """The equation: pull A, compute Δ, push; returns the loss.

        Args:
            batch: from :meth:`batches`, or (input, target) with samples along dim 0.

        Raises:
            TrainingEnded: the budget is spent.
        """

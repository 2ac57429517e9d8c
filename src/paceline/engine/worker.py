"""What a user's own loop is given, and how it goes in a process of its own."""

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from paceline.core.types import ReplicaId
from paceline.engine.gauge import Gauge
from paceline.engine.setup import Setup
from paceline.engine.station import Cancelled, Station
from paceline.replica.base import Batch, Replica
from paceline.replica.batches import as_batch
from paceline.step import step


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


class StationWorker(Worker):
    """The worker of a process whose replica reaches A and F by a station.

    Args:
        setup: of the run.
        number: the replica's.
        replica: computes its Δ.
        station: the server, as it sees it.
        gauge: measures it.
        made: micro-steps that another worker has made under its name; it begins where that one has stopped.
    """

    def __init__(
        self, setup: Setup, number: ReplicaId, replica: Replica, station: Station, gauge: Gauge, made: int = 0
    ) -> None:
        super().__init__(number, setup.replicas)
        self._replica, self._station, self._gauge = replica, station, gauge
        self._source = setup.batches(number)
        delay = setup.job.delay
        self._delays = delay.stream(number, setup.replicas, setup.job.program.seed) if delay else None
        self._clock = self._skip = 0
        self._pass_over(made)
        self._first = made

    @property
    def going(self) -> bool:
        if not self._station.opens():
            return True
        began = time.monotonic_ns()
        on = self._station.going()
        if self._clock == self._first:
            self._gauge.start()
        else:
            self._gauge.waited(began, self._station.attempt)
        return on

    def batches(self) -> Iterator[Batch]:
        while self.going:
            skip, self._skip = self._skip, 0
            yield next(islice(self._source, skip, None))

    def step(self, batch: Any) -> float:
        if not self.going:
            raise TrainingEnded
        clock, self._clock = self._clock, self._clock + 1
        try:
            self._slow()
            loss = step(self._replica, self._station, as_batch(batch), clock)
        except Cancelled:
            self._called_off()
            return math.nan
        self._gauge.stepped(pushed=self._station.opens())
        return loss

    def run(self, loop: Callable[[Any], None] | None) -> None:
        """Live by the user's loop, or by one step a batch; then end the loader's own workers, and the figures."""
        try:
            (loop or plain_loop)(self)
        except TrainingEnded:
            pass
        finally:
            self._source.close()
            self._gauge.close()

    def _called_off(self) -> None:
        """The attempt ticks as if it had been made whole."""
        undone = self._station.confirm()
        self._pass_over(undone)
        self._gauge.stepped(pushed=False, skipped=undone)

    def _pass_over(self, micro_steps: int) -> None:
        """Leave out their seeds, their delays and their batches."""
        self._clock += micro_steps
        self._skip += micro_steps
        if self._delays is not None:
            deque(islice(self._delays, micro_steps), maxlen=0)

    def _slow(self) -> None:
        if self._delays is not None and (seconds := next(self._delays)) > 0:
            began = time.monotonic_ns()
            self._station.pause(seconds)
            self._gauge.spent("delay", began, self._station.attempt)
        if self._station.called_off():
            raise Cancelled


def plain_loop(worker: Worker) -> None:
    """What ``train`` runs on every replica."""
    for batch in worker.batches():
        worker.step(batch)

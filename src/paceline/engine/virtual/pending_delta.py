"""Pending Δs of replicas, computed when they are needed and not before, and each replica's timeline.

One replica's place in virtual time.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias, cast

from paceline.core.data_order import DataOrder
from paceline.core.errors import PacelineError, WorkerError
from paceline.core.types import Clock, ReplicaId, Seconds, Version
from paceline.engine.loop import nonfinite_error
from paceline.program import Data, Program
from paceline.replica.base import EMPTY, Batch, Measured, Replica
from paceline.replica.batches import Stream, fetcher
from paceline.replica.flat_state import FlatState
from paceline.step import step


@dataclass(eq=False, slots=True)
class PendingDelta:
    """One Δ under way; towards the replica that computes it, it is the server."""

    replica: ReplicaId
    clock: Clock
    version: Version
    read: FlatState | None
    """The A that it reads: shared with all that read this version, never written; let go once Δ is computed."""
    first_micro_step: Clock
    micro_steps: int
    began_s: Seconds = 0.0
    arrives_s: Seconds = 0.0
    void: bool = False
    """Cancelled: it will not arrive."""
    out: FlatState | None = field(default=None, repr=False)
    measured: Measured | None = None
    done: int = 0
    """Micro-steps made."""

    def begins_delta(self) -> bool:
        return self.done == 0

    def pull(self) -> FlatState:
        assert self.read is not None, "its Δ is computed"
        return self.read

    def ends_delta(self) -> bool:
        self.done += 1
        return self.done == self.micro_steps

    def delta_buffer(self) -> FlatState:
        self.out = self.pull().layout.new()
        return self.out

    def push(self, measured: Measured) -> None:
        self.measured, self.read = measured, None


BatchAt: TypeAlias = Callable[[ReplicaId, int], Batch]
"""(replica, k) -> the k-th batch of that replica, k = 0, 1, ..."""


class DeltaComputer:
    """Computes Δs one at a time.

    Args:
        make: the replica of an id.
        batch_at: the data.
        stop: whether a Δ that is not finite ends the run.
    """

    rule = "one at a time"

    def __init__(self, make: Callable[[ReplicaId], Replica], batch_at: BatchAt, *, stop: bool) -> None:
        self._make, self._batch_at, self._stop = make, batch_at, stop
        self._replicas: dict[ReplicaId, Replica] = {}

    def begin(self, attempt: PendingDelta) -> None:
        """An attempt has begun."""

    def forget(self, attempt: PendingDelta) -> None:
        """Its Δ will not be needed."""

    def compute(self, attempt: PendingDelta) -> FlatState:
        """Its Δ."""
        while attempt.measured is None:
            with blaming(attempt):
                batch = self._batch_at(attempt.replica, attempt.first_micro_step + attempt.done)
            self.step(attempt, batch)
        assert attempt.out is not None
        return attempt.out

    def step(self, attempt: PendingDelta, batch: Batch) -> float:
        """Make one of its micro-steps; returns the loss."""
        replica = self._replicas.get(attempt.replica)
        if replica is None:
            replica = self._replicas[attempt.replica] = self._make(attempt.replica)
        with blaming(attempt):
            loss = step(replica, attempt, batch, attempt.first_micro_step + attempt.done)
        if self._stop and attempt.measured is not None and not attempt.measured.finite:
            raise nonfinite_error(attempt.measured.loss, attempt.replica, attempt.clock)
        return loss


@contextmanager
def blaming(attempt: PendingDelta) -> Iterator[None]:
    """Turn what the user's code raises into a WorkerError that says whose attempt it was."""
    try:
        yield
    except PacelineError:
        raise
    except Exception as error:
        raise WorkerError(
            f"replica {attempt.replica} failed at its step {attempt.clock}: {type(error).__name__}: {error}"
        ) from error


def ordered_batches(program: Program, order: DataOrder) -> BatchAt:
    """The batches of a data set with an order, any at any time."""
    fetch = fetcher(cast(Data, program.train), program.loader)

    def batch_at(replica: ReplicaId, k: int) -> Batch:
        indices = order.batch(replica, k)
        return Batch(*fetch(indices), len(indices)) if len(indices) else EMPTY

    return batch_at


class Streams:
    """The batches of streams, which are opened when they are asked for and closed with the run.

    A DataLoader that is merely forgotten, to be found by the garbage collector, makes that wait for its workers.
    """

    def __init__(self, source: Callable[[ReplicaId], Stream]) -> None:
        self._source = source
        self._open: dict[ReplicaId, Stream] = {}
        self._next: dict[ReplicaId, int] = {}

    def of(self, replica: ReplicaId) -> Stream:
        """The stream of a replica, always the same."""
        if replica not in self._open:
            self._open[replica] = self._source(replica)
        return self._open[replica]

    def at(self, replica: ReplicaId, k: int) -> Batch:
        """The k-th batch of a replica. A stream only runs forwards: what is not asked for is passed over."""
        begin = self._next.get(replica, 0)
        self._next[replica] = k + 1
        return next(islice(self.of(replica), k - begin, None))

    def __enter__(self) -> "Streams":
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self._open.values():
            stream.close()


class ReplicaTimeline:
    """What one replica is at, and what it has done."""

    def __init__(self) -> None:
        self.clock = self.micro_clock = 0
        self.micro_steps = 0
        """Of attempts that have ended."""
        self.busy_s: Seconds = 0.0
        self.attempt: PendingDelta | None = None
        self.arrived_s: Seconds | None = None
        self._work = (0.0, 0.0)

    def begin(self, attempt: PendingDelta, busy_s: Seconds, from_s: Seconds, end_s: Seconds) -> None:
        """An attempt has begun, which is at work for ``busy_s`` from ``from_s`` on, as far as the run lasts."""
        self.clock, self.micro_clock = attempt.clock, self.micro_clock + attempt.micro_steps
        self.attempt = attempt
        self._work = from_s, from_s + busy_s
        self.busy_s += max(0.0, min(self._work[1], end_s) - from_s)

    def arrive(self, attempt: PendingDelta) -> None:
        """Its Δ has reached the server's door."""
        self.attempt, self.arrived_s = None, attempt.arrives_s
        self.micro_steps += attempt.micro_steps

    def stop(self, attempt: PendingDelta, at_s: Seconds, end_s: Seconds) -> None:
        """It was cancelled: what it would still have worked is taken back."""
        from_s, to_s = self._work
        self.busy_s -= max(0.0, min(to_s, end_s) - max(from_s, at_s))
        self.attempt, self.arrived_s = None, at_s
        self.micro_steps += attempt.micro_steps

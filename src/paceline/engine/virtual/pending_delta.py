"""Δs under way in virtual time: computed when they are needed and not before; their data; each replica's timeline.

When an attempt begins, the A that it read and the batches that it will see are fixed, so its Δ may be computed at any
time later. Most policies depend on nothing but the order of arrivals; their Δs are computed when an update needs them,
and those that are discarded or cancelled never.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from paceline.core.data_order import BatchRange
from paceline.core.errors import PacelineError, WorkerError
from paceline.core.records import ReplicaPosition
from paceline.core.types import Clock, ReplicaId, Seconds, Version
from paceline.device import GENERATOR
from paceline.engine.loop import nonfinite_error
from paceline.replica.base import Batch, Measured, Replica
from paceline.replica.batches import BatchSource
from paceline.replica.flat_state import FlatState
from paceline.step import step

# What an attempt is at: A waits to be sent to its replica; Δ is computed; Δ is on its way. Without a network all of an
# attempt is one event, its arrival.
Phase: TypeAlias = Literal["granted", "computing", "arriving"]


@dataclass(eq=False, slots=True)
class PendingDelta:
    """One Δ under way, which is also the server that its replica sees in ``step``."""

    replica: ReplicaId
    clock: Clock
    version: Version
    read: FlatState | None
    """The A that it reads: shared by all that read this version, never written; released once Δ is computed, unless
    :attr:`keeps_read`."""
    first_micro_step: Clock
    batches: BatchRange
    """A micro-step on each."""
    keeps_read: bool = False
    """Whether the update, too, needs the A that it has read."""
    phase: Phase = "arriving"
    due_s: Seconds = 0.0
    """When the phase ends."""
    work_s: tuple[Seconds, Seconds] = (0.0, 0.0)
    """To compute, and of delay, where a network says when that begins."""
    void: bool = False
    """True once cancelled: it will not arrive."""
    out: FlatState | None = field(default=None, repr=False)
    measured: Measured | None = None
    done: int = 0
    """Micro-steps that are computed."""
    adopted: bool = False
    """Whether the model of an own loop has adopted A, and the loop has computed on it."""

    @property
    def micro_steps(self) -> int:
        """Return the number of micro-steps."""
        return self.batches.size

    def begins_delta(self) -> bool:
        return self.done == 0 and not self.adopted

    def pull(self) -> FlatState:
        assert self.read is not None, "its Δ is computed"
        return self.read

    def ends_delta(self) -> bool:
        self.done += 1
        return self.done == self.micro_steps

    def delta_buffer(self) -> FlatState:
        self.out = self.pull().empty_like()
        return self.out

    def push(self, measured: Measured) -> None:
        self.measured = measured
        if not self.keeps_read:
            self.read = None


# (stream, k) -> the k-th batch of that stream, k = 0, 1, ...
BatchAt: TypeAlias = Callable[[ReplicaId, int], Batch]


class DeltaComputer:
    """Computes Δs one at a time.

    Args:
        build: builds the replica of an id.
        batch_at: the data.
        stop: True if a Δ that is not finite ends the run.
    """

    rule = "one at a time"

    def __init__(self, build: Callable[[ReplicaId], Replica], batch_at: BatchAt, *, stop: bool) -> None:
        self._build, self._batch_at, self._stop = build, batch_at, stop
        self.replicas: dict[ReplicaId, Replica] = {}
        """Those that have computed something."""
        self.add_loss: Callable[[float, int], None] = lambda *_: None
        """Notes the mean loss of a Δ that was read late, and its samples."""
        self._unread: tuple[ReplicaId, Clock, Measured] | None = None
        """The newest Δ whose loss is read late, so long as nobody has read it."""

    def begin(self, attempt: PendingDelta) -> None:
        """Note that an attempt has begun."""

    def forget(self, attempt: PendingDelta) -> None:
        """Drop an attempt whose Δ will not be needed."""

    def compute(self, attempt: PendingDelta) -> FlatState:
        """Compute the Δ of an attempt, unless it is there."""
        while attempt.measured is None:
            with named_failure(attempt):
                batch = self._batch_at(attempt.batches.stream, attempt.batches.first + attempt.done)
            self.step(attempt, batch)
        assert attempt.out is not None
        return attempt.out

    def replica(self, number: ReplicaId) -> Replica:
        """Return a replica, always the same."""
        if number not in self.replicas:
            self.replicas[number] = self._build(number)
        return self.replicas[number]

    def step(self, attempt: PendingDelta, batch: Batch) -> float:
        """Make one micro-step of an attempt and return its loss."""
        replica = self.replica(attempt.replica)
        with named_failure(attempt), GENERATOR:  # for dropout, which other threads' runs must not disturb
            loss = step(replica, attempt, batch, attempt.first_micro_step + attempt.done)
        measured = attempt.measured
        if measured is not None and measured.late is not None:
            self.read_late()  # of the Δ before: the device is at work on this one meanwhile
            self._unread = attempt.replica, attempt.clock, measured
        elif self._stop and measured is not None and not measured.finite:
            raise nonfinite_error(measured.loss, attempt.replica, attempt.clock)
        return loss

    def read_late(self) -> None:
        """Read the loss of the newest Δ, unless it is read.

        Raises:
            NonFiniteError: it was not finite.
        """
        unread, self._unread = self._unread, None
        if unread is None:
            return
        replica, clock, late = unread
        measured = late.known()
        if not measured.finite:
            raise nonfinite_error(measured.loss, replica, clock)
        self.add_loss(measured.loss, measured.samples)


@contextmanager
def named_failure(attempt: PendingDelta) -> Iterator[None]:
    """Context manager: turn an error of the user's code into a WorkerError that names the replica and its step."""
    try:
        yield
    except PacelineError:
        raise
    except Exception as error:
        raise WorkerError(
            f"replica {attempt.replica} failed at its step {attempt.clock}: {type(error).__name__}: {error}"
        ) from error


class BatchSources:
    """Sources of the batches of each replica, opened at first use and closed with the run.

    A DataLoader that is not closed makes the garbage collector wait for its workers.
    """

    def __init__(self, source: Callable[[], BatchSource]) -> None:
        self._source = source
        self._open: dict[ReplicaId, BatchSource] = {}

    def of(self, replica: ReplicaId) -> BatchSource:
        """Return the source of a replica, always the same."""
        if replica not in self._open:
            self._open[replica] = self._source()
        return self._open[replica]

    def at(self, stream: ReplicaId, number: int) -> Batch:
        """Return a batch of a replica's own stream."""
        return self.of(stream).at(stream, number)

    def close(self) -> None:
        for source in self._open.values():
            source.close()


class TimelineState(NamedTuple):
    """The state of a replica's timeline."""

    clock: Clock
    micro_clock: Clock
    micro_steps: int
    busy_s: Seconds
    """Of attempts that have ended."""
    arrived_s: Seconds | None
    work: tuple[Seconds, Seconds]
    ahead_s: Seconds | None = None


class ReplicaTimeline:
    """Attempts of one replica in virtual time from a position on, and how long it was busy."""

    def __init__(self, position: ReplicaPosition) -> None:
        self.clock, self.micro_clock = position.attempt, position.clock
        self.micro_steps = 0
        """Micro-steps of attempts that have ended."""
        self.busy_s: Seconds = 0.0
        self.attempt: PendingDelta | None = None
        self.arrived_s: Seconds | None = None
        self.work = (0.0, 0.0)
        """When the newest attempt begins to be busy, and ends."""
        self.ahead_s: Seconds | None = None
        """When a replica that pulls ahead begins to be busy with the next one; None: once that is granted."""

    def begin(self, attempt: PendingDelta) -> None:
        """Begin an attempt, which is not busy yet."""
        self.clock, self.micro_clock = attempt.clock, self.micro_clock + attempt.micro_steps
        self.attempt, self.work = attempt, (0.0, 0.0)

    def work_for(self, busy_s: Seconds, from_s: Seconds, end_s: Seconds) -> None:
        """Let the attempt be busy for ``busy_s`` from ``from_s`` on, as far as the run lasts."""
        self.work = from_s, from_s + busy_s
        self.busy_s += self.busy_until(end_s)

    def state(self, end_s: Seconds) -> TimelineState:
        """Return the timeline between two events of a run that lasts until ``end_s``."""
        under_way = self.busy_until(end_s) if self.attempt is not None else 0.0
        return TimelineState(
            self.clock,
            self.micro_clock,
            self.micro_steps,
            self.busy_s - under_way,
            self.arrived_s,
            self.work,
            self.ahead_s,
        )

    def restore(self, saved: TimelineState) -> None:
        """Go on from a checkpoint, but for the attempt under way."""
        self.clock, self.micro_clock, self.micro_steps, self.busy_s, self.arrived_s, self.work, self.ahead_s = saved

    def count_busy_time(self, end_s: Seconds) -> None:
        """Count the time that the attempt under way, which a checkpoint has had, is busy."""
        if self.attempt is not None:
            self.busy_s += self.busy_until(end_s)

    def busy_until(self, end_s: Seconds) -> Seconds:
        """Return how long the attempt is busy, as far as the run lasts."""
        return max(0.0, min(self.work[1], end_s) - self.work[0])

    def arrive(self, attempt: PendingDelta) -> None:
        """End an attempt whose Δ has arrived."""
        self.attempt, self.arrived_s = None, attempt.due_s
        self.micro_steps += attempt.micro_steps

    def stop(self, attempt: PendingDelta, at_s: Seconds, end_s: Seconds) -> None:
        """End a cancelled attempt: the time that it would still have been busy does not count."""
        from_s, to_s = self.work
        self.busy_s -= max(0.0, min(to_s, end_s) - max(from_s, at_s))
        self.attempt, self.arrived_s = None, at_s
        self.micro_steps += attempt.micro_steps

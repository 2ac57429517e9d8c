"""Every rank runs the same policy on the same step metadata and applies the same update.

::

    rank 0   Δ --\\                     status of all -> policy -> Apply: the same step on the same A
    rank 1   Δ ---> one all-reduce --> status of all -> policy -> Apply: the same step on the same A
    rank 2   Δ --/                     status of all -> policy -> Apply: the same step on the same A

There is no server to ask, so a decision costs no message. A is the same on all ranks, so rank k mod P alone copies and
evaluates snapshot k, after training. Where a record may end the run (``until=``), rank 0 evaluates at once, and
training time stands still until all ranks have the record.
"""

import contextlib
import time
from collections.abc import Callable, Iterator

from paceline.aggregation.base import Apply, Arrival
from paceline.aggregation.synchronous import Synchronous
from paceline.comm.shared_memory import SpillAllocator
from paceline.core.records import Record
from paceline.core.types import Nanoseconds, ReplicaId, Seconds, Version
from paceline.engine.base import Job
from paceline.engine.distributed.norms import NoiseObserver
from paceline.engine.distributed.reduce_buffer import RankStatus, ReduceBuffer, StatusKind
from paceline.engine.distributed.update import Update
from paceline.engine.evaluation import EvaluationQueue, SnapshotInfo
from paceline.engine.loop import RunLoop
from paceline.engine.run_context import RunContext
from paceline.engine.spmd.rank_context import RankContext
from paceline.replica.base import micro_steps
from paceline.replica.module_utils import materialize


class SyncedClock:
    """Training time on rank 0's clock; it runs from when all ranks are ready, but not while they wait for a record.

    Args:
        ahead_ns: how far rank 0's clock is ahead of this host's.
    """

    def __init__(self, ahead_ns: Nanoseconds) -> None:
        self.ahead_ns = ahead_ns
        self.began_ns: Nanoseconds = time.monotonic_ns() + ahead_ns
        """Start of training, on rank 0's clock."""
        self._paused_ns: Nanoseconds = 0

    def start(self, began_ns: Nanoseconds) -> None:
        """Set when training began, on rank 0's clock."""
        self.began_ns = began_ns

    def now_ns(self) -> Nanoseconds:
        """Return the training time so far."""
        return time.monotonic_ns() + self.ahead_ns - self.began_ns - self._paused_ns

    def local_ns(self, training_ns: Nanoseconds) -> Nanoseconds:
        """Convert a training time to this host's clock."""
        return training_ns + self.began_ns + self._paused_ns - self.ahead_ns

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager: the clock stands still."""
        since = time.monotonic_ns()
        try:
            yield
        finally:
            self._paused_ns += time.monotonic_ns() - since


class RankEvaluation:
    """The snapshots that one rank evaluates.

    Args:
        job: of the run.
        context: of this rank.
        snapshot_bytes: size of one snapshot.
    """

    def __init__(self, job: Job, context: RankContext, snapshot_bytes: int) -> None:
        self._context, self._world = context, context.world
        self._queue = EvaluationQueue(
            job.program, snapshot_bytes * self._world.local_size, lambda: materialize(job.program, SpillAllocator())
        )
        self._records: list[Record] = []
        self._number = 0

    def hand_in(self, update: Update, info: SnapshotInfo) -> None:
        """Copy A to be evaluated after training; where memory is short, evaluate an older snapshot now."""
        local = self._number % self._world.size == self._world.rank
        self._number += 1
        while local and self._queue.full:
            self._records.append(self._queue.evaluate(*self._queue.snapshots.popleft()))
        state = update.full_state(wanted=local)  # all ranks take part where each has a part of A
        if state is not None:
            self._queue.add(state, info)

    def evaluate_now(self, update: Update, info: SnapshotInfo) -> Record:
        """Return the record of A on all ranks."""
        state = update.full_state(wanted=self._world.rank == 0)
        local = self._queue.evaluate(state, info) if state is not None else None
        record: Record = self._context.gather(local, "a score")[0]
        return record

    def evaluate_rest(self, cancelled: Callable[[], bool]) -> list[Record]:
        """Evaluate this rank's share, unless cancelled, and return its records."""
        self._records += self._queue.evaluate_all(cancelled)
        self._queue.snapshots.clear()
        return self._records


class ReplicatedCoordinator:
    """One run's coordinator, run by each rank; executes its decisions on the rank's A.

    Args:
        context: of the run.
        update: applies updates to A.
        reduce_buffer: holds the sum of what all ranks contributed.
        evaluation: evaluates snapshots.
        clock: training time.
        initial_digest: digest of A_0.
        reads: how many updates A has had where the Δ of this number reads it; None: where the policy sends it.
            With it weights have moved by the time a status is known, so a Δ counts also past the end of the budget.
        noise: observes each update; None: the noise scale is not measured.
    """

    def __init__(
        self,
        context: RunContext,
        update: Update,
        reduce_buffer: ReduceBuffer,
        evaluation: RankEvaluation,
        clock: SyncedClock,
        initial_digest: str,
        reads: Callable[[Version], Version] | None = None,
        noise: NoiseObserver | None = None,
    ) -> None:
        policy, job = context.policy, context.job
        assert isinstance(policy, Synchronous), "another policy was not refused"
        self._job, self._update, self._reduce_buffer, self._evaluation = job, update, reduce_buffer, evaluation
        self._reads, self._noise, self._clock, self._mean = reads, noise, clock, policy.combine == "mean"
        self._statuses: list[RankStatus] = []
        # Contributions are of the size of one gradient, not of a sum over samples, which half precision would not hold.
        self._usual_samples = float(context.order.batch_size * micro_steps(context.delta)) if context.order else 1.0
        self.may_repeat = job.on_nonfinite == "skip"
        """True where an exchange may have to be repeated for a Δ that was discarded."""
        self._attempts = [0] * context.replicas
        self._granted = [0] * context.replicas
        self._read: list[Version] = [0] * context.replicas
        self.loop = RunLoop(context, self, initial_digest, self._evaluate, noise=noise.accumulator if noise else None)
        self._coordinator = self.loop.coordinator
        self.now: Seconds = 0.0
        """Training time at which the newest exchange was complete."""
        self.over = self.interrupted = False

    # -------------------------------------------------------------------------------------------- questions of a client

    def begin(self) -> None:
        """Evaluate A_0 and send it to all replicas; all ranks are ready."""
        self.loop.evaluate_if_due(self.now)
        if not self.over:
            self._coordinator.begin()

    def computes(self, replica: ReplicaId) -> bool:
        """Return whether it is to compute a Δ."""
        return not self.over and replica in self._coordinator.computing

    def waits(self, replica: ReplicaId) -> bool:
        """Return whether its Δ waits for others that have to be computed again."""
        present, computing = self._coordinator.present, self._coordinator.computing
        return not self.over and replica in present and replica not in computing

    def takes_part(self, replica: ReplicaId) -> bool:
        """Return whether it has not left."""
        return replica in self._coordinator.present

    def attempt(self, replica: ReplicaId) -> int:
        """Return the number of the Δ that it is at."""
        return self._attempts[replica]

    def micro_steps(self, replica: ReplicaId) -> int:
        """Return how many micro-steps make up this Δ."""
        return self._granted[replica]

    @property
    def passes(self) -> int:
        """Return how many micro-steps the longest Δ under way takes."""
        return max((self._granted[r] for r in self._coordinator.computing), default=0)

    def weight(self, samples: int) -> float:
        """Return the factor of a Δ before it is added to the others; the only one stays as it is."""
        if self._mean and len(self._attempts) > 1:
            return samples / self._usual_samples
        return float(samples > 0)

    def take(self, statuses: list[RankStatus]) -> None:
        """Have the policy decide after an exchange, from the status of all ranks."""
        loop, coordinator = self.loop, self._coordinator
        self._statuses = statuses
        self.now = min(max(status.entered_ns for status in statuses) * 1e-9, loop.end_s)
        if loop.timed:
            loop.evaluate_if_due(self.now)
        computing = frozenset(coordinator.computing)  # a replica that waits contributes a Δ that has arrived before
        for replica, status in enumerate(statuses):
            if status.kind is StatusKind.leaving:
                coordinator.left(replica, "done")
        for replica in sorted(r for r in computing if statuses[r].kind is StatusKind.delta):
            if self.over and self._reads is None:
                continue
            status = statuses[replica]
            arrived_s = status.entered_ns * 1e-9
            late = arrived_s > loop.end_s  # the exchange was not complete in time
            self.over |= late
            if late and self._reads is None:
                continue
            loss, version, clock = status.loss if status.samples else None, self._read[replica], self._attempts[replica]
            loop.arrived(Arrival(replica, version, clock, status.samples, arrived_s, status.finite, loss))
            loop.handled(self.now)
        self.interrupted |= any(status.stop for status in statuses)
        self.over |= self.interrupted or coordinator.idle
        loop.display(self.now)

    def finish(self) -> None:
        """Count what is left as discarded, and have the last A evaluated unless its record is there."""
        self._coordinator.finish()
        if self._job.budget.until is None or not self.loop.history.is_current(self.now):
            self.loop.evaluate_final(self.now)

    def _evaluate(self, now: Seconds) -> None:
        info = self.loop.history.snapshot(now)
        if self._job.budget.until is None:
            self._evaluation.hand_in(self._update, info)
            return
        with self._clock.paused():
            record = self._evaluation.evaluate_now(self._update, info)
        self.loop.keep([record])
        self.over |= self.loop.condition_met

    # --------------------------------------------------------------------------------- execution of decisions, in order

    def apply(self, action: Apply) -> None:
        arrival, weight = next((a, w) for a, w in action.deltas if a.samples)
        factor = weight / self.weight(arrival.samples)
        self._reduce_buffer.scale_buffers(factor / sum(w for _, w in action.deltas))  # running buffers: always a mean
        self._reduce_buffer.take_counters([a.replica for a, _ in action.deltas])
        if self._noise is not None:
            self._noise.applied(self._statuses, [(a.replica, w) for a, w in action.deltas], factor)
        self._update.apply(factor, action.rate)

    def send(self, replica: ReplicaId, micro_steps: int) -> None:
        self._attempts[replica] += 1
        self._granted[replica] = micro_steps
        version = self._coordinator.version
        self._read[replica] = version if self._reads is None else self._reads(version)

    def discard(self, arrivals: tuple[Arrival, ...]) -> None:
        """Do nothing: a Δ that is not finite contributed zeros to the sum."""

    def cancel(self, replica: ReplicaId) -> None:
        raise AssertionError(f"synchronous training cancels no attempt, but that of replica {replica}")

    def dismiss(self, replica: ReplicaId) -> None:
        self._granted[replica] = 0

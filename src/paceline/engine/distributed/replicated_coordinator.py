"""Every rank runs the same policy on the same step metadata and applies the same update.

What F decides, on every rank alike: each is told of all ranks' Δs, runs the policy by itself and updates its own A.

::

    rank 0   Δ --\\                     rows of all -> policy -> Apply: the same step on the same A
    rank 1   Δ ---> one all-reduce --> rows of all -> policy -> Apply: the same step on the same A
    rank 2   Δ --/                     rows of all -> policy -> Apply: the same step on the same A

There is no server to ask, so a decision costs no message.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator

from paceline.aggregation.base import Apply, Arrival
from paceline.aggregation.synchronous import Synchronous
from paceline.core.types import Nanoseconds, ReplicaId, Seconds, Version
from paceline.engine.coordinator import Coordinator
from paceline.engine.distributed.evaluation import RankEvaluation
from paceline.engine.distributed.norms import NoiseObserver
from paceline.engine.distributed.reduce_buffer import RankStatus, ReduceBuffer, StatusKind
from paceline.engine.distributed.update import Update
from paceline.engine.remote_errors import not_finite
from paceline.engine.run_context import RunContext
from paceline.engine.run_history import RunHistory
from paceline.replica.base import micro_steps


class SyncedClock:
    """Runs from the moment when all ranks are ready, but not while the run waits for a score.

    Args:
        ahead_ns: how far rank 0's clock is ahead of this host's.
    """

    def __init__(self, ahead_ns: Nanoseconds) -> None:
        self.ahead_ns = ahead_ns
        self.began_ns: Nanoseconds = time.monotonic_ns() + ahead_ns
        """By rank 0's clock."""
        self._paused_ns: Nanoseconds = 0

    def start(self, began_ns: Nanoseconds) -> None:
        """It is said when the run began."""
        self.began_ns = began_ns

    def now_ns(self) -> Nanoseconds:
        """Training time so far."""
        return time.monotonic_ns() + self.ahead_ns - self.began_ns - self._paused_ns

    def local_ns(self, training_ns: Nanoseconds) -> Nanoseconds:
        """What this host's clock showed at a training time."""
        return training_ns + self.began_ns + self._paused_ns - self.ahead_ns

    def now(self) -> Seconds:
        """As :meth:`now_ns`, in seconds."""
        return self.now_ns() * 1e-9

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stand still."""
        since = time.monotonic_ns()
        try:
            yield
        finally:
            self._paused_ns += time.monotonic_ns() - since


class ReplicatedCoordinator:
    """One run, as it goes on every rank; the hands of its coordinator.

    Args:
        setup: of the run.
        update: moves A.
        freight: holds Σ of what ranks brought.
        desk: scores snapshots.
        stopwatch: stops while the run waits for a score.
        digest: of A_0.
        reads: how many updates A has had where the Δ of this number reads it; None: where F sends it.
            With it weights have moved by the time a row is known, so what was made counts, also past the end.
        noise: is told of each update; None: nobody has asked.
    """

    def __init__(
        self,
        setup: RunContext,
        update: Update,
        freight: ReduceBuffer,
        desk: RankEvaluation,
        stopwatch: SyncedClock,
        digest: str,
        reads: Callable[[Version], Version] | None = None,
        noise: NoiseObserver | None = None,
    ) -> None:
        policy = setup.policy
        assert isinstance(policy, Synchronous), "another policy was not refused"
        self._job, self._update, self._freight, self._desk = setup.job, update, freight, desk
        self._reads, self._noise = reads, noise
        self._rows: list[RankStatus] = []
        self._stopwatch, self._mean = stopwatch, policy.combine == "mean"
        # What ranks bring is of the size of one gradient, not of a sum over samples: half precision would not hold it.
        self._usual = float(setup.order.batch_size * micro_steps(setup.delta)) if setup.order else 1.0
        budget = setup.job.budget
        self._timed = budget.unit == "seconds"
        self._end: Seconds = budget.amount if self._timed and budget.amount is not None else math.inf
        self.may_repeat = setup.job.on_nonfinite == "skip"
        """Whether an exchange may have to be made again, for a Δ that was discarded."""
        self._attempts = [0] * setup.replicas
        self._granted = [0] * setup.replicas
        self._read: list[Version] = [0] * setup.replicas
        self._coordinator = Coordinator(policy, setup.replicas, setup.allowance(), self)
        self.chronicle = RunHistory(setup, self._coordinator, digest, noise.accumulator if noise else None)
        self.now: Seconds = 0.0
        """When the newest round was complete."""
        self.over = self.interrupted = False

    # ----------------------------------------------------------------------------------------------- what a rank asks

    def begin(self) -> None:
        """All are ready."""
        self._look()
        if not self.over:
            self._coordinator.begin()

    def computes(self, replica: ReplicaId) -> bool:
        """Whether it is to compute a Δ."""
        return not self.over and replica in self._coordinator.computing

    def waits(self, replica: ReplicaId) -> bool:
        """Whether its Δ waits for others that have to be computed anew."""
        return not self.over and self.takes_part(replica) and replica not in self._coordinator.computing

    def takes_part(self, replica: ReplicaId) -> bool:
        """Whether it has not left."""
        return replica in self._coordinator.present

    def attempt(self, replica: ReplicaId) -> int:
        """Which Δ it is at."""
        return self._attempts[replica]

    def micro_steps(self, replica: ReplicaId) -> int:
        """How many make up this Δ."""
        return self._granted[replica]

    @property
    def passes(self) -> int:
        """How many the longest Δ under way takes."""
        return max((self._granted[r] for r in self._coordinator.computing), default=0)

    def weight(self, samples: int) -> float:
        """What a Δ is multiplied by before it is added to the others; alone it stays as it is."""
        if self._mean and len(self._attempts) > 1:
            return samples / self._usual
        return float(samples > 0)

    def take(self, rows: list[RankStatus]) -> None:
        """An exchange has been made; these are all ranks' rows."""
        self._rows = rows
        self.now = min(max(row.entered_ns for row in rows) * 1e-9, self._end)
        if self._timed and self.chronicle.points.next < self._end * (1 - 1e-9):
            self._look()
        at_work = self._coordinator.computing  # who waits brings what has arrived before
        for replica in (r for r, row in enumerate(rows) if row.kind is StatusKind.leaving):
            self._coordinator.left(replica, "done")
        for replica in sorted(r for r in at_work if rows[r].kind is StatusKind.delta):
            if not self.over or self._reads is not None:
                self._hear(replica, rows[replica])
        self.interrupted |= any(row.stop for row in rows)
        self.over |= self.interrupted or self._coordinator.idle

    def finish(self) -> None:
        """Count what is left as discarded, and have the last A scored."""
        self._coordinator.finish()
        scored = self._job.budget.until is not None and self.chronicle.stands_at(self.now)
        if (self._timed or self.chronicle.moved_on) and not scored:
            self._score()

    # ---------------------------------------------------------------------------------------------------------- inside

    def _hear(self, replica: ReplicaId, row: RankStatus) -> None:
        late = row.entered_ns * 1e-9 > self._end  # the round was not complete in time
        self.over |= late
        if not late or self._reads is not None:
            self._arrived(replica, row)

    def _arrived(self, replica: ReplicaId, row: RankStatus) -> None:
        clock = self._attempts[replica]
        if not row.finite and self._job.on_nonfinite == "stop":
            raise not_finite(row.loss, replica, clock)
        self.chronicle.heard(row.loss, row.samples)
        loss, time_s = row.loss if row.samples else None, row.entered_ns * 1e-9
        self._coordinator.arrived(Arrival(replica, self._read[replica], clock, row.samples, time_s, row.finite, loss))
        if not self._timed:
            self._look()

    def _look(self) -> None:
        """Take the snapshot that is due."""
        if self.chronicle.point_reached(self.now):
            self._score()

    def _score(self) -> None:
        moment = self.chronicle.moment(self.now)
        if self._job.budget.until is None:
            self._desk.hand_in(self._update, moment)
            return
        with self._stopwatch.paused():
            record = self._desk.score_now(self._update, moment)
        self.over |= self.chronicle.record(record)

    # ------------------------------------------------------------------------------------------ hands: what is decided

    def apply(self, action: Apply) -> None:
        arrival, weight = next((a, w) for a, w in action.deltas if a.samples)
        factor = weight / self.weight(arrival.samples)
        self._freight.scale_buffers(factor / sum(w for _, w in action.deltas))  # they are a mean in any case
        self._freight.take_counters([a.replica for a, _ in action.deltas])
        if self._noise is not None:
            self._noise.applied(self._rows, [(a.replica, w) for a, w in action.deltas], factor)
        self._update.apply(factor, action.rate)

    def send(self, replica: ReplicaId, micro_steps: int) -> None:
        self._attempts[replica] += 1
        self._granted[replica] = micro_steps
        version = self._coordinator.version
        self._read[replica] = version if self._reads is None else self._reads(version)

    def discard(self, arrivals: tuple[Arrival, ...]) -> None:
        """Who brought them has brought nothing."""

    def cancel(self, replica: ReplicaId) -> None:
        raise AssertionError(f"synchronous training cancels nobody, but replica {replica}")

    def dismiss(self, replica: ReplicaId) -> None:
        self._granted[replica] = 0

"""The coordinator that every rank runs: lockstep by the all-reduce of a step.

::

    rank 0   Δ --\\                     status of all -> policy -> Apply: the same step on the same A
    rank 1   Δ ---> one all-reduce --> status of all -> policy -> Apply: the same step on the same A
    rank 2   Δ --/                     status of all -> policy -> Apply: the same step on the same A

Every rank runs the same policy on the same metadata. There is no server to ask, so a decision costs no message. A is
the same on all ranks, so rank k mod P alone copies and evaluates snapshot k, after training. Where a record may end the
run (``until=``, ``callbacks=``), rank 0 evaluates at once, and training time stands still until all ranks have the
record.
"""

import copy
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from paceline.aggregation.base import Apply, Arrival
from paceline.comm.shared_memory import SpillAllocator
from paceline.comm.shared_pickle import object_of, parts_of
from paceline.core.data_order import BatchRange
from paceline.core.delta import Distance
from paceline.core.errors import InputError
from paceline.core.records import Record, ReplicaExit
from paceline.core.types import Nanoseconds, ReplicaId, Seconds, Version
from paceline.device import CPU
from paceline.engine.base import Watcher
from paceline.engine.batch_dispatcher import NO_BATCHES
from paceline.engine.distributed.late_losses import LateLosses
from paceline.engine.distributed.rank_shard import RankShard
from paceline.engine.distributed.rank_status import RankStatus, StatusKind
from paceline.engine.evaluation import EvaluationQueue
from paceline.engine.loop import RunLoop
from paceline.engine.run_context import RunContext
from paceline.engine.spmd.rank_context import RankContext
from paceline.program import Program
from paceline.replica.base import micro_steps
from paceline.replica.flat_state import FlatLayout, FlatState
from paceline.replica.module_utils import materialize, tensors_of


class SyncedClock:
    """Training time on rank 0's clock; it runs from when all ranks are ready, but not while they wait for a record.

    Args:
        ahead_ns: how far rank 0's clock is ahead of this host's.
    """

    def __init__(self, ahead_ns: Nanoseconds) -> None:
        self.ahead_ns = ahead_ns
        self.began_ns: Nanoseconds = time.monotonic_ns() + ahead_ns
        """Start of training, on rank 0's clock."""
        self.paused_ns: Nanoseconds = 0

    def now_ns(self) -> Nanoseconds:
        """Return the training time so far."""
        return time.monotonic_ns() + self.ahead_ns - self.began_ns - self.paused_ns


def fresh(program: Program, trained: nn.Module | None) -> nn.Module:
    """Return the program's model, none of which is trained: ``model`` may return the same tensors again and again.

    Args:
        program: of the run.
        trained: the model that this process trains; None: none.

    Raises:
        InputError: it returns those that are trained, and they can't be copied.
    """
    model = materialize(program, SpillAllocator())
    known = set() if trained is None else set(map(id, tensors_of(trained).values()))
    if known.isdisjoint(map(id, tensors_of(model).values())):
        return model
    try:
        return copy.deepcopy(model)
    except Exception as error:  # whatever a module raises that can't be copied, as one of FSDP2
        raise InputError(
            f"model() returned the module that is being trained, which can't be copied ({error}); write model=lambda: "
            "…, a function that returns a new nn.Module each time"
        ) from error


# Attributes of a coordinator that are the same on all ranks.
COMMON = ("loop", "attempts", "batches", "_read", "_snapshots", "now", "over", "interrupted")


class ReplicatedCoordinator:
    """One run's coordinator, run by each rank; executes its decisions on the rank's A, and evaluates its share.

    Args:
        context: of the run.
        rank_context: of this rank.
        shard: of this rank.
        clock: training time.
        layout: of A.
        initial_digest: digest of A_0.
        watch: receives progress.
    """

    def __init__(
        self,
        context: RunContext,
        rank_context: RankContext,
        shard: RankShard,
        clock: SyncedClock,
        layout: FlatLayout,
        initial_digest: str,
        watch: Watcher,
    ) -> None:
        policy, program = context.policy, context.job.program
        assert policy.collective is not None, "another policy was not refused"
        self._rank_context, self._world, self._run_context = rank_context, rank_context.world, context
        self._job, self._shard, self._clock = context.job, shard, clock
        build, device = functools.partial(fresh, program, shard.trained), torch.device(context.device(self._world.rank))
        self._queue = EvaluationQueue(program, layout.nbytes * self._world.local_size, build, device)
        self._snapshots = 0
        self._records: list[Record] = []
        """Of this rank's snapshots that did not fit into memory."""
        self._mean = policy.collective == "mean"
        self.distances = isinstance(context.delta, Distance)
        """Whether Δs are distances from A."""
        self._statuses: list[RankStatus] = []
        # Contributions are of the size of one gradient, not of a sum over samples, which half precision would not hold.
        batch = context.order.batch_size if context.order else program.per_replica_batch(1)
        self._usual_samples = float(batch * micro_steps(context.delta))
        self.may_repeat = context.job.on_nonfinite == "skip"
        """True where an exchange may have to be repeated for a Δ that was discarded."""
        self.before_change: Callable[[], None] = lambda: None
        """Called before A and its optimizer change."""
        self.attempts = [position.attempt for position in context.positions]
        """Number of the Δ that each replica is at."""
        self.batches = [NO_BATCHES] * context.replicas
        """Batches of the Δ that each replica is at, a micro-step on each."""
        self._read: list[Version] = [0] * context.replicas
        noise = shard.noise.accumulator if shard.noise else None
        self.watch = watch
        self.loop = RunLoop(context, self, initial_digest, self._evaluate, watch, noise)
        self.late: LateLosses | None = None
        """Losses that a status has of the Δ before its own; None: of its own."""
        if shard.late and shard.status_sync is not None:
            history, sync = self.loop.history, shard.status_sync
            self.late = LateLosses(rank_context, history, context.replicas, sync, shard.noise)
            self.loop.history.read_late = self.late.settle
        self.decisions = self.loop.coordinator
        self.now = self.loop.start_s
        """Training time at which the newest exchange was complete."""
        self.over = self.interrupted = False
        self._turns = None if shard.status_sync is None else shard.status_sync.turns
        self._unread = False
        """Whether this rank's replica was sent an A that it has not read."""
        self._sent: FlatState | None = None
        """That A, where it has changed since; None: it is the present one."""
        self._update: Callable[[], None] | None = None
        """The newest update, which is not made yet."""
        self.staged: Callable[[], None] | None = None
        """Makes of A what the update under way has made of it on a rank that has gone further; None: it is made."""

    @property
    def asks_to_end(self) -> bool:
        """Whether callbacks of this rank end training; all ranks end it after the exchange in which one says so."""
        return self.loop.ended() and self.loop.history.stopped is not None

    def begin(self) -> None:
        """Evaluate A_0 and send it to all replicas; all ranks are ready."""
        self.loop.evaluate_if_due(self.now)
        if not self.over:
            self.decisions.begin()

    def weight(self, samples: int) -> float:
        """Return the factor of a Δ before it is added to the others; the only one stays as it is."""
        if self.distances:  # there is one without a sample, too
            return 1.0
        if self._mean and len(self.attempts) > 1:
            return samples / self._usual_samples
        return float(samples > 0)

    def take(self, statuses: list[RankStatus]) -> None:
        """Have the policy decide after an exchange, from the status of all ranks."""
        loop, decisions = self.loop, self.decisions
        self._statuses = statuses
        if self.late is not None:
            self.late.take(statuses)
        self.now = min(max(status.entered_ns for status in statuses) * 1e-9, loop.end_s)
        if loop.timed:
            loop.evaluate_if_due(self.now)
        # In an asynchronous pipeline weights have moved by the time a status is known, so a Δ counts also past the end.
        counts_late = self._shard.read_version is not None
        # Ascending, so that every rank's policy decides on the same Δs in the same order.
        computing = sorted(decisions.computing)  # a replica that waits contributes a Δ that has arrived before
        for replica, status in enumerate(statuses):
            if status.kind is StatusKind.leaving:
                decisions.left(replica, "done")
        for replica in computing:
            status = statuses[replica]
            if status.kind is not StatusKind.delta or (self.over and not counts_late):
                continue
            arrived_s = status.entered_ns * 1e-9
            late = arrived_s > loop.end_s  # the exchange was not complete in time
            self.over |= late
            if late and not counts_late:
                continue
            version, clock = self._read[replica], self.attempts[replica]
            finite, loss = (status.finite, status.loss) if self.late is None else (True, None)
            if self.late is not None:
                self.late.arrived(replica, clock, status.samples)
            loss = loss if status.samples else None
            loop.arrived(Arrival(replica, version, clock, status.samples, arrived_s, finite, loss))
            loop.handled(self.now)
        self.interrupted |= any(status.stop for status in statuses)
        self.over |= self.interrupted or not decisions.present or any(status.ends for status in statuses)
        loop.display(self.now)

    def replicated(self) -> list[bytes]:
        """Return what the ranks have in common of it, for :meth:`replicate` on a rank that joins."""
        common = [*(getattr(self, name) for name in COMMON), self._run_context.order]
        return [bytes(part) for part in parts_of(common, self._own())]

    def replicate(self, other: Sequence[bytes]) -> None:
        """Stand where the coordinator of another rank does."""
        *values, self._run_context.order = object_of(other, self._own())
        for name, value in zip(COMMON, values, strict=True):
            setattr(self, name, value)
        self.decisions = self.loop.coordinator
        self._run_context.positions = list(self.decisions.positions)

    def _own(self) -> dict[str, Any]:
        """Return the objects that each rank has of its own, by name."""
        context = self._run_context
        return {
            "coordinator": self,
            "context": context,
            "job": context.job,
            "program": context.job.program,
            "policy": context.policy,
            "watch": self.watch,
        }

    def joined(self, replica: ReplicaId) -> None:
        """Have the policy go on with a replica that has joined."""
        self.decisions.joined(replica)

    def died(self, exit: ReplicaExit) -> None:
        """Have the policy go on without a replica; others take the batches that it was at work on."""
        replica = exit.replica
        self.loop.exits.append(exit)  # callbacks are told of it once a first rank is known
        self.decisions.left(replica, "died")
        self.attempts[replica] = self.decisions.positions[replica].attempt
        self.batches[replica] = NO_BATCHES
        self.over |= not self.decisions.present

    def finish(self) -> None:
        """Count what is left as discarded, and have the last A evaluated unless its record is there."""
        self.settle()
        self.loop.history.read_late()
        self.decisions.finish()
        if not self._job.live or not self.loop.history.is_current(self.now):
            self.loop.evaluate_final(self.now)

    def _evaluate(self, now: Seconds) -> None:
        """Copy A to be evaluated after training; where records may end that, evaluate it now, for all ranks."""
        self.settle()
        info, world, queue = self.loop.history.snapshot(now), self._world, self._queue
        if not self._job.live:
            members = self._rank_context.members
            local = members[self._snapshots % len(members)] == world.rank
            self._snapshots += 1
            while local and queue.full:  # memory is short
                self._records.append(queue.evaluate(*queue.snapshots.popleft()))
            state = self._shard.full_state(wanted=local)  # all ranks take part where each has a part of A
            if state is not None:
                queue.snapshots.append((state.to(CPU), info))
            return
        since = time.monotonic_ns()  # the clock stands still
        record: Record | None = None
        while record is None:  # twice if the rank that evaluates dies
            state = self._shard.full_state(wanted=self._rank_context.is_first)
            own = queue.evaluate(state, info) if state is not None else None
            record = self._rank_context.gather(own, "a score")[0]
        self._clock.paused_ns += time.monotonic_ns() - since
        self.loop.keep([record])
        self.over |= self.loop.condition_met

    def evaluate_rest(self, cancelled: Callable[[], bool]) -> list[Record]:
        """Evaluate this rank's share, unless cancelled, and return its records."""
        self._records += self._queue.evaluate_all(cancelled)
        self._queue.snapshots.clear()
        return self._records

    # --------------------------------------------------------------------------------- execution of decisions, in order

    def apply(self, action: Apply) -> None:
        shard = self._shard
        if self.staged is not None:
            self.before_change()
            self.staged()
            self.staged = None
            return
        if self._unread:  # this replica was sent the A that is there now
            self._sent = shard.state.clone()
            self._sent.version = self.decisions.version
        arrival, weight = next((a, w) for a, w in action.deltas if a.samples or self.distances)
        factor = weight / self.weight(arrival.samples)
        # Running buffers: always a mean.
        shard.reduce_buffer.scale_buffers(factor / sum(w for _, w in action.deltas))
        shard.reduce_buffer.take_counters([a.replica for a, _ in action.deltas])
        if shard.noise is not None:
            shard.noise.applied(self._statuses, [(a.replica, w) for a, w in action.deltas], factor)
        self._update = functools.partial(shard.update.apply, factor, action.rate, self.decisions.version)
        if self._turns is None or not self._turns.overlapped:
            self.settle()

    def settle(self) -> None:
        """Make the newest update of A, unless it is made; its sum may have been under way until now."""
        if self._turns is not None:
            self._turns.settle()
        update, self._update = self._update, None
        if update is not None:
            self.before_change()
            update()

    def read(self) -> FlatState:
        """Return the A that this rank's replica was sent."""
        sent, self._sent, self._unread = self._sent, None, False
        if sent is None:
            shared = self._shard.shared
            sent = self._shard.state if shared is None else shared.readable
            sent.version = self.decisions.version
        return sent

    def send(self, replica: ReplicaId, batches: BatchRange) -> None:
        self._unread |= replica == self._shard.coordinate.replica
        self.attempts[replica] += 1
        self.batches[replica] = batches
        version, reads = self.decisions.version, self._shard.read_version
        self._read[replica] = version if reads is None else reads(version)

    def discard(self, arrivals: tuple[Arrival, ...]) -> None:
        """Do nothing: a Δ that is not finite contributed zeros to the sum."""

    def cancel(self, replica: ReplicaId) -> None:
        raise AssertionError(f"synchronous training cancels no attempt, but that of replica {replica}")

    def dismiss(self, replica: ReplicaId) -> None:
        self.batches[replica] = NO_BATCHES

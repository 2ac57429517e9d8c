"""The parameter client of a rank, and the coordinator that every rank runs: lockstep by the all-reduce of a step.

::

    rank 0   Δ --\\                     status of all -> policy -> Apply: the same step on the same A
    rank 1   Δ ---> one all-reduce --> status of all -> policy -> Apply: the same step on the same A
    rank 2   Δ --/                     status of all -> policy -> Apply: the same step on the same A

Every rank runs the same policy on the same metadata. There is no server to ask, so a decision costs no message. A is
the same on all ranks, so rank k mod P alone copies and evaluates snapshot k, after training. Where a record may end the
run (``until=``), rank 0 evaluates at once, and training time stands still until all ranks have the record.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.aggregation.base import Apply, Arrival
from paceline.aggregation.synchronous import Synchronous
from paceline.comm.shared_memory import SpillAllocator
from paceline.core.data_order import BatchRange
from paceline.core.records import Record
from paceline.core.types import Clock, Nanoseconds, ReplicaId, Seconds, Version
from paceline.engine.batch_dispatcher import NO_BATCHES
from paceline.engine.checkpointing import Checkpointer
from paceline.engine.distributed.agreement import DivergenceCheck
from paceline.engine.distributed.rank_shard import RankShard
from paceline.engine.distributed.reduce_buffer import DeltaNorm, RankStatus, StatusKind, of_step
from paceline.engine.distributed.uneven_inputs import ShadowPasses
from paceline.engine.evaluation import EvaluationQueue
from paceline.engine.loop import InterruptGuard, RunLoop
from paceline.engine.run_context import RunContext
from paceline.engine.spmd.rank_context import RankContext
from paceline.engine.spmd.rank_registry import StoreSignals
from paceline.engine.worker import WorkerMetrics
from paceline.replica.base import GradientSink, Measured, micro_steps
from paceline.replica.flat_state import FlatLayout, FlatState
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
        self.paused_ns: Nanoseconds = 0

    def now_ns(self) -> Nanoseconds:
        """Return the training time so far."""
        return time.monotonic_ns() + self.ahead_ns - self.began_ns - self.paused_ns


class ReplicatedCoordinator:
    """One run's coordinator, run by each rank; executes its decisions on the rank's A, and evaluates its share.

    Args:
        context: of the run.
        rank_context: of this rank.
        shard: of this rank.
        clock: training time.
        layout: of A.
        initial_digest: digest of A_0.
    """

    def __init__(
        self,
        context: RunContext,
        rank_context: RankContext,
        shard: RankShard,
        clock: SyncedClock,
        layout: FlatLayout,
        initial_digest: str,
    ) -> None:
        policy, program = context.policy, context.job.program
        assert isinstance(policy, Synchronous), "another policy was not refused"
        self._rank_context, self._world = rank_context, rank_context.world
        self._job, self._shard, self._clock = context.job, shard, clock
        self._queue = EvaluationQueue(
            program, layout.nbytes * self._world.local_size, lambda: materialize(program, SpillAllocator())
        )
        self._snapshots = 0
        self._records: list[Record] = []
        """Of this rank's snapshots that did not fit into memory."""
        self._mean = policy.combine == "mean"
        self._statuses: list[RankStatus] = []
        # Contributions are of the size of one gradient, not of a sum over samples, which half precision would not hold.
        self._usual_samples = float(context.order.batch_size * micro_steps(context.delta)) if context.order else 1.0
        self.may_repeat = context.job.on_nonfinite == "skip"
        """True where an exchange may have to be repeated for a Δ that was discarded."""
        self.attempts = [position.attempt for position in context.positions]
        """Number of the Δ that each replica is at."""
        self.batches = [NO_BATCHES] * context.replicas
        """Batches of the Δ that each replica is at, a micro-step on each."""
        self._read: list[Version] = [0] * context.replicas
        noise = shard.noise.accumulator if shard.noise else None
        self.loop = RunLoop(context, self, initial_digest, self._evaluate, noise=noise)
        self.decisions = self.loop.coordinator
        self.now = self.loop.start_s
        """Training time at which the newest exchange was complete."""
        self.over = self.interrupted = False

    def begin(self) -> None:
        """Evaluate A_0 and send it to all replicas; all ranks are ready."""
        self.loop.evaluate_if_due(self.now)
        if not self.over:
            self.decisions.begin()

    def weight(self, samples: int) -> float:
        """Return the factor of a Δ before it is added to the others; the only one stays as it is."""
        if self._mean and len(self.attempts) > 1:
            return samples / self._usual_samples
        return float(samples > 0)

    def take(self, statuses: list[RankStatus]) -> None:
        """Have the policy decide after an exchange, from the status of all ranks."""
        loop, decisions = self.loop, self.decisions
        self._statuses = statuses
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
            loss, version, clock = status.loss if status.samples else None, self._read[replica], self.attempts[replica]
            loop.arrived(Arrival(replica, version, clock, status.samples, arrived_s, status.finite, loss))
            loop.handled(self.now)
        self.interrupted |= any(status.stop for status in statuses)
        self.over |= self.interrupted or not decisions.present
        loop.display(self.now)

    def finish(self) -> None:
        """Count what is left as discarded, and have the last A evaluated unless its record is there."""
        self.decisions.finish()
        if self._job.budget.until is None or not self.loop.history.is_current(self.now):
            self.loop.evaluate_final(self.now)

    def _evaluate(self, now: Seconds) -> None:
        """Copy A to be evaluated after training; with a condition that ends it, evaluate it now, for all ranks."""
        info, world, queue = self.loop.history.snapshot(now), self._world, self._queue
        if self._job.budget.until is None:
            local = self._snapshots % world.size == world.rank
            self._snapshots += 1
            while local and queue.full:  # memory is short
                self._records.append(queue.evaluate(*queue.snapshots.popleft()))
            state = self._shard.full_state(wanted=local)  # all ranks take part where each has a part of A
            if state is not None:
                queue.snapshots.append((state, info))
            return
        since = time.monotonic_ns()  # the clock stands still
        state = self._shard.full_state(wanted=world.rank == 0)
        record = queue.evaluate(state, info) if state is not None else None
        record = self._rank_context.gather(record, "a score")[0]
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
        arrival, weight = next((a, w) for a, w in action.deltas if a.samples)
        factor = weight / self.weight(arrival.samples)
        # Running buffers: always a mean.
        shard.reduce_buffer.scale_buffers(factor / sum(w for _, w in action.deltas))
        shard.reduce_buffer.take_counters([a.replica for a, _ in action.deltas])
        if shard.noise is not None:
            shard.noise.applied(self._statuses, [(a.replica, w) for a, w in action.deltas], factor)
        shard.update.apply(factor, action.rate)

    def send(self, replica: ReplicaId, batches: BatchRange) -> None:
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


@dataclass(frozen=True)
class ClientContext:
    """The parts of a run that the client of one rank works with.

    Args:
        shadow_passes: those of this rank; None: passes don't communicate, so ranks may make different numbers of them.
        store_signals: of all ranks; None: there is a single one.
        interrupts: counts how often this process was asked to end, by Ctrl-C say.
        stop_event: set when it is asked.
        checkpointer: saves the run.
        divergence: compares A among the ranks.
    """

    coordinator: ReplicatedCoordinator
    shard: RankShard
    clock: SyncedClock
    metrics: WorkerMetrics
    shadow_passes: ShadowPasses | None
    store_signals: StoreSignals | None
    interrupts: InterruptGuard
    stop_event: threading.Event
    timeout_s: Seconds
    checkpointer: Checkpointer
    divergence: DivergenceCheck


class RankClient:
    """The common half of the clients of a rank, which has A itself and computes in lockstep."""

    def __init__(self, context: ClientContext) -> None:
        self._context, self._coordinator = context, context.coordinator
        self._replica, self._state = context.shard.coordinate.replica, context.shard.state
        self.attempt: Clock = 0
        """The Δ that this replica computes, counted from 1."""

    def pull(self) -> FlatState:
        return self._state

    def cancelled(self) -> bool:
        """Return False: in lockstep every Δ that has begun is finished."""
        return False

    def ack_cancel(self) -> int:
        raise AssertionError("no attempt is cancelled")

    def pause(self, seconds: Seconds) -> None:
        """Sleep, or until asked to end; a pause not much shorter than a hang is announced to the other ranks."""
        context = self._context
        if context.store_signals is not None and seconds > context.timeout_s / 4:
            until_ns = time.monotonic_ns() + context.clock.ahead_ns + int(seconds * 1e9)
            context.store_signals.extend_timeout(until_ns)
        context.stop_event.wait(seconds)


class AllReduceClient(RankClient, GradientSink):
    """The client of a rank that updates A, or its part of it, after each exchange.

    With an overlap, gradients are handed over one by one as to a sink; else Δ is in the reduce buffer.
    """

    def __init__(self, context: ClientContext) -> None:
        super().__init__(context)
        shard = context.shard
        assert shard.status_sync is not None, "an asynchronous pipeline has another client"
        self._sync, self._buffer, self._overlap = shard.status_sync, shard.reduce_buffer, shard.overlap
        self._norms = shard.noise.norms if shard.noise else None
        self._norm = None if self._norms is None else DeltaNorm()
        self._micro_steps = 0

    def wait_for_grant(self) -> bool:
        """Return whether to go on; an exchange has waited for all that could change that."""
        coordinator = self._coordinator
        self.attempt = coordinator.attempts[self._replica]
        return not coordinator.over and self._replica in coordinator.decisions.computing

    def begins_delta(self) -> bool:
        return self._micro_steps == 0

    def batch(self) -> tuple[ReplicaId, int]:
        """Return stream and number of the batch of the next micro-step."""
        batches = self._coordinator.batches[self._replica]
        return batches.stream, batches.first + self._micro_steps

    def is_last_micro_step(self) -> bool:
        return self._micro_steps + 1 == self._coordinator.batches[self._replica].size

    def ready(self, index: int, gradient: Tensor, samples: int) -> None:
        assert self._overlap is not None, "Δ is not sent in buckets"
        if self._norms is not None:
            self._norms.add(index, gradient)
        self._overlap.add(index, gradient, self._coordinator.weight(samples))

    def ends_delta(self) -> bool:
        self._micro_steps = (self._micro_steps + 1) % self._coordinator.batches[self._replica].size
        return self._micro_steps == 0

    def delta_buffer(self) -> FlatState:
        return self._buffer.state

    def push(self, measured: Measured) -> None:
        coordinator, state = self._coordinator, self._buffer.state
        weight = coordinator.weight(measured.samples)
        if self._norms is not None:  # before Δ is weighted
            self._norm = self._norms.delta(measured, by_parameter=self._overlap is not None)
        if self._overlap is not None:
            self._buffer.scale_buffers(weight)  # Δ itself was weighted bucket by bucket
        elif measured.finite:
            self._buffer.scale(weight)
        else:
            self._buffer.zero()
        kept = [v.clone() for v in state.vectors] if coordinator.may_repeat else []
        self._exchange(StatusKind.delta, measured)
        while not coordinator.over and self._replica in coordinator.decisions.waiting:  # another Δ is computed anew
            torch._foreach_copy_(state.vectors, kept)
            self._exchange(StatusKind.delta, measured)

    def leave(self) -> None:
        """Take part in the remaining exchanges of the other replicas, after the loop has ended."""
        while not self._coordinator.over:
            self._buffer.zero()
            self._norm = self._norm and DeltaNorm()
            present = self._replica in self._coordinator.decisions.present
            self._exchange(StatusKind.leaving if present else StatusKind.left, Measured(0.0, 0, True))

    def _exchange(self, kind: StatusKind, measured: Measured) -> None:
        """Sum Δs and exchange statuses, then let the coordinator decide and update A."""
        context, coordinator, clock, step = self._context, self._coordinator, self._context.clock, self.attempt
        if context.shadow_passes is not None:  # as many as the longest Δ under way takes
            computing = coordinator.decisions.computing
            context.shadow_passes.catch_up(max((coordinator.batches[r].size for r in computing), default=0))
        began, now, stop = time.monotonic_ns(), clock.now_ns(), context.interrupts.count > 0
        saving = context.checkpointer.busy
        status = RankStatus(kind, measured.samples, measured.finite, stop, measured.loss, now, self._norm, saving)
        # All ranks begin the rest of the buckets, then the exchange, in this order; the sums are complete after both.
        if self._overlap is not None:
            self._overlap.flush()
        statuses = self._sync.exchange(status, step)
        if self._overlap is not None:
            self._overlap.wait(of_step(step))

        if len(statuses) > 1:  # time until the last rank entered is waiting, from then on it is communication
            last_entered = max(each.entered_ns for each in statuses) - now + began
            complete = min(max(last_entered, began), time.monotonic_ns())
            context.metrics.waited(began, step, complete)
            context.metrics.spent("all_reduce", complete, step, self._buffer.nbytes)
        updating = time.monotonic_ns()
        coordinator.take(statuses)
        context.metrics.spent("apply", updating, step)
        context.divergence.check_if_due(coordinator.decisions.version)
        if not coordinator.decisions.waiting:  # a replica that waits has a Δ that no checkpoint would have
            context.checkpointer.save_if_due(coordinator.now, busy=any(status.saving for status in statuses))

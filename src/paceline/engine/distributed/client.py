"""The parameter client of a rank: A and F by way of the all-reduce of a step."""

import threading
import time
from dataclasses import dataclass

from torch import Tensor

from paceline.core.types import Clock, ReplicaId, Seconds
from paceline.engine.distributed.norms import DeltaNorms
from paceline.engine.distributed.overlap import Overlap
from paceline.engine.distributed.reduce_buffer import (
    DeltaNorm,
    RankStatus,
    ReduceBuffer,
    StatusKind,
    StatusSync,
    of_step,
)
from paceline.engine.distributed.replicated_coordinator import ReplicatedCoordinator, SyncedClock
from paceline.engine.distributed.uneven_inputs import ShadowPasses
from paceline.engine.loop import InterruptGuard
from paceline.engine.spmd.rank_registry import StoreSignals
from paceline.engine.worker import WorkerMetrics
from paceline.replica.base import GradientSink, Measured
from paceline.replica.flat_state import FlatState


@dataclass(frozen=True)
class ClientContext:
    """The parts of a run that the client of one rank works with."""

    coordinator: ReplicatedCoordinator
    status_sync: StatusSync | None
    """None: for a client that exchanges statuses asynchronously."""
    reduce_buffer: ReduceBuffer
    overlap: Overlap | None
    """None: Δ is summed in the exchange."""
    norms: DeltaNorms | None
    """None: norms are not measured."""
    state: FlatState
    """A, or this rank's part of it."""
    clock: SyncedClock
    metrics: WorkerMetrics
    shadow_passes: ShadowPasses | None
    """None: passes don't communicate, so ranks may make different numbers of them."""
    store_signals: StoreSignals | None
    """None: there is a single rank."""
    interrupts: InterruptGuard
    """Counts how often this process was asked to end, by Ctrl-C say."""
    stop_event: threading.Event
    """Set when it is asked."""


class RankClient:
    """The common half of the clients of a rank, which has A itself and computes in lockstep.

    Args:
        replica: of this rank.
        context: of its run.
        timeout_s: of the run.
    """

    def __init__(self, replica: ReplicaId, context: ClientContext, timeout_s: Seconds) -> None:
        self._replica, self._context, self._timeout_s = replica, context, timeout_s
        self._coordinator = context.coordinator
        self.attempt: Clock = 0
        """The Δ that this replica computes, counted from 1."""

    def pull(self) -> FlatState:
        return self._context.state

    def cancelled(self) -> bool:
        """Return False: in lockstep every Δ that has begun is finished."""
        return False

    def ack_cancel(self) -> int:
        raise AssertionError("no attempt is cancelled")

    def pause(self, seconds: Seconds) -> None:
        """Sleep, or until asked to end; a pause not much shorter than a hang is announced to the other ranks."""
        context = self._context
        if context.store_signals is not None and seconds > self._timeout_s / 4:
            until_ns = time.monotonic_ns() + context.clock.ahead_ns + int(seconds * 1e9)
            context.store_signals.extend_timeout(until_ns)
        context.stop_event.wait(seconds)


class AllReduceClient(RankClient, GradientSink):
    """The client of a rank that updates A, or its part of it, after each exchange.

    With an overlap, gradients are handed over one by one as to a sink; else Δ is in the reduce buffer.

    Args:
        replica: of this rank.
        context: of its run.
        timeout_s: of the run.
    """

    def __init__(self, replica: ReplicaId, context: ClientContext, timeout_s: Seconds) -> None:
        super().__init__(replica, context, timeout_s)
        assert context.status_sync is not None, "an asynchronous pipeline has another client"
        self._sync, self._buffer, self._micro_steps = context.status_sync, context.reduce_buffer, 0
        self._norm = None if context.norms is None else DeltaNorm()

    def wait_for_grant(self) -> bool:
        """Return whether to go on; an exchange has waited for all that could change that."""
        self.attempt = self._coordinator.attempt(self._replica)
        return self._coordinator.computes(self._replica)

    def begins_delta(self) -> bool:
        return self._micro_steps == 0

    def is_last_micro_step(self) -> bool:
        return self._micro_steps + 1 == self._coordinator.micro_steps(self._replica)

    def ready(self, index: int, gradient: Tensor, samples: int) -> None:
        assert self._context.overlap is not None, "Δ is not sent in buckets"
        if self._context.norms is not None:
            self._context.norms.add(index, gradient)
        self._context.overlap.add(index, gradient, self._coordinator.weight(samples))

    def ends_delta(self) -> bool:
        self._micro_steps += 1
        if self._micro_steps < self._coordinator.micro_steps(self._replica):
            return False
        self._micro_steps = 0
        return True

    def delta_buffer(self) -> FlatState:
        return self._buffer.state

    def push(self, measured: Measured) -> None:
        context, weight = self._context, self._coordinator.weight(measured.samples)
        if context.norms is not None:  # before Δ is weighted
            self._norm = context.norms.delta(measured, by_parameter=context.overlap is not None)
        if context.overlap is not None:
            self._buffer.scale_buffers(weight)  # Δ itself was weighted bucket by bucket
        elif measured.finite:
            self._buffer.scale(weight)
        else:
            self._buffer.zero()
        kept = self._buffer.snapshot() if self._coordinator.may_repeat else []
        self._exchange(StatusKind.delta, measured)
        while self._coordinator.waits(self._replica):  # other replicas recompute a Δ that was discarded
            self._buffer.restore(kept)
            self._exchange(StatusKind.delta, measured)

    def leave(self) -> None:
        """Take part in the remaining exchanges of the other replicas, after the loop has ended."""
        while not self._coordinator.over:
            self._buffer.zero()
            self._norm = self._norm and DeltaNorm()
            present = self._coordinator.takes_part(self._replica)
            self._exchange(StatusKind.leaving if present else StatusKind.left, Measured(0.0, 0, True))

    def _exchange(self, kind: StatusKind, measured: Measured) -> None:
        """Sum Δs and exchange statuses, then let the coordinator decide and update A."""
        context, step = self._context, self.attempt
        if context.shadow_passes is not None:
            context.shadow_passes.catch_up(self._coordinator.passes)
        began, now, stop = time.monotonic_ns(), context.clock.now_ns(), context.interrupts.count > 0
        status = RankStatus(kind, measured.samples, measured.finite, stop, measured.loss, now, self._norm)
        # All ranks begin the rest of the buckets, then the exchange, in this order; the sums are complete after both.
        if context.overlap is not None:
            context.overlap.flush()
        statuses = self._sync.exchange(status, step)
        if context.overlap is not None:
            context.overlap.wait(of_step(step))

        if len(statuses) > 1:  # time until the last rank entered is waiting, from then on it is communication
            last_entered = context.clock.local_ns(max(each.entered_ns for each in statuses))
            complete = min(max(last_entered, began), time.monotonic_ns())
            context.metrics.waited(began, step, complete)
            context.metrics.spent("all_reduce", complete, step, self._buffer.nbytes)
        updating = time.monotonic_ns()
        self._coordinator.take(statuses)
        context.metrics.spent("apply", updating, step)

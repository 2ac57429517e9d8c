"""A replica's side of the exchange: A and F, as its loop sees them."""

import threading
import time
from collections.abc import Callable
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
from paceline.engine.spmd.watchdog import StoreSignals
from paceline.engine.worker import WorkerMetrics
from paceline.replica.base import Measured, Sink
from paceline.replica.flat_state import FlatState


@dataclass(frozen=True)
class ClientContext:
    """What a station works with."""

    coordinator: ReplicatedCoordinator
    status_sync: StatusSync
    reduce_buffer: ReduceBuffer
    overlap: Overlap | None
    """None where Δ is summed in the exchange."""
    norms: DeltaNorms | None
    """None where nobody has asked."""
    state: FlatState
    """A."""
    clock: SyncedClock
    metrics: WorkerMetrics
    shadow_passes: ShadowPasses
    store_signals: StoreSignals | None
    """None where nobody else is there."""
    stop_requested: Callable[[], bool]
    """Whether this process has been told to end, by Ctrl-C say."""
    stop_event: threading.Event
    """Set when it is."""
    after_exchange: Callable[[], None]
    """Called after each exchange."""


def excuse(around: ClientContext, seconds: Seconds, timeout_s: Seconds) -> None:
    """Announce a pause that is not much shorter than a hang."""
    if around.store_signals is not None and seconds > timeout_s / 4:
        around.store_signals.extend_timeout(time.monotonic_ns() + around.clock.ahead_ns + int(seconds * 1e9))


class AllReduceClient(Sink):
    """A and F, where every rank has both.

    Where Δ is sent bucket by bucket, its gradients come as to a sink; else all in the slot.

    Args:
        replica: whose side.
        around: what there is.
        timeout_s: a pause that is not much shorter is announced, so that nobody takes it for a hang.
    """

    def __init__(self, replica: ReplicaId, around: ClientContext, timeout_s: Seconds) -> None:
        self._replica, self._around, self._timeout_s = replica, around, timeout_s
        self._course, self._freight = around.coordinator, around.reduce_buffer
        self._again = around.coordinator.may_repeat
        self._made = 0
        self._norm = None if around.norms is None else DeltaNorm()
        self.attempt: Clock = 0
        """Which Δ this replica is at."""

    def wait_for_grant(self) -> bool:
        """Whether it is to go on; a push has waited for all that could change that."""
        self.attempt = self._course.attempt(self._replica)
        return self._course.computes(self._replica)

    def begins_delta(self) -> bool:
        return self._made == 0

    def pull(self) -> FlatState:
        return self._around.state

    def last(self) -> bool:
        return self._made + 1 == self._course.micro_steps(self._replica)

    def ready(self, index: int, gradient: Tensor, samples: int) -> None:
        assert self._around.overlap is not None, "Δ is not sent in buckets"
        if self._around.norms is not None:
            self._around.norms.add(index, gradient)
        self._around.overlap.bring(index, gradient, self._course.weight(samples))

    def ends_delta(self) -> bool:
        self._made += 1
        if self._made < self._course.micro_steps(self._replica):
            return False
        self._made = 0
        return True

    def delta_buffer(self) -> FlatState:
        return self._freight.state

    def push(self, measured: Measured) -> None:
        weight = self._course.weight(measured.samples)
        if self._around.norms is not None:
            self._norm = self._around.norms.brought(measured, sent=self._around.overlap is not None)
        if self._around.overlap is not None:
            self._freight.scale_buffers(weight)  # Δ is under way
        elif measured.finite:
            self._freight.weigh(weight)
        else:
            self._freight.empty()
        kept = self._freight.kept() if self._again else []
        self._meet(StatusKind.delta, measured)
        while self._course.waits(self._replica):
            self._freight.bring_again(kept)
            self._meet(StatusKind.delta, measured)

    def leave(self) -> None:
        """The loop has ended; take part in what the others still exchange."""
        while not self._course.over:
            self._freight.empty()
            self._norm = self._norm and DeltaNorm()
            present = self._course.takes_part(self._replica)
            self._meet(StatusKind.farewell if present else StatusKind.nothing, Measured(0.0, 0, True))

    def cancelled(self) -> bool:
        """Never: in lockstep an attempt is always wanted."""
        return False

    def ack_cancel(self) -> int:
        raise AssertionError("no attempt is called off")

    def pause(self, seconds: Seconds) -> None:
        """Be slow for so long, or until told to end."""
        excuse(self._around, seconds, self._timeout_s)
        self._around.stop_event.wait(seconds)

    def _meet(self, kind: StatusKind, measured: Measured) -> None:
        around, step = self._around, self.attempt
        around.shadow_passes.keep_up(self._course.passes)
        began = time.monotonic_ns()
        now, norm = around.clock.now_ns(), self._norm
        row = RankStatus(kind, measured.samples, measured.finite, around.stop_requested(), measured.loss, now, norm)
        if around.overlap is not None:
            around.overlap.settle()
        rows = around.status_sync.meet(row, step)
        if around.overlap is not None:
            around.overlap.wait(of_step(step))
        if len(rows) > 1:
            last_came = around.clock.local_ns(max(row.entered_ns for row in rows))
            all_there = min(max(last_came, began), time.monotonic_ns())
            around.metrics.waited(began, step, all_there)
            around.metrics.spent("all_reduce", all_there, step, self._freight.nbytes)
        updating = time.monotonic_ns()
        self._course.take(rows)
        around.metrics.spent("apply", updating, step)
        around.after_exchange()

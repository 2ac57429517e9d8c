"""The parameter client of a rank, which has A itself and computes in lockstep with the others.

::

    worker --- pull: A as it is --> compute Δ --- push: one all-reduce of Δ and status ---> ReplicatedCoordinator.take
"""

import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.types import Clock, ReplicaId, Seconds, Version
from paceline.engine.checkpointing import Checkpointer
from paceline.engine.distributed.agreement import DivergenceCheck
from paceline.engine.distributed.exchange import of_step
from paceline.engine.distributed.norms import NO_NORM
from paceline.engine.distributed.rank_shard import RankShard
from paceline.engine.distributed.rank_status import RankStatus, StatusKind
from paceline.engine.distributed.replicated_coordinator import ReplicatedCoordinator, SyncedClock
from paceline.engine.distributed.uneven_inputs import ShadowPasses
from paceline.engine.loop import InterruptGuard
from paceline.engine.replica_pace import ExchangePace
from paceline.engine.spmd.rank_registry import StoreSignals
from paceline.engine.spmd.survival import Survival
from paceline.engine.worker_metrics import WorkerMetrics
from paceline.replica.base import GradientSink, Measured
from paceline.replica.flat_state import FlatState


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
        survival: of the ranks that others leave behind; None: the first death ends the run.
        suspect_after_s: silence after which a rank is suspected, at least.
        collect_reports: takes what loops of other ranks have reported, on the first rank.
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
    survival: Survival | None
    suspect_after_s: Seconds
    collect_reports: Callable[[], None]


class RankClient:
    """The common half of the clients of a rank, which has A itself and computes in lockstep."""

    def __init__(self, context: ClientContext) -> None:
        self._context, self._coordinator = context, context.coordinator
        self._replica, self._state = context.shard.coordinate.replica, context.shard.state
        self.attempt: Clock = 0
        """The Δ that this replica computes, counted from 1."""

    def pull(self) -> FlatState:
        return self._coordinator.read()

    def cancelled(self) -> bool:
        """Return False: in lockstep every Δ that has begun is finished."""
        return False

    def ack_cancel(self) -> int:
        raise AssertionError("no attempt is cancelled")

    def taken_back(self) -> int:
        return 0

    def last_state(self) -> FlatState | None:
        """Return a copy of A as it is; None where the replica has parameters of its own."""
        return None if self._context.shard.own is not None else self._coordinator.read().clone()

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
        self._sync, self._overlap = shard.status_sync, shard.overlap
        self._buffer = shard.contribution or shard.reduce_buffer
        self._pace = ExchangePace(context.suspect_after_s)
        self._norms = shard.noise.norms if shard.noise else None
        self._norm = None if self._norms is None else NO_NORM
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
            if coordinator.distances and state.parameters:
                torch._foreach_sub_(state.parameters, self._state.parameters)
            self._buffer.scale(weight)
        else:
            self._buffer.zero()
        kept = [v.clone() for v in state.vectors] if coordinator.may_repeat else []
        self._exchange(StatusKind.delta, measured)
        while not coordinator.over and self._replica in coordinator.decisions.waiting:  # another Δ is computed anew
            coordinator.settle()
            torch._foreach_copy_(state.vectors, kept)
            self._exchange(StatusKind.delta, measured)

    def leave(self) -> None:
        """Take part in the remaining exchanges of the other replicas, after the loop has ended."""
        self._coordinator.read()  # this replica reads no A that it was sent any more
        while not self._coordinator.over:
            self._coordinator.settle()
            self._buffer.zero()
            self._norm = self._norm and NO_NORM
            present = self._replica in self._coordinator.decisions.present
            self._exchange(StatusKind.leaving if present else StatusKind.left, Measured(0.0, 0, True))

    def _exchanged(self, status: RankStatus, step: Clock, version: Version) -> list[RankStatus]:
        """Exchange statuses and sums, again with those who are left if a rank dies."""
        survival, exchange = self._context.survival, functools.partial(self._sync.exchange, status, step, version)
        if survival is None:
            return exchange()

        def silence_s() -> Seconds | None:
            generation = survival.membership.generation
            return self._pace.silence_s(generation.number, joined=bool(generation.joined))

        statuses = survival.collective(exchange, silence_s)
        self._pace.complete()
        return statuses

    def _exchange(self, kind: StatusKind, measured: Measured) -> None:
        """Sum Δs and exchange statuses, then let the coordinator decide and update A."""
        context, coordinator, clock, step = self._context, self._coordinator, self._context.clock, self.attempt
        if context.shadow_passes is not None:  # as many as the longest Δ under way takes
            computing = coordinator.decisions.computing
            context.shadow_passes.catch_up(max((coordinator.batches[r].size for r in computing), default=0))
        context.collect_reports()
        loss, finite = measured.loss, measured.finite
        norm = None if self._norm is None or coordinator.late is not None else self._norm.read()
        if coordinator.late is not None:
            loss, finite, norm = coordinator.late.next(measured.late, self._norm)
        began, now, stop = time.monotonic_ns(), clock.now_ns(), context.interrupts.count > 0
        saving = context.checkpointer.busy
        joining = context.survival is not None and context.survival.asked()
        ends = coordinator.asks_to_end
        status = RankStatus(kind, measured.samples, finite, stop, loss, now, norm, saving, joining, ends)
        # All ranks begin the rest of the buckets, then the exchange, in this order; the sums are complete after both.
        if self._overlap is not None:
            self._overlap.flush()
        statuses = self._exchanged(status, step, coordinator.decisions.version)
        if self._overlap is not None:
            self._overlap.wait(of_step(step))

        if len(statuses) > 1:  # time until the last rank entered is waiting, from then on it is communication
            last_entered = max(each.entered_ns for each in statuses) - now + began
            complete = min(max(last_entered, began), time.monotonic_ns())
            context.metrics.waited(began, step, complete)
            context.metrics.spent("all_reduce", complete, step, self._buffer.nbytes)
        updating = time.monotonic_ns()
        coordinator.take(statuses)
        if not statuses[self._replica].finite:
            context.shard.forget()
        context.metrics.spent("apply", updating, step)
        context.divergence.check_if_due(coordinator.decisions.version, coordinator.settle)
        if not coordinator.decisions.waiting:  # a replica that waits has a Δ that no checkpoint would have
            context.checkpointer.save_if_due(coordinator.now, busy=any(status.saving for status in statuses))
        if context.survival is not None and any(status.joining for status in statuses) and not coordinator.over:
            context.survival.admit()

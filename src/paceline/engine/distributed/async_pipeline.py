"""Asynchronous pipelines (PipeDream) on several ranks: each rank updates its own part of A within the stream.

Its client continues at once and receives the statuses of a step L steps later::

    rank of stage 0   F1 F2 B1 step F3 B2 step ...      status of step s --+--> all-reduce, awaited in step s + L
    rank of stage 1      F1 B1 step F2 B2 step ...      status of step s --+
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor

from paceline.core.errors import InputError
from paceline.core.mesh import Mesh
from paceline.core.types import Clock, Seconds, Version
from paceline.engine.budget import StepQuota
from paceline.engine.distributed.client import ClientContext
from paceline.engine.distributed.rank_shard import RankShard
from paceline.engine.distributed.reduce_buffer import (
    FIELDS,
    RankStatus,
    ReduceBuffer,
    StatusKind,
    by_replica,
    of_step,
)
from paceline.engine.distributed.update import Update
from paceline.engine.loop import nonfinite_error
from paceline.engine.spmd.communicator import Communicator, ring_bytes
from paceline.engine.spmd.pipeline_rank import PipelineRank
from paceline.engine.spmd.rank_context import RankSetup
from paceline.engine.spmd.shard_views import FullStateGather
from paceline.replica.base import Measured, Replica
from paceline.replica.flat_state import FlatLayout, FlatState
from paceline.replica.pipeline.async_stage import AsyncStage
from paceline.trace.recorder import AnyRecorder


@final
class AsyncStatusSync:
    """The exchange of statuses without waiting.

    Args:
        mesh: of all ranks.
        rank: of this process.
        communicator: of all ranks; None: there is one.
        lag: L, steps after its own at which a status is due.
    """

    def __init__(self, mesh: Mesh, rank: int, communicator: Communicator | None, lag: int) -> None:
        self._mesh, self._rank, self._communicator, self._lag = mesh, rank, communicator, lag
        self._pending: deque[tuple[Tensor, Any, Clock]] = deque()

    @property
    def due(self) -> bool:
        """Whether the oldest exchange is to be completed."""
        return len(self._pending) > self._lag

    @property
    def pending(self) -> bool:
        """Whether any exchange has begun and is not complete."""
        return bool(self._pending)

    def exchange(self, status: RankStatus, step: Clock) -> list[RankStatus]:
        """Exchange statuses and wait for them, with no other exchange pending."""
        self.begin(status, step)
        return self.complete()

    def begin(self, status: RankStatus, step: Clock) -> None:
        """Begin the exchange of a step."""
        table = torch.zeros(self._mesh.workers, FIELDS, dtype=torch.float64)
        table[self._rank] = torch.tensor(status.encode(), dtype=torch.float64)
        # With NCCL too, the table goes through the host's memory: nothing there waits for the device.
        work = None if self._communicator is None else self._communicator.begin(table)
        self._pending.append((table, work, step))

    def complete(self) -> list[RankStatus]:
        """Wait for the oldest exchange and return one status of each replica."""
        table, work, step = self._pending.popleft()
        if self._communicator is not None:
            self._communicator.wait(work, of_step(step))
            self._communicator.sent_bytes += ring_bytes(table.nbytes, self._communicator.ranks)
        return by_replica(self._mesh, [RankStatus.decode(row) for row in table.tolist()])


@final
class AsyncUpdate(Update):
    """No update: the stages have stepped within the stream.

    Args:
        pipeline: of this rank.
        current: returns this rank's part of A as it is.
        optimizer_bytes: returns the bytes of its optimizer state.
        communicator: gathers the parts; None: this one is all.
    """

    def __init__(
        self,
        pipeline: PipelineRank,
        current: Callable[[], FlatState],
        optimizer_bytes: Callable[[], int],
        communicator: Communicator | None,
    ) -> None:
        self._pipeline, self._current, self._communicator = pipeline, current, communicator
        self._optimizer_bytes = optimizer_bytes
        self.reduced_vectors = []

    @property
    def optimizer_bytes(self) -> int:
        return self._optimizer_bytes()

    def apply(self, factor: float, rate: float) -> None:
        """Do nothing: the step was made when the gradient was there."""

    def full_state(self, *, wanted: bool) -> FlatState | None:
        """Gather A as it is; while the stream runs, later stages have had up to p - 1 updates more.

        So it is the A of PipeDream's formula: w_0(t - p + 1), ..., w_{p-1}(t). After the end of the stream all stages
        have had the same updates.
        """
        pipeline = self._pipeline
        gather = FullStateGather(self._current(), pipeline.whole, pipeline.stages, pipeline.rank, self._communicator)
        return gather(wanted=wanted)


@final
class AsyncStageShard(RankShard):
    """A stage of an asynchronous pipeline, which steps by itself."""

    def __init__(self, setup: RankSetup) -> None:
        self._pipeline, self._replica = PipelineRank(setup), None
        self._refuse_ties()
        pipeline, strategy = self._pipeline, setup.run_context.job.strategy
        communicator = setup.context.communicator
        self._workers, self._m = strategy.stage_count, strategy.micro_batch_count
        self.coordinate, self.state = pipeline.place, pipeline.state
        self.parameter_bytes = pipeline.state.layout.parameter_bytes
        self.reduce_buffer = ReduceBuffer(FlatLayout((), ()), ranks=1)  # nothing of Δ is exchanged
        self.update = AsyncUpdate(pipeline, self._current, lambda: self._stage.optimizer_bytes, communicator)
        # A status is complete once the last stage has made the step, p - 1 micro-batches later, and one step for
        # the exchange itself.
        lag = -(-(self._workers - 1) // self._m) + 1
        self.status_sync: AsyncStatusSync = AsyncStatusSync(pipeline.mesh, pipeline.rank, communicator, lag)

    _replica: AsyncStage | None

    @property
    def _stage(self) -> AsyncStage:
        assert self._replica is not None, "the replica has not been built"
        return self._replica

    @property
    def peak_saved_bytes(self) -> int | None:
        return self._stage.peak_saved_bytes

    def replica(self, weight: Callable[[int], float], recorder: AnyRecorder) -> Replica:
        del weight  # each rank steps by itself
        self._replica = AsyncStage(self._pipeline.setup(recorder), self._pipeline.whole)
        return self._replica

    def drain(self) -> bool:
        """Finish the stream, as no further batch comes; return whether the remaining gradients were finite."""
        return self._stage.drain()

    def read_version(self, update: Version) -> Version:
        """Return the version of A that an update's gradient was computed on: that of the first stage, the oldest."""
        return self._pipeline.order.version(update * self._m, 0, self._workers)

    def notes(self) -> Mapping[str, str | int | float]:
        stale = self._pipeline.context.gather(self._stage.staleness, "the others' staleness")
        return {
            "micro_batches": self._m,
            "parts": len(self._pipeline.cut.parts),
            "staleness_by_stage": ",".join(map(str, stale)),
        }

    def _current(self) -> FlatState:
        """Return this rank's part of A as it is: A_0's until training begins."""
        if self._replica is not None and self._replica.begun:
            self.state.take(self._replica.stash.state)
        return self.state

    def _refuse_ties(self) -> None:
        for name in self._pipeline.cut.tied:
            if len(holders := self._pipeline.holders(name)) > 1:
                schedule = self._pipeline.run_context.job.strategy.schedule
                raise InputError(
                    f"schedule={schedule} moves the weights of each stage when its own "
                    f"gradient is there, but {name} is on stages {', '.join(map(str, holders))}, whose gradients "
                    "come at different times; write schedule=1f1b, or cuts= so that one stage has it"
                )


class AsyncPipelineClient:
    """The client of a rank that steps within the stream: it asks for permission alone, and learns results later.

    Args:
        context: of its run.
        shard: of this rank; its replica has the weights.
        quota: counts steps as they begin; the run's own counts them when their statuses are complete.
        timeout_s: of the run.
    """

    def __init__(self, context: ClientContext, shard: AsyncStageShard, quota: StepQuota, timeout_s: Seconds) -> None:
        self._context, self._shard, self._quota, self._timeout_s = context, shard, quota, timeout_s
        self._coordinator, self._sync = context.coordinator, shard.status_sync
        self._replica, self._granted = shard.coordinate.replica, 0
        self.attempt: Clock = 0
        """The step that this replica is at, counted from 1."""

    def wait_for_grant(self) -> bool:
        """Return whether to go on, by the exchanges that are complete: the same on all ranks."""
        if not self._granted:
            self._granted = self._quota.grant(self._replica)
            self.attempt += bool(self._granted)
        return self._granted > 0 and not self._coordinator.over

    def begins_delta(self) -> bool:
        return True

    def pull(self) -> FlatState:
        return self._context.state

    def ends_delta(self) -> bool:
        self._granted = 0
        return True

    def delta_buffer(self) -> FlatState:
        """Return the buffer for the running buffers alone."""
        return self._context.state

    def push(self, measured: Measured) -> None:
        self._begin(StatusKind.delta, measured)
        while self._sync.due:
            self._complete()

    def leave(self) -> None:
        """Finish the stream and complete all exchanges, after the loop has ended."""
        if not self._shard.drain():
            raise nonfinite_error(float("nan"), self._replica, self.attempt)
        while self._sync.pending:
            self._complete()
        while not self._coordinator.over:
            self._begin(StatusKind.leaving, Measured(0.0, 0, True))
            self._complete()

    def cancelled(self) -> bool:
        """Return False: a step that has begun is made."""
        return False

    def ack_cancel(self) -> int:
        raise AssertionError("no attempt is cancelled")

    def pause(self, seconds: Seconds) -> None:
        self._context.pause(seconds, self._timeout_s)

    def _begin(self, kind: StatusKind, measured: Measured) -> None:
        now, stop = self._context.clock.now_ns(), self._context.stop_requested()
        status = RankStatus(kind, measured.samples, measured.finite, stop, measured.loss, now)
        self._sync.begin(status, self.attempt)

    def _complete(self) -> None:
        began = time.monotonic_ns()
        statuses = self._sync.complete()
        self._context.metrics.waited(began, self.attempt)
        self._coordinator.take(statuses)

"""Asynchronous pipelines (PipeDream) on several ranks: each rank updates its own part of A within the stream.

Its client continues at once and receives the statuses of a step L steps later::

    rank of stage 0   F1 F2 B1 step F3 B2 step ...      status of step s --+--> all-reduce, awaited in step s + L
    rank of stage 1      F1 B1 step F2 B2 step ...      status of step s --+

::

    rank 0   F3 B1 U1 | status 3 ~~~~~~~~~~~~~~~~~~~~~~~~~~~~.               | take the statuses of step 3 - L
    rank 1   F3 B2 U2 | status 3 ~~~~~~~~~~~~~~~~~~~~~~~~~~~~+-> all ranks'  |  ...
    rank 2   F3 B3 U3 | status 3 ~~~~~~~~~~~~~~~~~~~~~~~~~~~~'               |

So that all ranks count alike and end at the same step, each sends a status a step, which travels while they go on. It
is taken L = ceil((p - 1) / m) + 1 steps later, which costs no waiting: the first rank ends step t + L with the
backward pass of micro-batch (t + L)·m + m - 1 - (p - 1), no earlier one than the last of step t, and that has passed
all the others.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor

from paceline.core.errors import InputError
from paceline.core.types import Clock, ReplicaId, Version
from paceline.engine.batch_dispatcher import NO_BATCHES, Dispatcher
from paceline.engine.checkpointing import Snapshot
from paceline.engine.distributed.client import ClientContext, RankClient
from paceline.engine.distributed.exchange import of_step
from paceline.engine.distributed.held_tensors import HeldTensors, part_tensors
from paceline.engine.distributed.rank_shard import RankShard
from paceline.engine.distributed.rank_status import FIELDS, RankStatus, StatusKind, by_replica
from paceline.engine.distributed.reduce_buffer import ReduceBuffer
from paceline.engine.distributed.update import Update
from paceline.engine.loop import nonfinite_error
from paceline.engine.spmd.communicator import ring_bytes
from paceline.engine.spmd.pipeline_rank import PipelineRank
from paceline.engine.spmd.rank_context import RankSetup
from paceline.engine.spmd.shard_views import PartChunks
from paceline.replica.base import Measured, Replica
from paceline.replica.flat_state import FlatLayout, FlatState
from paceline.replica.pipeline.async_stage import AsyncStage
from paceline.trace.recorder import AnyRecorder


@final
class AsyncStageShard(RankShard, Update):
    """A stage of an asynchronous pipeline, which steps by itself within the stream."""

    def __init__(self, setup: RankSetup) -> None:
        self.pipeline = pipeline = PipelineRank(setup)
        self.state_json = pipeline.state_json
        self.communicator, strategy = setup.context.communicator, setup.run_context.job.strategy
        for name, holders in pipeline.holders.items():
            if len(holders) > 1:
                raise InputError(
                    f"schedule={strategy.schedule} moves the weights of each stage when its own gradient is there, but "
                    f"{name} is on stages {', '.join(map(str, holders))}, whose gradients come at different times; "
                    "write schedule=1f1b, or cuts= so that one stage has it"
                )
        workers, self._m = strategy.stage_count, strategy.micro_batch_count
        self.coordinate, self.state = self.pipeline.place, self.pipeline.state
        self.parameter_bytes = self.state.layout.parameter_bytes
        self.reduce_buffer = ReduceBuffer(FlatLayout((), ()), ranks=1)  # nothing of Δ is exchanged
        self.update, self.reduced_vectors = self, []
        self.lag = -(-(workers - 1) // self._m) + 1
        """L: the last stage makes a step p - 1 micro-batches after the first, and one step is for the exchange."""
        resume = setup.run_context.job.resume
        first = 0 if resume is None else resume.run.coordinator.version
        self.read_version = lambda update: first + pipeline.order.version((update - first) * self._m, 0, workers)
        """The version that the first stage's gradient was computed on, the oldest."""
        self.full_state = self._gather

    stage: AsyncStage
    """Computes and steps; built by :meth:`replica`."""

    def replica(self, weight: Callable[[int], float], recorder: AnyRecorder) -> Replica:
        del weight  # each rank steps by itself
        self.worker = self.stage = AsyncStage(self.pipeline.pipeline_context(recorder), self.pipeline.whole)
        return self.stage

    def apply(self, factor: float, rate: float, version: Version) -> None:
        """Do nothing: the step was made when the gradient was there."""

    def _gather(self, *, wanted: bool) -> FlatState | None:
        """Gather A as it is, A_0 until training begins; in the stream later stages have had up to p - 1 updates more.

        So it is the A of PipeDream's formula: w_0(t - p + 1), ..., w_{p-1}(t). After the end of the stream all stages
        have had the same updates.
        """
        if self.stage.stash is not None:
            self.state.take(self.stage.stash.state)
        return self.pipeline.full_state(wanted=wanted)

    def held(self) -> HeldTensors:
        pipeline, stage = self.pipeline, self.stage
        stage.adopt(self.state)
        assert stage.stash is not None, "A has been adopted"
        state = FlatState(self.state.layout, stage.stash.state.parameters, self.state.buffers)
        part = PartChunks(pipeline.whole, {}, 0)
        return part_tensors(part, part.of(state), stage.stash.optimizer, pipeline.names())

    def notes(self) -> Mapping[str, str | int | float]:
        stale = self.pipeline.context.gather(self.stage.staleness, "the others' staleness")
        return {
            "micro_batches": self._m,
            "parts": len(self.pipeline.cut.parts),
            "staleness_by_stage": ",".join(map(str, stale)),
        }


class AsyncPipelineClient(RankClient):
    """The client of a rank that steps within the stream; statuses of a step are complete L steps later.

    Args:
        context: of its run.
        shard: of this rank; its replica has the weights.
        dispatcher: counts steps as they begin; the run's own counts them when their statuses are complete.
    """

    def __init__(self, context: ClientContext, shard: AsyncStageShard, dispatcher: Dispatcher) -> None:
        super().__init__(context)
        self._shard, self._dispatcher, self._batches = shard, dispatcher, NO_BATCHES
        self.attempt = context.coordinator.attempts[self._replica]
        self._pending: deque[tuple[Tensor, Any, Clock]] = deque()
        """Status tables whose all-reduce is not complete, and their steps."""
        self._first = context.coordinator.decisions.version
        """Updates before this stream."""
        self._copied: tuple[Version, Snapshot | None] | None = None
        """An update at which each rank copies its part for a checkpoint, and the copy; None: there is none due."""

    def wait_for_grant(self) -> bool:
        """Return whether to go on, by the exchanges that are complete: the same on all ranks."""
        if not self._batches.size:
            self._batches = self._dispatcher.take(self._replica, self.attempt + 1)
            self.attempt += self._batches.size > 0
        return self._batches.size > 0 and not self._coordinator.over

    def batch(self) -> tuple[ReplicaId, int]:
        return self._batches.stream, self._batches.first

    def begins_delta(self) -> bool:
        return True

    def ends_delta(self) -> bool:
        self._dispatcher.settled(self._replica, self.attempt)
        self._batches = NO_BATCHES
        return True

    def delta_buffer(self) -> FlatState:
        """Return the buffer for the running buffers alone."""
        return self._state

    def push(self, measured: Measured) -> None:
        self._begin(StatusKind.delta, measured)
        while len(self._pending) > self._shard.lag:
            self._complete()

    def leave(self) -> None:
        """Finish the stream and complete all exchanges, after the loop has ended."""
        if not self._shard.stage.drain():
            raise nonfinite_error(float("nan"), self._replica, self.attempt)
        while self._pending:
            self._complete()
        while not self._coordinator.over:
            self._begin(StatusKind.leaving, Measured(0.0, 0, True))
            self._complete()

    def _begin(self, kind: StatusKind, measured: Measured) -> None:
        """Begin the exchange of the statuses of a step."""
        now, stop = self._context.clock.now_ns(), self._context.interrupts.count > 0
        saving, ends = self._context.checkpointer.busy, self._coordinator.asks_to_end
        status = RankStatus(kind, measured.samples, measured.finite, stop, measured.loss, now, saving=saving, ends=ends)
        table = torch.zeros(self._shard.pipeline.mesh.workers, FIELDS, dtype=torch.float64)
        table[self._shard.pipeline.rank] = torch.tensor(status.encode(), dtype=torch.float64)
        # With NCCL too, the table goes through the host's memory: nothing there waits for the device.
        communicator = self._shard.communicator
        work = None if communicator is None else communicator.start_all_reduce(table)
        self._pending.append((table, work, self.attempt))

    def _complete(self) -> None:
        """Wait for the oldest exchange and let the coordinator count its step."""
        began, communicator = time.monotonic_ns(), self._shard.communicator
        table, work, step = self._pending.popleft()
        if communicator is not None:
            communicator.wait(work, of_step(step))
            communicator.traffic.sent_bytes += ring_bytes(table.nbytes, communicator.ranks)
        rows = [RankStatus.decode(row) for row in table.tolist()]
        self._context.metrics.waited(began, self.attempt)
        self._coordinator.take(by_replica(rows, self._shard.pipeline.mesh.replicas))
        self._save_if_due(busy=any(row.saving for row in rows))

    def _save_if_due(self, *, busy: bool) -> None:
        """Save the A of one update, which the ranks make at different times.

        ::

            rank 0   update 7 | 8 | 9, copy | 10                    statuses of 9 are complete: write the copy
            rank 1   update 8 | 9, copy | 10 | 11                   likewise
                            ^ a checkpoint is due, and no rank has made update 9
        """
        coordinator, checkpointer = self._coordinator, self._context.checkpointer
        version = coordinator.decisions.version
        if self._copied is not None:
            due, snapshot = self._copied
            if version == due and snapshot is not None:
                checkpointer.save(coordinator.now, snapshot)
                self._copied = None
        elif checkpointer.is_due(coordinator.now, busy=busy):
            due = version + self._shard.lag + 2
            self._copied = due, None
            self._shard.stage.call_after(due - self._first, lambda: self._copy(due))

    def _copy(self, due: Version) -> None:
        self._copied = due, self._shard.held().copied(self._shard.state_json)

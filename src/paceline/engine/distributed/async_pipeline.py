"""Asynchronous pipelines (PipeDream) on several ranks: each moves its own part of A.

The station of a replica whose weights move within a stream: it goes on, and hears later what came of its steps.
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
from paceline.engine.distributed import reduce_buffer
from paceline.engine.distributed.client import ClientContext, excuse
from paceline.engine.distributed.pipeline_sync import merged
from paceline.engine.distributed.rank_shard import RankShard
from paceline.engine.distributed.reduce_buffer import RankStatus, ReduceBuffer, StatusKind, StatusSync, of_step
from paceline.engine.distributed.update import Update
from paceline.engine.remote_errors import not_finite
from paceline.engine.spmd.communicator import Communicator, ring_bytes
from paceline.engine.spmd.pipeline_rank import PipelineRank
from paceline.engine.spmd.rank_context import RankSetup
from paceline.engine.spmd.shard_views import FullStateGather
from paceline.replica.base import Measured, Replica
from paceline.replica.flat_state import FlatLayout, FlatState
from paceline.replica.pipeline.async_stage import AsyncStage
from paceline.trace.recorder import AnyRecorder

NOTHING = FlatLayout((), ())
"""What is brought of Δ."""


@final
class AsyncStatusSync:
    """Where ranks tell each other rows without waiting.

    Args:
        mesh: of all ranks.
        rank: whose.
        communicator: by which they meet; None: nobody else is there.
        lag: L, how many steps after its own a row is due.
    """

    def __init__(self, mesh: Mesh, rank: int, communicator: Communicator | None, lag: int) -> None:
        self._mesh, self._rank, self._communicator, self._lag = mesh, rank, communicator, lag
        self._under_way: deque[tuple[Tensor, Any, Clock]] = deque()

    @property
    def due(self) -> bool:
        """Whether the oldest rows are to be taken."""
        return len(self._under_way) > self._lag

    @property
    def open(self) -> bool:
        """Whether any are under way."""
        return bool(self._under_way)

    def meet(self, row: RankStatus, step: Clock) -> list[RankStatus]:
        """Say this rank's and wait for the others'; none is under way."""
        self.begin(row, step)
        return self.take()

    def begin(self, row: RankStatus, step: Clock) -> None:
        """Say this rank's."""
        table = torch.zeros(self._mesh.workers, reduce_buffer.FIELDS, dtype=torch.float64)
        reduce_buffer.write(row, table[self._rank])
        # Also beside NCCL they go by the host's memory: there nothing waits for the device.
        work = None if self._communicator is None else self._communicator.begin(table)
        self._under_way.append((table, work, step))

    def take(self) -> list[RankStatus]:
        """The oldest: one row of each replica."""
        table, work, step = self._under_way.popleft()
        if self._communicator is not None:
            self._communicator.wait(work, of_step(step))
            self._communicator.sent_bytes += ring_bytes(table.nbytes, self._communicator.ranks)
        each = [reduce_buffer.read(numbers) for numbers in table.tolist()]
        return [
            merged([each[rank] for rank in self._mesh.replica_ranks(replica)]) for replica in range(self._mesh.replicas)
        ]


@final
class AsyncUpdate(Update):
    """The weights have moved already.

    Args:
        pipeline: says who has which part.
        now: this rank's part of A as it is.
        remembered: how many bytes the optimizer remembers of it.
        communicator: by which the parts are gathered; None: this one is all.
    """

    def __init__(
        self,
        pipeline: PipelineRank,
        now: Callable[[], FlatState],
        remembered: Callable[[], int],
        communicator: Communicator | None,
    ) -> None:
        self._pipeline, self._now, self._remembered, self._communicator = pipeline, now, remembered, communicator

    @property
    def reduced_vectors(self) -> list[Tensor]:
        return []

    @property
    def optimizer_bytes(self) -> int:
        return self._remembered()

    def apply(self, factor: float, rate: float) -> None:
        """It was made when the gradient was there."""

    def full_state(self, *, wanted: bool) -> FlatState | None:
        """A as it is, of which later stages have had up to p - 1 updates more while the stream goes on.

        So it is what the formula of PipeDream computes with: w_0(t - p + 1), ..., w_{p-1}(t). After the end of the
        stream all stages have had the same updates.
        """
        pipeline = self._pipeline
        gather = FullStateGather(self._now(), pipeline.whole, pipeline.stages, pipeline.rank, self._communicator)
        return gather(wanted=wanted)


@final
class AsyncStageShard(RankShard):
    """One rank's."""

    def __init__(self, rank_setup: RankSetup) -> None:
        self._pipeline = PipelineRank(rank_setup)
        self._refuse_ties()
        self._replica: AsyncStage | None = None
        update = AsyncUpdate(
            self._pipeline, self._now, lambda: self._made.optimizer_bytes, rank_setup.context.communicator
        )
        super().__init__(self._pipeline.place, self._pipeline.state, ReduceBuffer(NOTHING, ranks=1), update)
        strategy = rank_setup.run_context.job.strategy
        self._workers, self._m = strategy.stage_count, strategy.micro_batch_count
        lag = -(-(self._workers - 1) // self._m) + 1
        self.rows = AsyncStatusSync(self._pipeline.mesh, self._pipeline.rank, rank_setup.context.communicator, lag)

    @property
    def parameter_bytes(self) -> int:
        return self.state.layout.parameter_bytes

    @property
    def peak_saved_bytes(self) -> int | None:
        return self._made.peak_saved_bytes

    def status_sync(self) -> StatusSync:
        return self.rows

    def replica(self, weigh: Callable[[int], float], recorder: AnyRecorder) -> Replica:
        del weigh  # each rank steps by itself
        job, pipeline = self._pipeline.run_context.job, self._pipeline
        self._replica = AsyncStage(
            job.program,
            pipeline.plan(),
            pipeline.cut.captured,
            pipeline.parts,
            pipeline.seat(),
            pipeline.wire(),
            pipeline.whole,
            pipeline.layout,
            recorder=recorder,
            recompute=job.strategy.recompute,
        )
        return self._replica

    def drain(self) -> bool:
        """No further batch comes; whether the gradients that were left were finite."""
        return self._made.drain()

    def read_version(self, update: Version) -> Version:
        """How old the weights are of which an update is a gradient: those of the first stage, the oldest."""
        return self._pipeline.order.version(update * self._m, 0, self._workers)

    def notes(self) -> Mapping[str, str | int | float]:
        """All ranks ask for them together."""
        stale = self._pipeline.context.gather(self._made.staleness, "the others' staleness")
        return {
            "micro_batches": self._m,
            "parts": len(self._pipeline.cut.parts),
            "staleness_by_stage": ",".join(map(str, stale)),
        }

    @property
    def _made(self) -> AsyncStage:
        assert self._replica is not None, "the replica has not been made"
        return self._replica

    def _now(self) -> FlatState:
        """This rank's part of A as it is; until training begins A_0's."""
        if self._replica is not None and self._replica.begun:
            self.state.take(self._replica.weights)
        return self.state

    def _refuse_ties(self) -> None:
        for name in self._pipeline.cut.tied:
            if len(holders := self._pipeline.holders(name)) > 1:
                schedule = self._pipeline.run_context.job.strategy.schedule
                raise InputError(
                    f"schedule={schedule} moves the weights of each stage when its own "
                    f"gradient is there, but {name} lies on stages {', '.join(map(str, holders))}, whose gradients "
                    "come at different times; write schedule=1f1b, or cuts= so that one stage has it"
                )


class AsyncPipelineClient:
    """A and F, as far as there is anything to ask them.

    Args:
        around: what there is.
        share: of this rank; its replica has the weights.
        ahead: counts the steps as they begin, as the run's own allowance does when it hears of them.
        timeout_s: a pause that is not much shorter is announced, so that nobody takes it for a hang.
    """

    def __init__(self, around: ClientContext, share: AsyncStageShard, ahead: StepQuota, timeout_s: Seconds) -> None:
        self._around, self._share, self._ahead, self._timeout_s = around, share, ahead, timeout_s
        self._course, self._rows, self._replica = around.coordinator, share.rows, share.coordinate.replica
        self._granted = 0
        self.attempt: Clock = 0
        """Which step this replica is at."""

    def wait_for_grant(self) -> bool:
        """Whether it is to go on, by what is known so far: on all ranks the same."""
        if not self._granted:
            self._granted = self._ahead.grant(self._replica)
            self.attempt += bool(self._granted)
        return self._granted > 0 and not self._course.over

    def begins_delta(self) -> bool:
        return True

    def pull(self) -> FlatState:
        return self._around.state

    def ends_delta(self) -> bool:
        self._granted = 0
        return True

    def delta_buffer(self) -> FlatState:
        """For the running buffers."""
        return self._around.state

    def push(self, measured: Measured) -> None:
        self._say(StatusKind.delta, measured)
        while self._rows.due:
            self._hear()

    def leave(self) -> None:
        """The loop has ended: do what is left of the stream, and hear what is still to be heard."""
        if not self._share.drain():
            raise not_finite(float("nan"), self._replica, self.attempt)
        while self._rows.open:
            self._hear()
        while not self._course.over:
            self._say(StatusKind.farewell, Measured(0.0, 0, True))
            self._hear()

    def cancelled(self) -> bool:
        """Never: a step that has begun is made."""
        return False

    def ack_cancel(self) -> int:
        raise AssertionError("no attempt is called off")

    def pause(self, seconds: Seconds) -> None:
        """Be slow for so long, or until told to end."""
        excuse(self._around, seconds, self._timeout_s)
        self._around.stop_event.wait(seconds)

    def _say(self, kind: StatusKind, measured: Measured) -> None:
        around = self._around
        now = around.clock.now_ns()
        row = RankStatus(kind, measured.samples, measured.finite, around.stop_requested(), measured.loss, now)
        self._rows.begin(row, self.attempt)

    def _hear(self) -> None:
        around, began = self._around, time.monotonic_ns()
        rows = self._rows.take()
        around.metrics.waited(began, self.attempt)
        self._course.take(rows)
        around.after_exchange()

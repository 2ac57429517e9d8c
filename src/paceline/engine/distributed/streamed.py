"""A pipeline whose weights move within a stream, on several ranks: each moves its part of A by itself.

::

    rank 0   F3 B1 U1 | row 3 ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~.             | take the rows of step 3 - L
    rank 1   F3 B2 U2 | row 3 ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~+-> all rows  |  ...
    rank 2   F3 B3 U3 | row 3 ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~'             |

What they tell each other, so that all count alike and end at the same step, is a row a step, on its way while they go
on. It is taken L = ceil((p - 1) / m) + 1 steps later, which costs no waiting: the first rank ends step t + L with the
backward pass of micro-batch (t + L)·m + m - 1 - (p - 1), no earlier one than the last of step t, and that has come
through all the others; the step more is for what they do between it and the row. The others are further than the first.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor

from paceline.core.errors import InputError
from paceline.core.mesh import Mesh
from paceline.core.types import Clock, Version
from paceline.engine.distributed import rows
from paceline.engine.distributed.exchange import Meets, of_step
from paceline.engine.distributed.freight import Freight
from paceline.engine.distributed.rows import Row
from paceline.engine.distributed.share import Share
from paceline.engine.distributed.stages import merged
from paceline.engine.distributed.update import Update
from paceline.engine.team.gathering import ByParts
from paceline.engine.team.here import Here
from paceline.engine.team.pipeline import Pipeline
from paceline.engine.team.traffic import Traffic, ring_bytes
from paceline.replica.base import Replica
from paceline.replica.pipeline.streamed import Streamed
from paceline.replica.state import Layout, State
from paceline.trace.recorder import AnyRecorder

NOTHING = Layout((), ())
"""What is brought of Δ."""


@final
class StreamedExchange:
    """Where ranks tell each other rows without waiting.

    Args:
        mesh: of all ranks.
        rank: whose.
        traffic: by which they meet; None: nobody else is there.
        lag: L, how many steps after its own a row is due.
    """

    def __init__(self, mesh: Mesh, rank: int, traffic: Traffic | None, lag: int) -> None:
        self._mesh, self._rank, self._traffic, self._lag = mesh, rank, traffic, lag
        self._under_way: deque[tuple[Tensor, Any, Clock]] = deque()

    @property
    def due(self) -> bool:
        """Whether the oldest rows are to be taken."""
        return len(self._under_way) > self._lag

    @property
    def open(self) -> bool:
        """Whether any are under way."""
        return bool(self._under_way)

    def meet(self, row: Row, step: Clock) -> list[Row]:
        """Say this rank's and wait for the others'; none is under way."""
        self.begin(row, step)
        return self.take()

    def begin(self, row: Row, step: Clock) -> None:
        """Say this rank's."""
        table = torch.zeros(self._mesh.workers, rows.FIELDS, dtype=torch.float64)
        rows.write(row, table[self._rank])
        # Also beside NCCL they go by the host's memory: there nothing waits for the device.
        work = None if self._traffic is None else self._traffic.begin(table)
        self._under_way.append((table, work, step))

    def take(self) -> list[Row]:
        """The oldest: one row of each replica."""
        table, work, step = self._under_way.popleft()
        if self._traffic is not None:
            self._traffic.wait(work, of_step(step))
            self._traffic.sent_bytes += ring_bytes(table.nbytes, self._traffic.ranks)
        each = [rows.read(numbers) for numbers in table.tolist()]
        return [
            merged([each[rank] for rank in self._mesh.replica_ranks(replica)]) for replica in range(self._mesh.replicas)
        ]


@final
class Moved(Update):
    """The weights have moved already.

    Args:
        pipeline: says who has which part.
        now: this rank's part of A as it is.
        remembered: how many bytes the optimizer remembers of it.
        traffic: by which the parts are gathered; None: this one is all.
    """

    def __init__(
        self, pipeline: Pipeline, now: Callable[[], State], remembered: Callable[[], int], traffic: Traffic | None
    ) -> None:
        self._pipeline, self._now, self._remembered, self._traffic = pipeline, now, remembered, traffic

    @property
    def meeting(self) -> list[Tensor]:
        return []

    @property
    def optimizer_bytes(self) -> int:
        return self._remembered()

    def apply(self, factor: float, rate: float) -> None:
        """It was made when the gradient was there."""

    def whole(self, *, wanted: bool) -> State | None:
        """A as it is, of which later stages have had up to p - 1 updates more while the stream goes on.

        So it is what the formula of PipeDream computes with: w_0(t - p + 1), ..., w_{p-1}(t). After the end of the
        stream all stages have had the same updates.
        """
        pipeline = self._pipeline
        gather = ByParts(self._now(), pipeline.whole, pipeline.stages, pipeline.rank, self._traffic)
        return gather(wanted=wanted)


@final
class StreamedShare(Share):
    """One rank's."""

    def __init__(self, here: Here) -> None:
        self._pipeline = Pipeline(here)
        self._refuse_ties()
        self._replica: Streamed | None = None
        update = Moved(self._pipeline, self._now, lambda: self._made.optimizer_bytes, here.team.traffic)
        super().__init__(self._pipeline.place, self._pipeline.state, Freight(NOTHING, ranks=1), update)
        strategy = here.setup.job.strategy
        self._workers, self._m = strategy.stage_count, strategy.micro_batch_count
        lag = -(-(self._workers - 1) // self._m) + 1
        self.rows = StreamedExchange(self._pipeline.mesh, self._pipeline.rank, here.team.traffic, lag)

    @property
    def parameter_bytes(self) -> int:
        return self.state.layout.parameter_bytes

    @property
    def peak_saved_bytes(self) -> int | None:
        return self._made.peak_saved_bytes

    def exchange(self) -> Meets:
        return self.rows

    def replica(self, weigh: Callable[[int], float], recorder: AnyRecorder) -> Replica:
        del weigh  # each rank steps by itself
        job, pipeline = self._pipeline.setup.job, self._pipeline
        self._replica = Streamed(
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

    def reads(self, update: Version) -> Version:
        """How old the weights are of which an update is a gradient: those of the first stage, the oldest."""
        return self._pipeline.order.version(update * self._m, 0, self._workers)

    def rules(self) -> Mapping[str, str | int | float]:
        """All ranks ask for them together."""
        stale = self._pipeline.team.gather(self._made.staleness, "the others' staleness")
        return {
            "micro_batches": self._m,
            "parts": len(self._pipeline.cut.parts),
            "staleness_by_stage": ",".join(map(str, stale)),
        }

    @property
    def _made(self) -> Streamed:
        assert self._replica is not None, "the replica has not been made"
        return self._replica

    def _now(self) -> State:
        """This rank's part of A as it is; until training begins A_0's."""
        if self._replica is not None and self._replica.begun:
            self.state.take(self._replica.weights)
        return self.state

    def _refuse_ties(self) -> None:
        for name in self._pipeline.cut.tied:
            if len(holders := self._pipeline.holders(name)) > 1:
                schedule = self._pipeline.setup.job.strategy.schedule
                raise InputError(
                    f"schedule={schedule} moves the weights of each stage when its own "
                    f"gradient is there, but {name} lies on stages {', '.join(map(str, holders))}, whose gradients "
                    "come at different times; write schedule=1f1b, or cuts= so that one stage has it"
                )

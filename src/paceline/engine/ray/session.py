"""One run, as the server carries it: all that is asked of it, by replicas and by the driver, on one event loop.

::

    replica   first .................. push ............................ push
    server    begin: answer with A_0   decide; answer with A once released    ...    answer: training has ended

A call of a replica is answered when F releases that replica.
"""

import asyncio
import time
from collections.abc import Sequence

from paceline.core.types import Clock, Nanoseconds, ReplicaId, Seconds
from paceline.engine.base import Job, Progress
from paceline.engine.figures import Figures
from paceline.engine.ray.course import Course
from paceline.engine.ray.freight import Bytes
from paceline.engine.ray.lane import Lane
from paceline.engine.ray.messages import END, Reply, Report, Result, Standing
from paceline.engine.ray.training import Mates, Training


class Session:
    """What the server is asked in one run.

    Args:
        job: what is run.
        mates: the other actors.
    """

    def __init__(self, job: Job, mates: Mates) -> None:
        self._lanes = [Lane() for _ in range(job.strategy.replicas)]
        self._course = Course()
        self._training = Training(job, self._lanes, self._course, mates)
        self._task: asyncio.Task[None] | None = None

    # --------------------------------------------------------------------------------------- what replicas tell and ask

    async def ready(self, replica: ReplicaId) -> None:
        """A replica has built its model."""
        lane = self._lanes[replica]
        lane.ready, lane.dead = True, False
        self._course.guarded(lambda: self._training.joined(replica))
        self._course.tell()

    async def first(self, replica: ReplicaId) -> Reply:
        """Answered when a replica is sent A for the first time."""
        return await self._lanes[replica].ask()

    async def push(self, report: Report, *arrays: Bytes) -> Reply:
        """A Δ, or without one: the attempt that was called off has stopped; answered when the replica is released."""
        await self._training.room()
        if not self._training.expects(report):
            return END
        lane = self._lanes[report.replica]
        answer, lane.figures = lane.ask(), report.figures
        self._course.guarded(lambda: self._training.take(report, arrays))
        return await answer

    async def excuse(self, replica: ReplicaId, seconds: Seconds) -> None:
        """Nothing will be heard of a replica for so long: it is in a delay that was asked for."""
        self._lanes[replica].excused_s = self._course.now() + seconds

    async def done(self, replica: ReplicaId, figures: Figures, step_times: Sequence[Seconds]) -> None:
        """A replica's loop has ended."""
        lane = self._lanes[replica]
        lane.figures, lane.step_times = figures, [*step_times]
        self._course.guarded(lambda: self._training.done(replica))
        lane.finished = True
        self._course.stir()

    async def clock(self) -> Nanoseconds:
        """What time it is here."""
        return time.monotonic_ns()

    # --------------------------------------------------------------------------------------------- what the driver asks

    async def begin(self) -> None:
        """All are ready."""
        self._task = asyncio.ensure_future(self._training.run())

    async def interrupt(self) -> None:
        """End training with what there is."""
        self._course.give_over()
        if self._task is None:
            await self.begin()

    async def lost(self, replica: ReplicaId, reason: str, replaced: bool) -> tuple[Clock, int] | None:
        """A replica has died; where another takes its place: which attempts and micro-steps were its own."""
        lane = self._lanes[replica]
        again = self._training.lost(replica, reason, replaced=replaced)
        self._course.stir()
        return (lane.attempt, lane.micro_steps) if again else None

    async def stand(self) -> Standing:
        """How the run stands; answered at the next change, and at least every tick."""
        await self._course.changed()
        course, waiting = self._course, tuple(r for r, lane in enumerate(self._lanes) if not lane.ready)
        if course.phase == "starting":
            progress = Progress("starting", 1 - len(waiting) / len(self._lanes))
        else:
            progress = self._training.progress()
        return Standing(course.phase, progress, course.failure, waiting)

    async def result(self, late: Sequence[ReplicaId], interrupted: bool) -> Result:
        """What the run has come to, also where it is broken off here; ``late`` did not end in time."""
        if self._course.phase in ("starting", "training"):
            self._training.finish()
        self._break_off()
        return self._training.result(late, interrupted=interrupted)

    def close(self) -> None:
        """Let go of everything."""
        self._break_off()
        self._training.close()

    def _break_off(self) -> None:
        """Leave what is not done."""
        self._training.break_off()
        if self._task is not None:
            self._task.cancel()

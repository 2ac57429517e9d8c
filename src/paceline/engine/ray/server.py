"""The server's actor: a session for each run, and the way from there to the other actors.

The server's actor: a session for each run, and the way from there to the other actors.
"""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Sequence
from typing import Any

import ray
import torch

from paceline.comm.linux import keep_freed_memory
from paceline.core.records import Record
from paceline.core.types import Clock, Nanoseconds, ReplicaId, Seconds
from paceline.engine.base import Job, Progress
from paceline.engine.evaluation import SnapshotInfo
from paceline.engine.ray.evaluation import LostError
from paceline.engine.ray.executor import ReplicaRecord
from paceline.engine.ray.messages import (
    END,
    Bytes,
    RayCompletion,
    Reply,
    Result,
    RunStatus,
    WorkerLocation,
    arrays_of,
    unpack,
)
from paceline.engine.ray.replica import place
from paceline.engine.ray.server_loop import PeerActors, RunState, ServerLoop
from paceline.engine.worker_metrics import Figures
from paceline.replica.flat_state import FlatState


class Session:
    """What the server is asked in one run.

    Args:
        job: what is run.
        mates: the other actors.
    """

    def __init__(self, job: Job, mates: PeerActors) -> None:
        self._lanes = [ReplicaRecord() for _ in range(job.strategy.replicas)]
        self._course = RunState()
        self._training = ServerLoop(job, self._lanes, self._course, mates)
        self._task: asyncio.Task[None] | None = None

    # --------------------------------------------------------------------------------------- what replicas tell and ask

    async def ready(self, replica: ReplicaId) -> None:
        """A replica has built its model."""
        lane = self._lanes[replica]
        lane.ready, lane.dead = True, False
        self._course.guarded(lambda: self._training.joined(replica))
        self._course.notify()

    async def first(self, replica: ReplicaId) -> Reply:
        """Answered when a replica is sent A for the first time."""
        return await self._lanes[replica].ask()

    async def push(self, report: RayCompletion, *arrays: Bytes) -> Reply:
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
        self._course.wake()

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
        self._course.wake()
        return (lane.attempt, lane.micro_steps) if again else None

    async def stand(self) -> RunStatus:
        """How the run stands; answered at the next change, and at least every tick."""
        await self._course.changed()
        course, waiting = self._course, tuple(r for r, lane in enumerate(self._lanes) if not lane.ready)
        if course.phase == "starting":
            progress = Progress("starting", 1 - len(waiting) / len(self._lanes))
        else:
            progress = self._training.progress()
        return RunStatus(course.phase, progress, course.failure, waiting)

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


CONTROL = "control"
"""The concurrency group of what is called on a replica that computes."""


class Handles:
    """The other actors of a run.

    Args:
        run: which run of its engine.
        replicas: their handles.
        scorer: its handle.
    """

    def __init__(self, run: int, replicas: Sequence[Any], scorer: Any) -> None:
        self._run, self._replicas, self._scorer = run, list(replicas), scorer

    def replace(self, replica: ReplicaId, handle: Any) -> None:
        """Another actor takes the place of one that has died."""
        self._replicas[replica] = handle

    def cancel(self, replica: ReplicaId, attempt: Clock) -> None:
        self._replicas[replica].cancel.options(concurrency_group=CONTROL).remote(self._run, attempt)

    def end(self, replica: ReplicaId) -> None:
        if replica < len(self._replicas):  # there are fewer where Ctrl-C came while they started
            self._replicas[replica].end.options(concurrency_group=CONTROL).remote(self._run)

    async def score(self, info: SnapshotInfo, state: FlatState) -> Record | bytes:
        answer: Awaitable[Record | bytes] = self._scorer.score.remote(info, *arrays_of(state))
        try:
            return await answer
        except ray.exceptions.RayError as error:
            raise LostError from error


class ServerActor:
    """Carries one session after the other."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        keep_freed_memory()
        self._session: Session | None = None
        self._handles: Handles | None = None

    async def place(self) -> WorkerLocation:
        """Where it lives."""
        return place()

    async def open(self, run: int, parts: Sequence[Bytes], replicas: Sequence[Any], scorer: Any) -> None:
        """A run begins."""
        self._handles = Handles(run, replicas, scorer)
        self._session = Session(unpack(parts), self._handles)

    async def replaced(self, replica: ReplicaId, handle: Any) -> None:
        """Another actor takes the place of one that has died."""
        assert self._handles is not None, "no run is open"
        self._handles.replace(replica, handle)

    async def ask(self, what: str, *args: Any) -> Any:
        """Call a method of the session."""
        assert self._session is not None, f"{what}: no run is open"
        answer = getattr(self._session, what)(*args)
        return await answer if inspect.isawaitable(answer) else answer

    async def close(self) -> None:
        """The run has ended."""
        if self._session is not None:
            self._session.close()
        self._session = self._handles = None

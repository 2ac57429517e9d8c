"""The server's actor: a session for each run, and the server's calls of the other actors.

::

    replica   first .................. push ............................ push
    server    begin: answer with A_0   decide; answer with A once released    ...    answer: training has ended

A call of a replica is answered when F releases that replica.
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
from paceline.engine.ray.evaluation_actor import LostError
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
from paceline.engine.ray.replica import own_location
from paceline.engine.ray.server_loop import PeerActors, RunState, ServerLoop
from paceline.engine.worker_metrics import Figures
from paceline.replica.flat_state import FlatState


class Session:
    """The server of one run, as replicas and the driver call it.

    Args:
        job: what is run.
        peers: the other actors.
    """

    def __init__(self, job: Job, peers: PeerActors) -> None:
        self._replicas = [ReplicaRecord() for _ in range(job.strategy.replicas)]
        self._run = RunState()
        self._loop = ServerLoop(job, self._replicas, self._run, peers)
        self._task: asyncio.Task[None] | None = None

    # ----------------------------------------------------------------------------------------------- calls of replicas

    async def ready(self, replica: ReplicaId) -> None:
        """Note that a replica has built its model."""
        record = self._replicas[replica]
        record.ready, record.dead = True, False
        self._run.guarded(lambda: self._loop.joined(replica))
        self._run.notify()

    async def first(self, replica: ReplicaId) -> Reply:
        """Return the first grant of a replica, once there is one."""
        return await self._replicas[replica].wait()

    async def push(self, completion: RayCompletion, *arrays: Bytes) -> Reply:
        """Take a Δ, or without arrays the end of a cancelled attempt; return the next grant, once there is one."""
        await self._loop.room()
        if not self._loop.expects(completion):
            return END
        record = self._replicas[completion.replica]
        # The future comes first: the decision on this Δ may reply to it at once.
        reply, record.figures = record.wait(), completion.figures
        self._run.guarded(lambda: self._loop.take(completion, arrays))
        return await reply

    async def excuse(self, replica: ReplicaId, seconds: Seconds) -> None:
        """Note a delay that the job asked for: the replica pushes nothing meanwhile."""
        self._replicas[replica].excused_s = self._run.now() + seconds

    async def done(self, replica: ReplicaId, figures: Figures, step_times: Sequence[Seconds]) -> None:
        """Note that a replica's loop has ended."""
        record = self._replicas[replica]
        record.figures, record.step_times = figures, [*step_times]
        self._run.guarded(lambda: self._loop.done(replica))
        record.finished = True
        self._run.wake()

    async def clock(self) -> Nanoseconds:
        """Return the time of this host's clock."""
        return time.monotonic_ns()

    # --------------------------------------------------------------------------------------------- calls of the driver

    async def begin(self) -> None:
        """Begin training, once all replicas are ready."""
        self._task = asyncio.ensure_future(self._loop.run())

    async def interrupt(self) -> None:
        """End training with what there is."""
        self._run.give_over()
        if self._task is None:
            await self.begin()

    async def lost(self, replica: ReplicaId, reason: str, replaced: bool) -> tuple[Clock, int] | None:
        """Note that a replica has died; return its attempts and micro-steps where another is to replace it."""
        record = self._replicas[replica]
        again = self._loop.lost(replica, reason, replaced=replaced)
        self._run.wake()
        return (record.attempt, record.micro_steps) if again else None

    async def stand(self) -> RunStatus:
        """Return the state of the run, at its next change or after a tick."""
        await self._run.changed()
        run, waiting = self._run, tuple(r for r, record in enumerate(self._replicas) if not record.ready)
        if run.phase == "starting":
            progress = Progress("starting", 1 - len(waiting) / len(self._replicas))
        else:
            progress = self._loop.progress()
        return RunStatus(run.phase, progress, run.failure, waiting)

    async def result(self, late: Sequence[ReplicaId], interrupted: bool) -> Result:
        """Return the result, also where the run is broken off now; the replicas ``late`` did not end in time."""
        if self._run.phase in ("starting", "training"):
            self._loop.finish()
        self._break_off()
        return self._loop.result(late, interrupted=interrupted)

    def close(self) -> None:
        """Break the run off and release its resources."""
        self._break_off()
        self._loop.close()

    def _break_off(self) -> None:
        self._loop.break_off()
        if self._task is not None:
            self._task.cancel()


CONTROL = "control"
"""The concurrency group of calls to a replica that computes."""


class Handles:
    """The other actors of a run.

    Args:
        run: number of the run of its engine.
        replicas: their handles.
        scorer: handle of the evaluator.
    """

    def __init__(self, run: int, replicas: Sequence[Any], scorer: Any) -> None:
        self._run, self._replicas, self._scorer = run, list(replicas), scorer

    def replace(self, replica: ReplicaId, handle: Any) -> None:
        """Call this actor from now on in place of one that has died."""
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
    """The server's actor, kept from run to run."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        keep_freed_memory()
        self._session: Session | None = None
        self._handles: Handles | None = None

    async def place(self) -> WorkerLocation:
        """Return the location of this actor."""
        return own_location()

    async def open(self, run: int, parts: Sequence[Bytes], replicas: Sequence[Any], scorer: Any) -> None:
        """Open the session of a run."""
        self._handles = Handles(run, replicas, scorer)
        self._session = Session(unpack(parts), self._handles)

    async def replaced(self, replica: ReplicaId, handle: Any) -> None:
        """Call this actor from now on in place of one that has died."""
        assert self._handles is not None, "no run is open"
        self._handles.replace(replica, handle)

    async def ask(self, method: str, *args: Any) -> Any:
        """Call a method of the session."""
        assert self._session is not None, f"{method}: no run is open"
        answer = getattr(self._session, method)(*args)
        return await answer if inspect.isawaitable(answer) else answer

    async def close(self) -> None:
        """Close the session."""
        if self._session is not None:
            self._session.close()
        self._session = self._handles = None

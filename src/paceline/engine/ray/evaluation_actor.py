"""Evaluation in an actor: the server's side, which awaits one record after the other, and the actor."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence

from paceline.core.errors import SCORER, WorkerError, encode_failure, failure_text
from paceline.core.records import Record
from paceline.engine.base import Job
from paceline.engine.evaluation import EvaluationQueue, Evaluator, SnapshotInfo, become_evaluator
from paceline.engine.ray.messages import Bytes, WorkerLocation, state_of, unpack
from paceline.engine.ray.replica import own_location
from paceline.replica.flat_state import FlatLayout, FlatState


class LostError(Exception):
    """The evaluator's actor has ended."""


class RayEvaluation:
    """The queue of snapshots and the task that has them evaluated; if the actor is lost, the server evaluates the rest.

    Args:
        job: of the run.
        remote: evaluates a snapshot in the actor; a failure of the user's code comes back as bytes.
        keep: takes the records.
        fail: takes what was raised.
        snapshot_bytes: size of one snapshot.
    """

    def __init__(
        self,
        job: Job,
        remote: Callable[[SnapshotInfo, FlatState], Awaitable[Record | bytes]],
        keep: Callable[[list[Record]], None],
        fail: Callable[[BaseException], None],
        snapshot_bytes: int,
    ) -> None:
        self._timeout_s, self._remote, self._keep, self._fail = job.timeout_s, remote, keep, fail
        self.queue = EvaluationQueue(job.program, snapshot_bytes)
        self._lost = False
        self._task: asyncio.Task[None] | None = None
        self._evaluated = asyncio.Event()

    def hand_in(self, state: FlatState, info: SnapshotInfo) -> None:
        """Queue a state that no one will write to."""
        self.queue.add(state, info)
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._evaluate_all())

    async def wait_for_room(self) -> None:
        """Wait until a snapshot has been evaluated."""
        self._evaluated.clear()
        await self._evaluated.wait()

    async def drain(self) -> None:
        """Wait until all snapshots are evaluated."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def close(self) -> None:
        """Drop what is not evaluated."""
        if self._task is not None:
            self._task.cancel()

    async def _evaluate_all(self) -> None:
        snapshots = self.queue.snapshots
        try:
            while snapshots:
                self._keep([await self._record(*snapshots[0])])
                snapshots.popleft()
                self._evaluated.set()
        except Exception as error:
            self._fail(error)
        finally:
            self._evaluated.set()

    async def _record(self, state: FlatState, info: SnapshotInfo) -> Record:
        if not self._lost:
            try:
                answer = await asyncio.wait_for(self._remote(info, state), self._timeout_s)
            except (LostError, TimeoutError):
                self._lost = True
            else:
                if isinstance(answer, bytes):
                    raise WorkerError(failure_text(json.loads(answer)))
                return answer
        # In a thread: the server goes on taking Δs meanwhile.
        return await asyncio.to_thread(self.queue.evaluate, state, info)


class EvaluatorActor:
    """Evaluates the snapshots of one run after the other.

    Args:
        idle_only: use only idle cores; not where runs wait for a record.
    """

    def __init__(self, idle_only: bool) -> None:
        become_evaluator(idle_only=idle_only)
        self._job: Job | None = None
        self._evaluator: tuple[FlatLayout, Evaluator] | None = None

    def place(self) -> WorkerLocation:
        """Return the process and the node of this actor."""
        return own_location()

    def open(self, parts: Sequence[Bytes]) -> None:
        """Begin a run."""
        self._job, self._evaluator = unpack(parts), None

    def close(self) -> None:
        """End the run."""
        self._job = self._evaluator = None

    def score(self, info: SnapshotInfo, *arrays: Bytes) -> Record | bytes:
        """Return the record of one snapshot, or what the user's code raised."""
        assert self._job is not None, "no run is open"
        try:
            if self._evaluator is None:
                module = self._job.program.build()
                layout = FlatLayout.of(module, self._job.running_buffers)
                self._evaluator = layout, Evaluator(self._job.program, module)
            layout, evaluator = self._evaluator
            return evaluator.score(state_of(layout, arrays), info)
        except BaseException as error:
            return encode_failure(SCORER, error)

"""Where the server hands in snapshots of A for scoring, and records come back.

The actor that scores snapshots, off the training path.
"""

import asyncio
import contextlib
import json
import os
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

import torch

from paceline.core.errors import WorkerError
from paceline.core.records import Record
from paceline.engine.base import Job
from paceline.engine.evaluation import Evaluator, SnapshotInfo, room
from paceline.engine.ray.messages import Bytes, WorkerLocation, state_of, unpack
from paceline.engine.ray.replica import place
from paceline.engine.remote_errors import SCORER, failure, worker_failed
from paceline.replica.flat_state import FlatLayout, FlatState


class LostError(Exception):
    """The scorer is no more."""


class RayEvaluationQueue:
    """What is still to be scored, one snapshot after the other; where the scorer is lost, the server scores the rest.

    Args:
        job: of the run.
        ask: has the scorer score a snapshot; a failure of the user's code comes back as bytes.
        keep: takes a record.
        fail: told of what was raised.
        nbytes: of one snapshot.
    """

    def __init__(
        self,
        job: Job,
        ask: Callable[[SnapshotInfo, FlatState], Awaitable[Record | bytes]],
        keep: Callable[[Record], None],
        fail: Callable[[BaseException], None],
        nbytes: int,
    ) -> None:
        self._job, self._ask, self._keep, self._fail = job, ask, keep, fail
        self._queue: deque[tuple[SnapshotInfo, FlatState]] = deque()
        self._room = room(nbytes)
        self._task: asyncio.Task[None] | None = None
        self._less = asyncio.Event()
        self._own: Evaluator | None = None

    @property
    def full(self) -> bool:
        """Whether the run has to wait for the scorer."""
        return len(self._queue) >= self._room

    def hand_in(self, state: FlatState, moment: SnapshotInfo) -> None:
        """Have a state scored that nobody will write to."""
        self._queue.append((moment, state))
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._work())

    async def one_less(self) -> None:
        """Wait until a snapshot has been scored."""
        self._less.clear()
        await self._less.wait()

    async def drained(self) -> None:
        """Wait until all are scored."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def close(self) -> None:
        """Leave what is not scored."""
        if self._task is not None:
            self._task.cancel()

    async def _work(self) -> None:
        try:
            while self._queue:
                moment, state = self._queue[0]
                self._keep(await self._scored(moment, state))
                self._queue.popleft()
                self._less.set()
        except Exception as error:
            self._fail(error)
        finally:
            self._less.set()

    async def _scored(self, moment: SnapshotInfo, state: FlatState) -> Record:
        if self._own is None:
            try:
                answer = await asyncio.wait_for(self._ask(moment, state), self._job.timeout_s)
            except (LostError, TimeoutError):  # it has died, or says nothing
                self._own = Evaluator(self._job.program, self._job.program.build())
            else:
                if isinstance(answer, bytes):
                    raise WorkerError(worker_failed(json.loads(answer)))
                return answer
        return await asyncio.to_thread(self._own.score, state, moment)


class EvaluatorActor:
    """Scores the snapshots of one run after the other.

    Args:
        patient: use only idle cores; not where runs wait for a score.
    """

    def __init__(self, patient: bool) -> None:
        torch.set_num_threads(1)
        if patient:
            # Only cycles that nobody else wants, so that scoring never bends the timing of the replicas.
            with contextlib.suppress(OSError, AttributeError):
                os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        self._job: Job | None = None
        self._scorer: tuple[FlatLayout, Evaluator] | None = None

    def place(self) -> WorkerLocation:
        """Where it lives."""
        return place()

    def open(self, parts: Sequence[Bytes]) -> None:
        """A run begins."""
        self._job, self._scorer = unpack(parts), None

    def close(self) -> None:
        """It has ended."""
        self._job = self._scorer = None

    def score(self, moment: SnapshotInfo, *arrays: Bytes) -> Record | bytes:
        """The record of one snapshot, or what the user's code raised."""
        assert self._job is not None, "no run is open"
        try:
            if self._scorer is None:
                module = self._job.program.build()
                self._scorer = FlatLayout.of(module, self._job.running_buffers), Evaluator(self._job.program, module)
            layout, scorer = self._scorer
            return scorer.score(state_of(layout, arrays), moment)
        except BaseException as error:
            return failure(SCORER, error)

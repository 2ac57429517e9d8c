"""Evaluation in another process: the server's side, which awaits one record after the other, and the other end."""

import asyncio
import json
from collections.abc import Awaitable, Callable

from paceline.core.errors import SCORER, WorkerError, encode_failure, failure_text
from paceline.core.records import Record
from paceline.engine.base import Job
from paceline.engine.evaluation import EvaluationQueue, Evaluator, SnapshotInfo, become_evaluator
from paceline.engine.server.messages import Bytes, arrays_of, state_of
from paceline.engine.server.peer import Peer, PeerError
from paceline.replica.flat_state import FlatLayout, FlatState


class ServerEvaluation:
    """The queue of snapshots and the task that has them evaluated; if the other process is lost, the server
    evaluates the rest, as it does all where there is no other process.

    Args:
        job: of the run.
        queue: of snapshots.
        scorer: has an :class:`EvaluatorHost`; None: there is none.
        keep: takes the record of the first snapshot of the queue, and removes it there.
        fail: takes what was raised.
        whole: returns all of an A of which the queue has a slice.
    """

    def __init__(
        self,
        job: Job,
        queue: EvaluationQueue,
        scorer: Peer | None,
        keep: Callable[[Record], None],
        fail: Callable[[BaseException], None],
        whole: Callable[[FlatState], Awaitable[FlatState]],
    ) -> None:
        self._timeout_s, self.queue, self._scorer, self._keep, self._fail = job.timeout_s, queue, scorer, keep, fail
        self._whole = whole
        self.task: asyncio.Task[None] | None = None
        """Evaluates what is queued; None: nothing was."""
        self.evaluated = asyncio.Event()
        """Set when a snapshot has been evaluated; cleared by the waiter for room in the queue."""

    def begin(self) -> None:
        """Evaluate what is queued, states that no one will write to."""
        if self.task is None or self.task.done():
            self.task = asyncio.ensure_future(self._evaluate_all())

    async def _evaluate_all(self) -> None:
        snapshots = self.queue.snapshots
        try:
            while snapshots:
                part, info = snapshots[0]
                state = await self._whole(part)
                answer: Record | bytes | None = None
                if self._scorer is not None:
                    try:
                        score: Awaitable[Record | bytes] = self._scorer.call("score", info, *arrays_of(state))
                        answer = await asyncio.wait_for(score, self._timeout_s)
                    except (PeerError, TimeoutError):
                        self._scorer = None
                if isinstance(answer, bytes):
                    raise WorkerError(failure_text(json.loads(answer)))
                if answer is None:  # in a thread: the server goes on taking Δs meanwhile
                    answer = await asyncio.to_thread(self.queue.evaluate, state, info)
                self._keep(answer)
                self.evaluated.set()
        except Exception as error:
            self._fail(error)
        finally:
            self.evaluated.set()


class EvaluatorHost:
    """Evaluates the snapshots of one run after the other.

    Args:
        idle_only: use only idle cores; not where runs wait for a record.
    """

    def __init__(self, idle_only: bool) -> None:
        become_evaluator(idle_only=idle_only)
        self._job: Job | None = None
        self._evaluator: tuple[FlatLayout, Evaluator] | None = None

    def prepare(self, job: Job) -> None:
        """Begin a run."""
        self._job, self._evaluator = job, None

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

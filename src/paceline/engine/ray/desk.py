"""Where the server hands in snapshots of A for scoring, and records come back."""

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable

from paceline.core.errors import WorkerError
from paceline.core.records import Record
from paceline.engine.base import Job
from paceline.engine.failure import worker_failed
from paceline.engine.scoring import Moment, Scorer, room
from paceline.replica.state import State


class LostError(Exception):
    """The scorer is no more."""


class Desk:
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
        ask: Callable[[Moment, State], Awaitable[Record | bytes]],
        keep: Callable[[Record], None],
        fail: Callable[[BaseException], None],
        nbytes: int,
    ) -> None:
        self._job, self._ask, self._keep, self._fail = job, ask, keep, fail
        self._queue: deque[tuple[Moment, State]] = deque()
        self._room = room(nbytes)
        self._task: asyncio.Task[None] | None = None
        self._less = asyncio.Event()
        self._own: Scorer | None = None

    @property
    def full(self) -> bool:
        """Whether the run has to wait for the scorer."""
        return len(self._queue) >= self._room

    def hand_in(self, state: State, moment: Moment) -> None:
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

    async def _scored(self, moment: Moment, state: State) -> Record:
        if self._own is None:
            try:
                answer = await asyncio.wait_for(self._ask(moment, state), self._job.timeout_s)
            except (LostError, TimeoutError):  # it has died, or says nothing
                self._own = Scorer(self._job.program, self._job.program.build())
            else:
                if isinstance(answer, bytes):
                    raise WorkerError(worker_failed(json.loads(answer)))
                return answer
        return await asyncio.to_thread(self._own.score, state, moment)

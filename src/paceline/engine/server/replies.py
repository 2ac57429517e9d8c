"""What a server tells replicas: each is answered once the policy releases it, and may be stopped meanwhile."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence

from paceline.core.types import Clock, ReplicaId
from paceline.engine.server.messages import END, Reply
from paceline.engine.server.peer import Notified
from paceline.engine.server.run_control import BackgroundTasks
from paceline.engine.server.server_state import ServerState


class Replies:
    """The next grants of all replicas, as they become known.

    Args:
        state: of the run.
        settled: waits until what is known may be told.
    """

    def __init__(self, state: ServerState, settled: Callable[[], Awaitable[None]]) -> None:
        self._state, self._settled = state, settled
        self._replied = [asyncio.Event() for _ in state.records]
        state.executor.replied = self.wake

    def wake(self, replica: ReplicaId) -> None:
        """Have a replica be answered, if its reply is there now, or it is another process."""
        self._replied[replica].set()

    async def after(self, replica: ReplicaId, incarnation: int, attempt: Clock) -> Reply:
        """Return the grant after an attempt, or the end, once it is there and may be told."""
        record, replied = self._state.records[replica], self._replied[replica]
        while incarnation >= record.incarnation:  # a server that follows may not know of the newest yet
            if incarnation == record.incarnation and (reply := record.reply_after(attempt)) is not None:
                await self._settled()
                return reply
            replied.clear()
            await replied.wait()
        return END  # another has taken its place, or the run goes on without it


class ReplicaProcesses:
    """The processes of the replicas, which are told to stop once that may be told.

    Args:
        run: number of the run.
        processes: those that take part at first; fewer than there are records where Ctrl-C came while they started.
        state: of the run.
        settled: as of :class:`Replies`.
    """

    def __init__(
        self, run: int, processes: Sequence[Notified], state: ServerState, settled: Callable[[], Awaitable[None]]
    ) -> None:
        self._run, self._records, self._settled = run, state.records, settled
        self._processes: list[Notified | None] = [*processes, *[None] * (len(state.records) - len(processes))]
        self._tasks = BackgroundTasks()

    def replaced(self, replica: ReplicaId, process: Notified) -> None:
        """Tell this process from now on in place of one that has died."""
        self._processes[replica] = process

    def cancel(self, replica: ReplicaId) -> None:
        """Have a replica stop its attempt."""
        self._tell(replica, self._records[replica].attempt)

    def end(self) -> None:
        """Have all stop their training."""
        for replica in range(len(self._processes)):
            self._tell(replica, math.inf)

    def _tell(self, replica: ReplicaId, attempt: float) -> None:
        process = self._processes[replica]

        async def tell(process: Notified) -> None:
            await self._settled()
            process.tell("cancel", self._run, attempt)

        if process is not None:
            self._tasks.start(tell(process))

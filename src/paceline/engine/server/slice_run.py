"""The run at a server that has a slice of A, and does what the first server does, event for event."""

import asyncio
import socket
from collections.abc import Sequence
from typing import Any

from paceline.core.errors import PacelineError
from paceline.core.types import Clock, ReplicaId
from paceline.engine.base import Job
from paceline.engine.server import messages
from paceline.engine.server.executor import ServerShare
from paceline.engine.server.other_servers import OBSERVE, PACK, FirstServerLink, event_of_json
from paceline.engine.server.push_stream import PushListener
from paceline.engine.server.replies import Replies
from paceline.engine.server.run_control import BackgroundTasks
from paceline.engine.server.server_state import ServerState
from paceline.engine.server.wire import Listener, StreamAddress


class SliceRun:
    """One run at such a server, as replicas and the first server call it.

    Args:
        job: what is run.
        servers: of the run.
        number: of this one; the first is 0.
        replicas: that take part at first; None: all.
        packed: the slice, where the run goes on with a checkpoint.
        address: of the interface that it listens at.
    """

    def __init__(
        self, job: Job, servers: int, number: int, replicas: int | None, packed: messages.Bytes | None, address: str
    ) -> None:
        self._first = FirstServerLink(job.timeout_s, self._take)
        share = ServerShare(servers, number, self._first.summed)
        self._state = state = ServerState(job, None, replicas, share, packed)
        self._replies = Replies(state, _at_once)
        executor = state.executor
        self._pushes = PushListener.of(state.context, executor.part, self.push, executor.allocate)
        self._listener = Listener(address, self._serve)
        self._staged: dict[ReplicaId, tuple[Clock, Sequence[messages.Bytes], bool]] = {}
        """Slices of Δs that the first server has not decided on: attempt, arrays, whether the replica lends them."""
        self._taken = 0
        """Events and requests of the first server so far."""
        self._changed = asyncio.Condition()
        self._failure = ""
        """Of the newest event that has failed."""
        self._tasks = BackgroundTasks()
        self._over = asyncio.Event()

    async def _serve(self, connection: socket.socket, hello: Any) -> None:
        if "first" in hello:
            await self._first.serve(connection, hello["first"])
        else:
            await self._pushes.serve(connection, hello["memory"])

    # ----------------------------------------------------------------------------------------------- calls of replicas

    async def stream(self) -> StreamAddress | None:
        """Return where replicas and the first server connect; None: they can't."""
        return self._listener.address()

    async def first(self, replica: ReplicaId, incarnation: int, attempt: Clock) -> messages.Reply:
        """Return the first grant after this attempt, once there is one."""
        return await self._replies.after(replica, incarnation, attempt)

    async def push(
        self, completion: messages.PushCompletion, refs: Sequence[Any], *arrays: messages.Bytes, lent: bool = False
    ) -> messages.Reply:
        """Keep the slice of a Δ until the first server decides on it; return the next grant, once there is one."""
        del refs
        replica, incarnation, attempt, *_ = completion
        if arrays:
            if self._state.takes(replica, incarnation, attempt):
                self._staged[replica] = attempt, arrays, lent
            self._first.staged(
                replica, incarnation, attempt
            )  # the first waits for this, also where it takes it no more
        return await self._replies.after(replica, incarnation, attempt)

    # ------------------------------------------------------------------------------------- calls of the first server

    async def ended(self) -> None:
        """Return when the run ends; a call that fails before has lost its server."""
        await self._over.wait()

    async def snapshot(self, after: int) -> list[messages.Bytes]:
        """Return the slice of the oldest A that is to be evaluated, after so many events."""
        await self._until(after)
        return messages.arrays_of(self._state.queue.snapshots[0][0])

    async def newest(self, after: int) -> list[messages.Bytes]:
        """Return the slice of A, after so many events."""
        await self._until(after)
        return messages.arrays_of(self._state.executor.owner.state)

    async def optimizer_bytes(self) -> int:
        """Return the size of this slice of the optimizer's state."""
        return self._state.executor.owner.flat_optimizer.nbytes

    def close(self) -> None:
        """End the run."""
        self._over.set()
        self._listener.close()
        self._state.executor.spans.close()

    async def _until(self, taken: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._taken >= taken)

    # ----------------------------------------------------------------------------------------------------------- events

    def _take(self, event: str, args: list[Any], counts: tuple[int, int]) -> None:
        """Take an event or a request of the first server."""
        state = self._state
        if counts != state.counts():
            raise PacelineError(
                f"it has counted {state.counts()} updates and Δs where the first server has {counts}: a policy must "
                f"decide by its arguments alone. {self._failure}"
            )
        if event == PACK:
            self._first.send_packed(state.executor.packed())
        elif event == OBSERVE:
            self._observe(*args)
        else:
            try:
                self._change(event, event_of_json(event, args))
            except PacelineError as error:
                self._failure = str(error)  # the first server has it as well, and ends the run
        self._taken += 1
        self._tasks.start(self._notify())

    def _observe(self, replica: ReplicaId) -> None:
        """Add up, with the other servers, what a policy asks of a Δ."""
        _, arrays, _ = self._staged[replica]
        executor = self._state.executor
        executor.statistics.observe(executor.delta_of(arrays), 0.0)

    def _change(self, event: str, args: list[Any]) -> None:
        """Have the state take an event."""
        state = self._state
        if event == "arrived":
            completion: messages.PushCompletion = args[0]
            attempt, arrays, lent = self._staged.pop(completion.replica)
            if attempt != completion.attempt:
                raise PacelineError(f"attempt {completion.attempt} was decided on, but {attempt} is here")
            if lent:
                state.executor.lent[completion.replica] = attempt
            state.arrived(completion, args[1], args[2], arrays)
            return
        if event in ("cancelled", "lost"):
            self._staged.pop(args[0], None)
        getattr(state, event)(*args)
        if event == "lost":
            self._replies.wake(args[0])

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


async def _at_once() -> None:
    """Wait for nothing."""

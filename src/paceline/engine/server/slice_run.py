"""The run at a server that has a slice of A, and does what the first server does, event for event.

A standby of any server, the first one included, is such a server, too: it has the same slice, which its server sends
it. One of the first server takes over from it; others are only asked instead.
"""

import asyncio
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from paceline.core.errors import PacelineError
from paceline.core.types import Clock, ReplicaId
from paceline.engine.base import Job
from paceline.engine.own_states import own_bytes
from paceline.engine.server import messages
from paceline.engine.server.executor import ServerShare
from paceline.engine.server.first_server_link import (
    OBSERVE,
    PACK,
    FirstServerLink,
    FrameLog,
    Staging,
    event_of_json,
)
from paceline.engine.server.messages import FIRSTS_STANDBY, Member
from paceline.engine.server.push_stream import PushListener, SliceForwarder, connect_forwarder
from paceline.engine.server.replies import Replies
from paceline.engine.server.server_mesh import ServerMesh
from paceline.engine.server.server_state import ServerState
from paceline.engine.server.wire import Listener, StreamAddress


class _Staged(NamedTuple):
    """A slice of a Δ that the first server has not decided on."""

    incarnation: int
    arrays: Sequence[messages.Bytes]
    lent: bool
    """Whether the replica writes the arrays again once it has its next grant."""


class SliceRun:
    """One run at such a server, as replicas and the first server call it.

    Args:
        job: what is run.
        servers: of the run.
        member: which of them this is.
        replicas: that take part at first; None: all.
        packed: the slice, where the run goes on with a checkpoint.
        address: of the interface that it listens at.
    """

    def __init__(
        self,
        job: Job,
        servers: int,
        member: Member,
        replicas: int | None,
        packed: messages.Bytes | None,
        address: str,
    ) -> None:
        self.mesh = mesh = ServerMesh(servers, member, job.timeout_s)
        stands = member == FIRSTS_STANDBY
        self._first = FirstServerLink(self._take, self._notify, mesh.close, self._stagings, stands=stands)
        share = ServerShare(servers, member.number, self.mesh.summed)
        self._state = state = ServerState(job, None, replicas, share, packed)
        self._replies = Replies(state, _at_once)
        executor, most = state.executor, own_bytes(state.context, state.executor.part.whole)
        self._pushes = PushListener.of(state.context, executor.part, self.push, executor.allocate, most)
        self._forwarded = PushListener(executor.part, None, self.stage, executor.allocate, own_bytes=most)
        """From the server that this is the standby of."""
        self._listener = Listener(address, self._serve)
        self._standby: SliceForwarder | None = None
        self._staged: dict[tuple[ReplicaId, Clock], _Staged] = {}
        self._changed = asyncio.Condition()
        self._failure = ""
        """Of the newest event that has failed."""
        self._over = asyncio.Event()

    async def _serve(self, connection: socket.socket, hello: Any) -> None:
        if "first" in hello:
            await self._first.serve(connection, hello["first"])
        elif "member" in hello:
            self.mesh.add(Member(*hello["member"]), connection)
            connection.sendall(b"+")
            await self._over.wait()
        elif "forward" in hello:
            await self._forwarded.serve(connection, None)
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
        replica, incarnation, attempt, *_ = completion
        await self.stage(completion, refs, *arrays, lent=lent)
        return await self._replies.after(replica, incarnation, attempt)

    async def stage(
        self, completion: messages.PushCompletion, refs: Sequence[Any], *arrays: messages.Bytes, lent: bool = False
    ) -> messages.Reply:
        """Keep the slice of a Δ until the first server decides on it, and send it to the standby; return no grant."""
        del refs
        replica, incarnation, attempt, *_ = completion
        if arrays:
            if self._standby is not None:
                self._standby.send(completion, arrays)
            if attempt >= self._state.records[replica].attempt:  # else it was decided on
                self._staged[replica, attempt] = _Staged(incarnation, arrays, lent)
            self._first.staged(replica, incarnation, attempt)  # which waits for this, also where it is told it again
        return messages.END

    def _stagings(self) -> Iterator[Staging]:
        """Yield what is staged."""
        for (replica, attempt), staged in sorted(self._staged.items()):
            yield replica, staged.incarnation, attempt

    # ------------------------------------------------------------------------------------- calls of the first server

    async def meet(self, others: Mapping[Member, StreamAddress], standby: StreamAddress | None) -> None:
        """Connect to other servers, which live, and to the standby, if there is one."""
        self.mesh.connect(others)
        if standby is not None:
            self._standby = SliceForwarder(connect_forwarder(standby))

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

    def take_over(self) -> FrameLog:
        """Accept no event any more, since this server takes over from the first; return the newest, for the others."""
        self._first.end()
        return self._first.log

    async def promote(self) -> ServerState:
        """Return the state after all events that have come; the other servers have them.

        Raises:
            PacelineError: it is not the first server's.
        """
        await self._first.taken_all()
        if self._failure:
            raise PacelineError(self._failure)
        return self._state

    def close(self) -> None:
        """End the run."""
        self._over.set()
        self._listener.close()
        self.mesh.close()
        if self._standby is not None:
            self._standby.close()
        self._state.executor.spans.close()

    async def _until(self, taken: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._first.log.count >= taken)

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

    def _observe(self, replica: ReplicaId) -> None:
        """Add up, with the other servers, what a policy asks of a Δ."""
        executor = self._state.executor
        staged = self._staged[replica, self._state.records[replica].attempt]
        executor.statistics.observe(executor.delta_of(staged.arrays), 0.0)

    def _change(self, event: str, args: list[Any]) -> None:
        """Have the state take an event."""
        state = self._state
        if event == "arrived":
            completion: messages.PushCompletion = args[0]
            replica, _, attempt, *_ = completion
            staged = self._staged.pop((replica, attempt))
            if staged.lent:
                state.executor.lent[replica] = attempt
            state.arrived(completion, args[1], args[2], staged.arrays)
            return
        if event == "cancelled":
            self._staged.pop((args[0], state.records[args[0]].attempt), None)
        getattr(state, event)(*args)
        if event == "lost":
            self._forget(args[0], state.records[args[0]].incarnation)
            self._replies.wake(args[0])

    def _forget(self, replica: ReplicaId, incarnation: int) -> None:
        """Forget what processes before this one have staged."""
        earlier = [
            key for key, staged in self._staged.items() if key[0] == replica and staged.incarnation < incarnation
        ]
        for key in earlier:
            del self._staged[key]

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


async def _at_once() -> None:
    """Wait for nothing."""

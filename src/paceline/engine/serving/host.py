"""The server's end of those that join: who they are, what they call, and when they are no more.

::

    connects ... proves to know the token | terms, join: facts are compared | ready, push, ... | leave: A
                                          | refused: goes its way           | its end: lost

What comes from them is JSON and vectors of bytes, and they call the methods that are listed here alone.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.checkpoint.fingerprint import differences, versions
from paceline.core.errors import InputError, WorkerError
from paceline.core.mesh import Coordinate
from paceline.core.types import ReplicaId
from paceline.engine.base import Job, loop_event
from paceline.engine.loop import TICK_S
from paceline.engine.server.calls import JSON, Caller
from paceline.engine.server.messages import ReplicaAssignment, Result, RunStatus, arrays_of
from paceline.engine.server.news import Known
from paceline.engine.server.other_servers import OtherServers
from paceline.engine.server.run_control import wait_for
from paceline.engine.server.server_run import ServerRun
from paceline.engine.server.server_state import ServerState
from paceline.engine.server.wire import Listener, StreamAddress
from paceline.engine.serving.address import text_of
from paceline.engine.worker_metrics import Figures, update_workers_file
from paceline.program import no_data

# A server has one run.
RUN = 1

# No replica's number and incarnation.
NO_PLACE = (-1, 0)

# Methods of the run that replicas call, with what makes their arguments of JSON; those that name the replica.
OF_RUN: Mapping[str, Callable[..., tuple[Any, ...]]] = {
    **dict.fromkeys(("ready", "own_state", "first", "excuse", "clock", "stream"), lambda *args: args),
    "done": lambda replica, incarnation, figures, times: (replica, incarnation, Figures(*figures), times),
    "reported": lambda message: (loop_event(message),),
}
OF_REPLICA = ("ready", "own_state", "first", "excuse", "done")

# What of a program need not be the same where the loop, and so the data and the loss, are the process's own.
_OWN = ("batch size", "clip_norm", "code of", "last batch", "loss", "order of", "seed", "training set")


def facts(job: Job) -> dict[str, str]:
    """Return what a process must have in common with the server, by name: all of a program with data."""
    own = _OWN if job.program.train is no_data else ()
    return {**versions(), **{name: text for name, text in job.fingerprint.items() if not name.startswith(own)}}


class _Nobody:
    """A replica that has not joined yet."""

    def tell(self, method: str, *args: Any) -> None:
        """Do nothing."""


class ServingHost:
    """The server of one run, in an event loop.

    Args:
        job: what is run.
        address: host and port that it listens at.
        token: that those who join must know.

    Raises:
        InputError: it can't listen there.
    """

    def __init__(self, job: Job, address: tuple[str, int], token: str) -> None:
        self.job = job
        host, port = address
        self._listener = Listener(host, self._serve, port=port, token=token.encode())
        listening = self._listener.address()
        if listening is None:
            raise InputError(f"address={text_of(host, port)} can't be listened at; write address='{host}:0', any port")
        self.address: StreamAddress = listening
        least = job.strategy.least_replicas or 1
        self._state = ServerState(job, replicas=least)
        others = OtherServers({}, job.timeout_s, job.suspect_after_s)
        self.run = ServerRun(job, RUN, self._state, [_Nobody()] * least, None, others, host)
        self.facts = facts(job)
        self._members: dict[ReplicaId, JoinedProcess] = {}
        """Processes that are replicas."""
        self._begun, self._changed = asyncio.Event(), asyncio.Event()

    # ------------------------------------------------------------------------------------------- calls of the engine

    async def status(self, known: Known) -> RunStatus:
        """Return the state of the run at its next change, once it has begun if all are there that it begins with."""
        status = await self.run.stand(known)
        if self._state.phase == "starting" and not self._state.building:  # as it is now: one may have died since
            await self.run.begin()
        if status.phase != "starting":
            self._begun.set()
        for suspect in status.suspects:
            process = self._members.get(suspect.replica)
            if process is not None and process.place[1] == suspect.incarnation:
                await self.lose(process, suspect.reason)
        return status

    async def break_off(self, error: BaseException) -> None:
        """End the run by an error, and have no process wait for it."""
        self.run.fail(error)
        for process in self._members.values():
            process.ended = str(error)
            process.caller.tell("failed", process.ended)

    async def all_left(self) -> bool:
        """Return whether no process is a replica any more, after a change or a tick if one is."""
        if self._members:
            await wait_for(self._changed, TICK_S)
        return not self._members

    async def result(self, signal: str | None, known: Known) -> Result:
        """Return the result of the run."""
        return await self.run.result((), signal, known)

    async def close(self) -> None:
        """End the run and all connections."""
        self.run.close()
        self._listener.close()

    # -------------------------------------------------------------------------------------------------------- members

    async def admit(self, process: "JoinedProcess") -> ReplicaAssignment:
        """Make a process the replica of the lowest free number.

        Raises:
            InputError: there is none, or the run has ended.
        """
        state, most, least = self._state, self.job.strategy.replicas, self.job.strategy.least_replicas or 1
        if not self._begun.is_set():
            free = [number for number in range(least) if number not in self._members]
            if free:
                return await self._seat(process, state.assignment(RUN, free[0]))
            await self._begun.wait()
        if not self.run.training:
            raise InputError("the run at this server has ended; start another one with paceline.serve")
        if len(state.staying) >= most:
            raise InputError(
                f"replicas={least}..{most}: {most} processes have joined already, which is the upper bound; wait until "
                f"one leaves, or start the server with replicas={least}..{most + 1}"
            )
        [assignment] = await self.run.scale(len(state.staying) + 1)
        return await self._seat(process, assignment)

    async def _seat(self, process: "JoinedProcess", assignment: ReplicaAssignment) -> ReplicaAssignment:
        replica = assignment.replica
        process.place, self._members[replica] = (replica, assignment.incarnation), process
        await self.run.replaced(replica, process.caller)
        update_workers_file(self.job.out, Coordinate(replica), process.info)
        # The process has no checkpoint: what was before is in its assignment.
        return assignment._replace(micro_steps=self._state.coordinator.positions[replica].clock)

    async def lose(self, process: "JoinedProcess", reason: str) -> None:
        """Go on without a process that is a replica; one that still calls is told why."""
        if self._forget(process):
            process.ended = reason
            process.caller.tell("expelled", reason)
            await self.run.lost(*process.place, reason)

    def left(self, process: "JoinedProcess") -> Sequence[Any]:
        """Return the A that a process leaves with.

        Raises:
            PacelineError: the run has failed.
        """
        self._forget(process)
        if (failure := self.run.control.failure) is not None:
            raise failure
        return arrays_of(self._state.executor.owner.state)

    def _forget(self, process: "JoinedProcess") -> bool:
        """Note that a process is no replica any more; return whether it was one."""
        replica = process.place[0]
        if self._members.get(replica) is not process:
            return False
        del self._members[replica]
        update_workers_file(self.job.out, Coordinate(replica), None)
        self._changed.set()
        return True

    # ----------------------------------------------------------------------------------------------------- connections

    async def _serve(self, connection: socket.socket, hello: Any) -> None:
        if not isinstance(hello, dict):
            return
        if "memory" in hello:
            await self.run.pushes.serve(connection, hello["memory"])
            return
        process = JoinedProcess(self, connection)
        try:
            with contextlib.suppress(Exception):  # whatever it has sent: it is this connection's end alone
                await process.caller.serve()
        finally:
            await self.lose(process, "its connection ended")


class JoinedProcess:
    """A process that has connected; its public methods are those that it may call.

    Args:
        host: the server.
        connection: to the process.
    """

    def __init__(self, host: ServingHost, connection: socket.socket) -> None:
        self._host = host
        self.caller = Caller(connection, self, JSON)
        self.place: tuple[ReplicaId, int] = NO_PLACE
        """Number and incarnation of its replica."""
        self.info: dict[str, Any] = {}
        """Its pid and its host."""
        self.ended: str | None = None
        """Why the run has gone on without it."""

    def alive(self) -> None:
        """Answer, which a server that is stopped does not."""

    def terms(self) -> dict[str, Any]:
        """Return what a process has to know before it joins."""
        job = self._host.job
        return {
            "strategy": str(job.strategy),
            "clip_norm": job.program.clip_norm,
            "running_buffers": job.running_buffers,
            "timeout_s": job.timeout_s,
        }

    async def join(self, theirs: Mapping[str, str], pid: int, host: str) -> dict[str, Any]:
        """Become a replica; return the assignment, or why it is refused."""
        try:
            if self.place != NO_PLACE:
                raise InputError("this connection has joined already")
            if found := differences(self._host.facts, theirs, ("the server", "this process")):
                raise InputError(f"{found}; build the model and the optimizer as the server does")
            self.info = {"pid": int(pid), "host": str(host)}
            return {"assignment": await self._host.admit(self)}
        except InputError as error:
            return {"refused": str(error)}

    async def ask(self, method: str, *args: Any) -> Any:
        """Call a method of the run that a replica may call, for this one."""
        if method not in OF_RUN or (method in OF_REPLICA and tuple(args[:2]) != self.place):
            raise InputError(f"{method} is no call of this replica")
        if method == "stream":
            host, port, _, *rest = self._host.address
            return [host, port, *rest]
        return await getattr(self._host.run, method)(*OF_RUN[method](*args))

    async def leave(self) -> Sequence[Any]:
        """Be no replica any more, and have A as it is."""
        if self.ended is not None:
            raise WorkerError(self.ended)
        return self._host.left(self)

    async def fail(self, reason: str) -> None:
        """Be no replica any more, for the loop has raised something."""
        await self._host.lose(self, reason)

"""Servers of A in threads of ranks, for policies under which replicas do not all make one update together.

::

    rank 0    loop of its replica | first server: decides, has a slice of A; begins the run, watches it, gathers its end
    rank 1    loop of its replica | another server: has the next slice
    rank 2    loop of its replica

Each rank has a connection to each server, by which it calls; what ends it is that it has left, or that it is no more.
Nothing is a collective, so a rank that dies takes its replica alone with it, and the slice of A that it serves, if any.
"""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from paceline.core.errors import PacelineError, WaitTimeoutError, WorkerError, failure_of, raised_text
from paceline.core.mesh import Coordinate
from paceline.core.types import ReplicaId
from paceline.engine.base import Job, Watcher
from paceline.engine.checkpointing import LAST_SAVE_S
from paceline.engine.server.calls import Caller
from paceline.engine.server.messages import Ended, Member, Result, WorkerMeasurements
from paceline.engine.server.news import NewsReader
from paceline.engine.server.peer import Peer, PeerError
from paceline.engine.server.replica_group import with_workers
from paceline.engine.server.run_control import BackgroundTasks, EventLoopThread, ServerLostError, server_error
from paceline.engine.server.server_host import ServerHost
from paceline.engine.server.server_run import ServerRun
from paceline.engine.server.wire import Listener, StreamAddress
from paceline.trace.spans import Span

# A process's ranks make one run with servers at a time.
RUN = 1

T = TypeVar("T")


class RankHost(ServerHost):
    """A server in a thread of a rank.

    Args:
        address: of the interface that it listens at.
        job: what is run.
    """

    def __init__(self, address: str, job: Job) -> None:
        super().__init__(address)
        self.prepare(job)

    def joined(self, rank: int, caller: Caller) -> None:
        """Note a connection of a rank."""

    async def gone(self, rank: int) -> None:
        """Note that a rank's connection has ended."""


class FirstServer(RankHost):
    """The server that decides, and what begins the run, watches it and gathers its end.

    Args:
        address: of the interface that it listens at.
        job: what is run.
        names: of the ranks, for messages.
        servers: ranks with servers.
        watch: receives progress in the thread of the server, and events in another one, which the server awaits.
    """

    def __init__(self, address: str, job: Job, names: Sequence[str], servers: Sequence[int], watch: Watcher) -> None:
        super().__init__(address, job)
        self._names, self._servers, self._watch = names, servers, watch
        self._callers: dict[int, Caller] = {}
        self._left: set[int] = set()
        """Ranks that have ended, or are no more."""
        self._taken: set[int] = set()
        """Ranks that have the outcome, or are no more."""
        self._signals: list[str] = []
        self._spans: list[Span] = []
        self._measured: dict[Coordinate, WorkerMeasurements] = {}
        self._insisted = False
        self._reader = NewsReader(job, watch)
        self._stopped: str | None = None
        """The reason for which a callback has ended training."""
        self._changed = asyncio.Condition()
        self._opened, self._begun = asyncio.Event(), False
        self._failure: PacelineError | None = None
        self._outcome: asyncio.Task[Result | PacelineError] | None = None
        self._control: asyncio.Task[None] | None = None
        self._tasks = BackgroundTasks()
        self._lost: set[ReplicaId] = set()
        """Replicas that have died, or said nothing for too long."""
        self._silent: set[int] = set()
        """Servers that have not answered for a while, so that replicas wait for them."""

    @property
    def _served(self) -> ServerRun:
        assert isinstance(self._run, ServerRun), "the run is open"
        return self._run

    async def start(self, others: Sequence[Peer]) -> None:
        """Open the run at all servers, and begin it once all replicas are ready."""
        mesh = self._prepared.strategy.mesh
        leaders = [_Told(self._callers, mesh.replica_ranks(replica).start) for replica in range(mesh.replicas)]
        try:
            await self.open(RUN, leaders, None, {Member(number): other for number, other in enumerate(others, 1)})
            self._control = asyncio.ensure_future(self._guarded_watch())
            for number, other in enumerate(others, 1):
                self._tasks.start(self._watch_server(number, other))
        except Exception as error:  # of the user's model and data, too: all ranks are to raise it
            self._failure = server_error(error)
        finally:
            self._opened.set()

    # --------------------------------------------------------------------------------------------- calls of the ranks

    def joined(self, rank: int, caller: Caller) -> None:
        self._callers[rank] = caller

    async def gone(self, rank: int) -> None:
        self._taken.add(rank)
        if rank not in self._left:
            await self._leave(rank, f"{self._names[rank]} ended")
        await self._notify()

    async def opened(self) -> PacelineError | None:
        """Return once the run is open, or why it can't be."""
        await self._opened.wait()
        return self._failure

    async def failed(self, rank: int, message: bytes) -> None:
        """Note what a rank's loop has raised; it ends the run unless that is to survive its replicas."""
        failure = json.loads(message)
        if "refused" in failure or not (self._begun and self._prepared.survives_deaths):
            self._left.add(rank)
            self._fail(failure_of(failure))
        else:
            await self._leave(rank, raised_text(failure))
        await self._notify()

    async def left(self, rank: int, ended: Ended, signal: str | None) -> None:
        """Note that a rank's loop has ended; its spans are in the time of this host; and the signal that it has had."""
        self._left.add(rank)
        self._spans += ended.spans
        if ended.measured is not None:
            self._measured[self._prepared.strategy.mesh.coordinate(rank)] = ended.measured
        self._signals += [signal] if signal is not None else []
        await self._notify()

    async def leave(self, rank: int, signal: str) -> None:
        """Go on without a rank that a signal asks to end, as the agent of its host does where another one has died."""
        await self._leave(rank, f"{self._names[rank]} was asked to end by {signal}")
        await self._notify()

    async def insist(self) -> None:
        """Wait for no rank any more: the user has asked twice."""
        self._insisted = True
        await self._notify()

    async def outcome(self) -> Result | PacelineError:
        """Return the result of the run, or why there is none, once all ranks have ended."""
        if self._outcome is None:
            self._outcome = asyncio.ensure_future(self._settle())
        return await asyncio.shield(self._outcome)

    async def taken(self, rank: int) -> None:
        """Note that a rank has the outcome."""
        self._taken.add(rank)
        await self._notify()

    async def all_taken(self) -> None:
        """Return once all ranks have the outcome, or after a timeout: this server may end."""
        await self._until(lambda: len(self._taken) == len(self._names))

    # ------------------------------------------------------------------------------------------- from start to end

    async def _guarded_watch(self) -> None:
        """Watch the run; an error there ends it, for nobody else would begin it, or see its end."""
        try:
            await self._watch_run()
        except Exception as error:
            self._fail(server_error(error))

    async def _watch_run(self) -> None:
        """Begin the run, show its progress, and end replicas that are silent, until nothing is awaited any more."""
        run, job = self._served, self._prepared
        deadline = time.monotonic() + job.timeout_s
        while self._failure is None:
            status = await run.stand(self._reader.known)
            await asyncio.to_thread(self._reader.take, status.news)
            self._watch(status.progress)
            if run.training and self._stopped is None and (reason := self._watch.stopped) is not None:
                self._stopped = reason
                await run.interrupt()
            if status.failure is not None:
                self._fail(status.failure)
            elif status.phase == "done":
                return
            elif not self._begun and not status.waiting:
                self._begun = True
                await run.begin()
            elif not self._begun and time.monotonic() > deadline:
                self._fail(
                    WaitTimeoutError(
                        f"the server waited {job.timeout_s:g} s for replicas {list(status.waiting)} to build their "
                        "model; write a larger timeout_s="
                    )
                )
            if not self._silent:
                for suspect in status.suspects:
                    await self._lose(suspect.replica, suspect.reason)

    async def _watch_server(self, number: int, other: Peer) -> None:
        """End the run where another server answers no more; its death is seen by those who are connected to it."""
        job = self._prepared
        with contextlib.suppress(PeerError):
            while self._outcome is None:
                asked, answer = time.monotonic(), asyncio.ensure_future(other.call("alive"))
                while not (await asyncio.wait([answer], timeout=job.suspect_after_s / 2))[0]:
                    self._silent.add(number)
                    if time.monotonic() - asked > job.timeout_s:
                        late = f"server {number} has not answered the first for {job.timeout_s:g} s"
                        self._fail(ServerLostError(late))
                        return
                answer.result()
                self._silent.discard(number)
                await asyncio.sleep(job.suspect_after_s / 4)

    async def _settle(self) -> Result | PacelineError:
        if self._control is not None:
            await self._control
        if self._failure is not None:
            return self._failure
        await self._until(lambda: len(self._left) == len(self._names))
        mesh = self._prepared.strategy.mesh
        late = sorted({mesh.coordinate(rank).replica for rank in {*range(len(self._names))} - self._left})
        result = await self._served.result(late, next(iter(self._signals), None), self._reader.known)
        try:
            await asyncio.to_thread(self._reader.take, result.news)
        except PacelineError as error:
            return error
        account = replace(with_workers(result.account, mesh, self._measured), stopped=self._stopped)
        return result._replace(account=account, spans=[*self._spans, *result.spans])

    async def _leave(self, rank: int, reason: str) -> None:
        """Note that a rank is no more, and its replica with it."""
        self._left.add(rank)
        if self._failure is None and self._opened.is_set():
            await self._lose(self._prepared.strategy.mesh.coordinate(rank).replica, reason)

    async def _lose(self, replica: ReplicaId, reason: str) -> None:
        """Let the run go on without a replica, whose ranks nobody waits for any more, or end it."""
        run, ranks = self._served, self._prepared.strategy.mesh.replica_ranks(replica)
        if replica in self._lost:
            return
        self._lost.add(replica)
        self._left.update(ranks)
        self._taken.update(set(ranks).difference(self._servers))
        if not self._begun:
            self._fail(WorkerError(f"replica {replica} ended while it started: {reason}"))
        elif self._prepared.on_death == "stop" and run.training:
            self._fail(WorkerError(f"replica {replica} died: {reason}; write on_death='continue' to go on"))
        else:
            await run.lost(replica, 0, reason)

    def _fail(self, error: PacelineError) -> None:
        """End the run by an error, and have no rank wait for any server, whatever has become of that."""
        self._failure = self._failure or error
        self._served.fail(error)
        for caller in self._callers.values():
            caller.tell("break_off")

    async def _until(self, there: Callable[[], bool]) -> None:
        """Wait until something is there, for a timeout at most."""
        job = self._prepared
        bound = job.timeout_s + (LAST_SAVE_S if job.checkpoint is not None else 0.0)
        try:
            async with asyncio.timeout(bound), self._changed:
                await self._changed.wait_for(lambda: there() or self._insisted)
        except TimeoutError:
            return

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


@dataclass(frozen=True)
class _Told:
    """The first rank of a replica, by its newest connection."""

    callers: dict[int, Caller]
    rank: int

    def tell(self, method: str, *args: Any) -> None:
        """Call a method of the rank; do nothing if it is no more."""
        if (caller := self.callers.get(self.rank)) is not None:
            caller.tell(method, *args)


class ServerThread:
    """The thread of a server.

    Args:
        make: makes the server, in the thread.
        address: of the interface that it listens at.

    Raises:
        WorkerError: it can't listen there.
    """

    def __init__(self, make: Callable[[], RankHost], address: str) -> None:
        self._make, self._interface = make, address
        self._thread = EventLoopThread("server of A")
        self.host, self.address = self.submit(self._listen()).result()
        """The server; where it listens."""

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the thread."""
        return self._thread.submit(coroutine)

    def close(self) -> None:
        """End the server and the thread."""
        self.submit(self._close()).result()
        self._thread.close()

    async def _listen(self) -> tuple[RankHost, StreamAddress]:
        host = self._make()

        async def serve(connection: socket.socket, hello: Any) -> None:
            rank, caller = int(hello["rank"]), Caller(connection, host)
            if rank >= 0:  # else another server
                host.joined(rank, caller)
            try:
                await caller.serve()
            finally:
                if rank >= 0:
                    await host.gone(rank)

        self._listener = Listener(self._interface, serve)
        address = self._listener.address()
        if address is None:
            raise WorkerError(f"a server of A can't listen at {self._interface}")
        return host, address

    async def _close(self) -> None:
        await self.host.close()
        self._listener.close()

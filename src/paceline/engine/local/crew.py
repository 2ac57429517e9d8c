"""The worker processes of a run, as main sees them: started, heard, missed, ended."""

import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterator
from typing import TypeAlias

from paceline.comm import liveness
from paceline.comm.alarm import Alarm
from paceline.comm.bell import Bell, Waiter
from paceline.comm.kernel import memfd_create
from paceline.comm.nursery import Child, Nursery
from paceline.comm.shipping import Parcel
from paceline.core.errors import WaitTimeoutError, WorkerError
from paceline.core.types import ReplicaId, Seconds
from paceline.engine.failure import worker_failed
from paceline.engine.local.board import Board
from paceline.engine.local.store import Store
from paceline.trace.recorder import read_packed
from paceline.trace.spans import Span

Token: TypeAlias = tuple[str, int]
"""What has happened: ("report", 0), ("message", 0), ("ended", replica), or whatever else was added to the waiter."""

ENTRY = "paceline.engine.local.worker:main"

GONE_TIMEOUT_S: Seconds = 10.0
"""How long a process that was killed is waited for."""


class Crew:
    """All workers of one run.

    Args:
        nursery: makes them.
        store: the run's vectors.
        board: its words.
        parcel: the job.
        trace: whether they record spans.
        timeout_s: how long a wait for some of them may take.
        entry: of their process, "package.module:function".
    """

    def __init__(
        self,
        nursery: Nursery,
        store: Store,
        board: Board,
        parcel: Parcel,
        *,
        trace: bool,
        timeout_s: Seconds,
        entry: str = ENTRY,
    ) -> None:
        self._nursery, self._entry, self._timeout_s = nursery, entry, timeout_s
        replicas = store.plan.replicas
        self._args = {"remembers": store.plan.remembers}
        self._children: dict[ReplicaId, Child] = {}
        self._ready: set[ReplicaId] = set()
        self._bells = [Bell() for _ in range(replicas)]
        self._alarms = [Alarm(bell, board.sleeper(r)) for r, bell in enumerate(self._bells)]
        self._link, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._link.setblocking(False)
        self._traces = [memfd_create(f"paceline:spans {r}") for r in range(replicas)] if trace else []
        self._shared = (store.segment.fd, parcel.fd)
        self.insisted: Callable[[], bool] = lambda: False
        """Whether nothing is to be waited for."""
        self.living: set[ReplicaId] = set()
        """Those that have not been seen to end."""
        self.bell = Bell()
        self.alarm = Alarm(self.bell, board.sleeper(None))
        """Main's own: workers ring it."""
        self.waiter: Waiter[Token] = Waiter()
        self.waiter.add(self.bell.fileno(), ("report", 0))
        self.waiter.add(self._link.fileno(), ("message", 0))

    def start(self, stop: Callable[[], bool]) -> None:
        """Fork them all, or as many as there are when ``stop`` says so."""
        store_fd, job_fd = self._shared
        for replica, bell in enumerate(self._bells):
            if stop():
                return
            fds = [store_fd, job_fd, bell.fileno(), self.bell.fileno(), self._theirs.fileno()]
            fds += self._traces[replica : replica + 1]
            child = self._nursery.spawn(self._entry, {"replica": replica} | self._args, fds)
            self._children[replica] = child
            self.living.add(replica)
            self.waiter.add(child.pidfd, ("ended", replica))

    def wait_ready(self, timeout_s: Seconds, each: Callable[[int], None], stop: Callable[[], bool]) -> None:
        """Wait until all have built their model, or ``stop`` says so; then those that have not are killed.

        Args:
            timeout_s: for all of them.
            each: called with how many are ready.
            stop: asked whenever something has happened.

        One that was ready and has ended since is for the waiter to tell.

        Raises:
            WorkerError: one failed, or ended before it was ready.
            WaitTimeoutError: names those that were not ready in time.
        """
        deadline = time.monotonic() + timeout_s
        early: list[ReplicaId] = []
        while len(self._ready) < len(self._bells) and not stop():
            left = deadline - time.monotonic()
            tokens = self.waiter.wait(max(0.0, left))
            if not tokens and left <= 0:
                late = sorted(set(range(len(self._bells))) - self._ready)
                raise WaitTimeoutError(
                    f"main waited {timeout_s:g} s for replicas {late} to build their model; write a larger timeout_s="
                )
            self.hear()
            early += [replica for what, replica in tokens if what == "ended" and self._put_off(replica)]
            each(len(self._ready))
        for replica in early:
            self.waiter.add(self._children[replica].pidfd, ("ended", replica))
        for replica in self.living - self._ready:
            self.signal(replica, signal.SIGKILL)

    def _put_off(self, replica: ReplicaId) -> bool:
        """Don't be told again, until training, that this one has ended; one that was not ready must not have."""
        if replica not in self._ready:
            raise WorkerError(f"replica {replica} ended while it started: {self.ended(replica)}")
        self.waiter.remove(self._children[replica].pidfd)
        return True

    def pids(self) -> dict[ReplicaId, int]:
        """Process ids."""
        return {replica: child.pid for replica, child in self._children.items()}

    def ring(self, replica: ReplicaId) -> None:
        """Wake a worker, if it sleeps: there is something for it on the board."""
        self._alarms[replica].ring()

    def wait_for(self, done: Callable[[ReplicaId], bool], whom: Collection[ReplicaId], what: str) -> None:
        """Wait until each of them has done something, or has ended; nothing else is looked at meanwhile.

        Args:
            done: whether one has.
            whom: all of them.
            what: in words, what they are to do.

        Raises:
            WaitTimeoutError: somebody neither does it nor ends.
        """
        if self.alarm.spin(lambda: all(map(done, whom))):
            return
        deadline = time.monotonic() + self._timeout_s
        while late := [r for r in whom if not done(r) and liveness.alive(self._children[r].pidfd)]:
            if self.insisted():  # a part can be made again once its worker can't write any more
                for replica in late:
                    self.signal(replica, signal.SIGKILL)
            elif time.monotonic() > deadline:
                raise WaitTimeoutError(
                    f"main waited {self._timeout_s:g} s for replicas {late} to make {what}; "
                    "write a larger timeout_s= if their loops pause for so long"
                )
            self.alarm.sleep(lambda: all(map(done, late)), lambda s: self._block(late, s), self._timeout_s)

    def _block(self, whom: Collection[ReplicaId], timeout_s: Seconds) -> None:
        """Sleep until main is rung, or one of these has ended."""
        poll = select.poll()
        for fd in (self.bell.fileno(), *(self._children[r].pidfd for r in whom)):
            poll.register(fd, select.POLLIN)
        poll.poll(timeout_s * 1000)

    def hear(self) -> None:
        """Read all messages; raises WorkerError at the first failure."""
        while True:
            try:
                message = json.loads(self._link.recv(1 << 18))
            except BlockingIOError:
                return
            if "ready" in message:
                self._ready.add(message["ready"])
            else:
                raise WorkerError(worker_failed(message))

    def ended(self, replica: ReplicaId) -> str:
        """A worker has ended: wait for it no more, and say in words how it did.

        Raises:
            WorkerError: it has left a message that says more.
        """
        self.hear()
        self.living.discard(replica)
        self.waiter.remove(self._children[replica].pidfd)
        return self._nursery.status(self._children[replica].pid) or "running"

    def signal(self, replica: ReplicaId, number: int) -> None:
        """Send a worker a signal."""
        liveness.kill(self._children[replica].pidfd, number)

    def end(self) -> None:
        """Kill whoever still runs, all at once, and wait until they are gone."""
        pidfds = [child.pidfd for child in self._children.values()]
        for pidfd in pidfds:
            liveness.kill(pidfd)
        liveness.wait_gone(pidfds, GONE_TIMEOUT_S)

    def spans(self) -> Iterator[Span]:
        """What the workers recorded and wrote; read it when they have ended."""
        for fd in self._traces:
            yield from read_packed(fd)

    def close(self) -> None:
        """End all, and let go of everything."""
        self.end()
        self.waiter.close()
        for bell in (*self._bells, self.bell):
            bell.close()
        self._link.close()
        self._theirs.close()
        for fd in self._traces:
            os.close(fd)
        for child in self._children.values():
            self._nursery.forget(child)

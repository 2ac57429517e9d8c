"""The worker processes of a run, as main sees them: started, heard, missed, ended."""

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from paceline.comm import liveness
from paceline.comm.bell import Bell, Waiter
from paceline.comm.kernel import memfd_create
from paceline.comm.nursery import Child, Nursery
from paceline.comm.shipping import Parcel
from paceline.core.errors import WaitTimeoutError, WorkerError
from paceline.core.types import ReplicaId, Seconds
from paceline.trace.recorder import read_packed
from paceline.trace.spans import Span

Token: TypeAlias = tuple[str, int]
"""What has happened: ("report", 0), ("message", 0), ("ended", replica), or whatever else was added to the waiter."""

ENTRY = "paceline.engine.local.worker:main"


class Crew:
    """All workers of one run.

    Args:
        nursery: makes them.
        replicas: P.
        board_fd: the run's shared memory.
        parcel: the job.
        trace: whether they record spans.
    """

    def __init__(self, nursery: Nursery, replicas: int, board_fd: int, parcel: Parcel, *, trace: bool) -> None:
        self._nursery = nursery
        self._children: dict[ReplicaId, Child] = {}
        self._ready: set[ReplicaId] = set()
        self._bells = [Bell() for _ in range(replicas)]
        self._link, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._link.setblocking(False)
        self._traces = [memfd_create(f"paceline:spans {r}") for r in range(replicas)] if trace else []
        self.bell = Bell()
        self.waiter: Waiter[Token] = Waiter()
        self.waiter.add(self.bell.fileno(), ("report", 0))
        self.waiter.add(self._link.fileno(), ("message", 0))
        self._shared = (board_fd, parcel.fd)

    def start(self) -> None:
        """Fork them all."""
        board_fd, job_fd = self._shared
        for replica, bell in enumerate(self._bells):
            fds = [board_fd, job_fd, bell.fileno(), self.bell.fileno(), self._theirs.fileno()]
            fds += self._traces[replica : replica + 1]
            child = self._nursery.spawn(ENTRY, {"replica": replica}, fds)
            self._children[replica] = child
            self.waiter.add(child.pidfd, ("ended", replica))

    def wait_ready(self, timeout_s: Seconds, each: Callable[[int], None]) -> None:
        """Wait until all have built their model.

        Args:
            timeout_s: for all of them.
            each: called with how many are ready.

        Raises:
            WorkerError: one failed or ended.
            WaitTimeoutError: names those that were not ready in time.
        """
        deadline = time.monotonic() + timeout_s
        while len(self._ready) < len(self._bells):
            left = deadline - time.monotonic()
            tokens = self.waiter.wait(max(0.0, left))
            if not tokens and left <= 0:
                late = sorted(set(range(len(self._bells))) - self._ready)
                raise WaitTimeoutError(
                    f"main waited {timeout_s:g} s for replicas {late} to build their model; write a larger timeout_s="
                )
            self.hear()
            for what, replica in tokens:
                if what == "ended":
                    raise WorkerError(f"replica {replica} ended while it started: {self.how_ended(replica)}")
            each(len(self._ready))

    def pids(self) -> dict[ReplicaId, int]:
        """Process ids."""
        return {replica: child.pid for replica, child in self._children.items()}

    def ring(self, replica: ReplicaId) -> None:
        """Wake a worker: there is an order, or a cancellation."""
        self._bells[replica].ring()

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

    def wait_gone(self, timeout_s: Seconds) -> list[ReplicaId]:
        """Wait until the workers have ended; those that have not in time."""
        pidfds = {replica: child.pidfd for replica, child in self._children.items()}
        if liveness.wait_gone(pidfds.values(), timeout_s):
            return []
        return [replica for replica, pidfd in pidfds.items() if liveness.alive(pidfd)]

    def how_ended(self, replica: ReplicaId) -> str:
        """In words; the worker must have ended."""
        return self._nursery.status(self._children[replica].pid) or "running"

    def forget(self, replica: ReplicaId) -> None:
        """An ended worker is no longer waited for."""
        self.waiter.remove(self._children[replica].pidfd)

    def kill(self, replica: ReplicaId) -> None:
        """End a worker at once."""
        liveness.kill(self._children[replica].pidfd)

    def spans(self) -> Iterator[Span]:
        """What the workers recorded and wrote; read it when they have ended."""
        for fd in self._traces:
            yield from read_packed(fd)

    def close(self) -> None:
        """Kill whoever still runs, wait until all are gone, and let go of everything."""
        pidfds = [child.pidfd for child in self._children.values()]
        for pidfd in pidfds:
            liveness.kill(pidfd)
        liveness.wait_gone(pidfds, 10.0)
        self.waiter.close()
        for bell in (*self._bells, self.bell):
            bell.close()
        self._link.close()
        self._theirs.close()
        for fd in self._traces:
            os.close(fd)
        self._traces = []


def worker_failed(message: dict[str, Any]) -> str:
    """The text of a worker's failure: coordinates, the error, its own traceback."""
    who = "the scorer" if message["failed"] < 0 else f"replica {message['failed']}"
    return f"{who} failed: {message['what']}\n\n{message['traceback']}"

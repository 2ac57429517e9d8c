"""What a worker of a replica of several is called, and how it ends.

The worker processes of a run, as main sees them: started, heard, missed, ended.
"""

import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

from paceline.comm import liveness
from paceline.comm.fork_server import ForkServer, ProcessHandle
from paceline.comm.linux import memfd_create
from paceline.comm.shared_pickle import SharedObject
from paceline.comm.wakeup import EventFd, Poller, Wakeup
from paceline.core import errors
from paceline.core.errors import WaitTimeoutError, WorkerError
from paceline.core.mesh import Coordinate, Mesh
from paceline.core.types import ReplicaId, Seconds
from paceline.engine.local.arena import ParameterArena
from paceline.engine.local.control_block import ControlBlock
from paceline.engine.remote_errors import worker_failed
from paceline.trace.recorder import read_packed
from paceline.trace.spans import Span

QUIET = 3
"""The exit code of who ends because another one of its replica has."""


def label(place: Coordinate) -> str:
    """A worker of a replica of several, in words that follow "replica".

    >>> label(Coordinate(1, 0, 2))
    '1 (stage 0, shard 2)'
    """
    return f"{place.replica} (stage {place.stage}, shard {place.shard})"


Token: TypeAlias = tuple[str, int]
"""What has happened: ("report", 0), ("message", 0), ("ended", worker), or whatever else was added to the waiter."""

ENTRY = "paceline.engine.local.worker:main"

MEMBER = "paceline.engine.local.replica_group_worker:main"
"""Of a worker of a replica that has several."""

EXIT_OK = "exit code 0"
"""How a worker ends that has nothing to say."""

EXIT_PEER_DIED = f"exit code {QUIET}"
"""How a worker ends because another one of its replica has."""

GONE_TIMEOUT_S: Seconds = 10.0
"""How long a process that was killed is waited for."""


class WorkerProcesses:
    """All workers of one run.

    Args:
        fork_server: makes them.
        store: the run's vectors.
        board: its words.
        parcel: the job.
        mesh: where each worker is.
        meeting: the folder in which the workers of each replica meet; None: each replica is one.
        trace: whether they record spans.
        timeout_s: how long a wait for some of them may take.
        entry: of their process, "package.module:function".
    """

    def __init__(
        self,
        fork_server: ForkServer,
        store: ParameterArena,
        board: ControlBlock,
        parcel: SharedObject,
        mesh: Mesh,
        meeting: str | None,
        *,
        trace: bool,
        timeout_s: Seconds,
        entry: str = ENTRY,
    ) -> None:
        self._fork_server, self._entry, self._timeout_s = fork_server, entry, timeout_s
        self._mesh, self._meeting = mesh, meeting
        replicas = store.plan.replicas
        self._args = {"remembers": store.plan.remembers}
        self._children: dict[int, ProcessHandle] = {}
        self._ready: set[int] = set()
        self._there: set[int] = set()
        """The workers that have not been seen to end."""
        self._bells = [EventFd() for _ in range(replicas)]
        self._alarms = [Wakeup(bell, board.sleep_flag(r)) for r, bell in enumerate(self._bells)]
        self._link, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._link.setblocking(False)
        self._traces = [memfd_create(f"paceline:spans {r}") for r in range(mesh.workers)] if trace else []
        self._shared = (store.segment.fd, parcel.fd)
        self.insisted: Callable[[], bool] = lambda: False
        """Whether nothing is to be waited for."""
        self.living: set[ReplicaId] = set()
        """The replicas of which nobody has been seen to end, unless well."""
        self.bell = EventFd()
        self.alarm = Wakeup(self.bell, board.sleep_flag(None))
        """Main's own: workers ring it."""
        self.waiter: Poller[Token] = Poller()
        self.waiter.add(self.bell.fileno(), ("report", 0))
        self.waiter.add(self._link.fileno(), ("message", 0))

    def start(self, stop: Callable[[], bool]) -> None:
        """Fork them all, or as many as there are when ``stop`` says so."""
        for replica in range(self._mesh.replicas):
            if stop():
                return
            if self._meeting is None:
                self._fork(replica, replica, self._entry, {"replica": replica}, self._traces[replica : replica + 1])
            else:
                self._start_team(replica, self._meeting)
            self.living.add(replica)

    def _start_team(self, replica: ReplicaId, meeting: str) -> None:
        """All workers of a replica, and the lines from the first one to each other one."""
        leader, *followers = self._mesh.replica_ranks(replica)
        args = {"store": str(Path(meeting) / f"replica {replica}"), "traced": bool(self._traces)}
        with ExitStack() as lines:
            pairs = [[lines.enter_context(end) for end in socket.socketpair()] for _ in followers]
            ends = [[mine.fileno() for mine, _ in pairs], *([theirs.fileno()] for _, theirs in pairs)]
            for worker, own in zip((leader, *followers), ends, strict=True):
                fds = [*self._traces[worker : worker + 1], *own]
                self._fork(worker, replica, MEMBER, {"place": self._mesh.place(worker)} | args, fds)

    def _fork(self, worker: int, replica: ReplicaId, entry: str, args: Mapping[str, Any], more: Sequence[int]) -> None:
        store_fd, job_fd = self._shared
        fds = [store_fd, job_fd, self._bells[replica].fileno(), self.bell.fileno(), self._theirs.fileno(), *more]
        child = self._fork_server.spawn(entry, dict(args) | self._args, fds)
        self._children[worker] = child
        self._there.add(worker)
        self.waiter.add(child.pidfd, ("ended", worker))

    def wait_ready(self, timeout_s: Seconds, each: Callable[[int], None], stop: Callable[[], bool]) -> None:
        """Wait until all workers have built their model, or ``stop`` says so; then those that have not are killed.

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
        early: list[int] = []
        while len(self._ready) < self._mesh.workers and not stop():
            left = deadline - time.monotonic()
            tokens = self.waiter.wait(max(0.0, left))
            if not tokens and left <= 0:
                absent = sorted(set(range(self._mesh.workers)) - self._ready)
                late = absent if self._meeting is None else ", ".join(map(self._name, absent))
                raise WaitTimeoutError(
                    f"main waited {timeout_s:g} s for replicas {late} to build their model; write a larger timeout_s="
                )
            self.hear()
            early += [worker for what, worker in tokens if what == "ended" and self._put_off(worker)]
            each(len(self._ready))
        for worker in early:
            self.waiter.add(self._children[worker].pidfd, ("ended", worker))
        for worker in self._there - self._ready:
            liveness.kill(self._children[worker].pidfd, signal.SIGKILL)

    def _put_off(self, worker: int) -> bool:
        """Don't be told again, until training, that this one has ended; one that was not ready must not have."""
        if worker not in self._ready:
            self.hear()
            dead = self._first_to_die(self._mesh.place(worker).replica)
            raise WorkerError(f"replica {self._name(dead)} ended while it started: {self._status(dead)}")
        self.waiter.remove(self._children[worker].pidfd)
        return True

    def _name(self, worker: int) -> str:
        place = self._mesh.place(worker)
        return str(place.replica) if self._meeting is None else label(place)

    def pids(self) -> dict[Coordinate, int]:
        """Process ids."""
        return {self._mesh.place(worker): child.pid for worker, child in self._children.items()}

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
        while late := [r for r in whom if not done(r) and liveness.alive(self._leader(r).pidfd)]:
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
        for fd in (self.bell.fileno(), *(self._leader(r).pidfd for r in whom)):
            poll.register(fd, select.POLLIN)
        poll.poll(timeout_s * 1000)

    def hear(self) -> None:
        """Read all messages; raises what the first one says that tells of a failure."""
        while True:
            try:
                message = json.loads(self._link.recv(1 << 18))
            except BlockingIOError:
                return
            if "ready" in message:
                self._ready.add(message["ready"])
            elif "said" in message:
                raise getattr(errors, message["kind"], WorkerError)(message["said"])
            else:
                raise WorkerError(worker_failed(message))

    def ended(self, worker: int) -> tuple[ReplicaId, str] | None:
        """A worker has ended: wait for it no more, and say which replica is gone by that, and in words how.

        Where it has not ended well, its replica ends with it.

        Returns:
            None: no replica, since others of it have still to end, or it has gone before.

        Raises:
            PacelineError: it has left a message that says more.
        """
        self.hear()
        if worker not in self._there:
            return None
        replica, how = self._mesh.place(worker).replica, self._status(worker)
        if how != EXIT_OK:
            how = self._end_team(replica)
        else:
            self._miss_no_more(worker)
        if self._there & set(self._mesh.replica_ranks(replica)):
            return None
        self.living.discard(replica)
        return replica, how

    def _end_team(self, replica: ReplicaId) -> str:
        """End who is left of a replica, and wait until they write nothing any more; how the first one ended."""
        first = self._first_to_die(replica)
        how = self._status(first)
        left = self._there & set(self._mesh.replica_ranks(replica))
        for worker in left:
            liveness.kill(self._children[worker].pidfd)
        liveness.wait_gone([self._children[worker].pidfd for worker in left], GONE_TIMEOUT_S)
        for worker in left:
            self._miss_no_more(worker)
        if self._meeting is None:
            return how
        place = self._mesh.place(first)
        return f"{how} (stage {place.stage}, shard {place.shard})"

    def _first_to_die(self, replica: ReplicaId) -> int:
        """Of the workers of a replica that have ended, one that did not end because another one had."""
        dead = [w for w in self._mesh.replica_ranks(replica) if not liveness.alive(self._children[w].pidfd)]
        return next((worker for worker in dead if self._status(worker) not in (EXIT_OK, EXIT_PEER_DIED)), dead[0])

    def _status(self, worker: int) -> str:
        return self._fork_server.status(self._children[worker].pid) or "running"

    def _miss_no_more(self, worker: int) -> None:
        self._there.discard(worker)
        self.waiter.remove(self._children[worker].pidfd)

    def _leader(self, replica: ReplicaId) -> ProcessHandle:
        return self._children[self._mesh.replica_ranks(replica).start]

    def signal(self, replica: ReplicaId, number: int) -> None:
        """Send a replica's worker, or the first of them, a signal."""
        liveness.kill(self._leader(replica).pidfd, number)

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
            self._fork_server.forget(child)

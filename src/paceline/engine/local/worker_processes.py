"""The worker processes of a run, as main sees them: spawned, waited for until ready, woken, and ended."""

import json
import os
import select
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from paceline.comm.fork_server import ForkServer
from paceline.comm.linux import memfd_create
from paceline.comm.shared_pickle import SharedObject
from paceline.comm.wakeup import EventFd, Wakeup
from paceline.core import errors
from paceline.core.errors import WaitTimeoutError, WorkerError, failure_text
from paceline.core.mesh import Coordinate, Mesh
from paceline.core.types import ReplicaId, Seconds
from paceline.engine.local.arena import ParameterArena
from paceline.engine.local.control_block import ControlBlock
from paceline.engine.process_supervisor import EXIT_OK, ProcessSupervisor
from paceline.trace.recorder import read_packed
from paceline.trace.spans import Span

PEER_DIED = 3
"""Exit code of a worker that stops because a peer in its replica exited."""

EXIT_PEER_DIED = f"exit code {PEER_DIED}"

ENTRY = "paceline.engine.local.worker_main:main"

GROUP_ENTRY = "paceline.engine.local.replica_group_worker:main"
"""Entry of a worker whose replica has several."""


def label(place: Coordinate) -> str:
    """Name a worker of a replica that has several, in words that follow "replica".

    >>> label(Coordinate(1, 0, 2))
    '1 (stage 0, shard 2)'
    """
    return f"{place.replica} (stage {place.stage}, shard {place.shard})"


class WorkerProcesses:
    """All workers of one run. A replica of several workers ends as a whole, and its leader stands for it.

    Args:
        fork_server: spawns them.
        arena: of the run.
        control: its control block.
        shared_job: the job, in shared memory.
        mesh: coordinates of the workers.
        rendezvous: folder of the rendezvous files of replicas of several workers; None: each replica is one worker.
        trace: whether workers record spans.
        timeout_s: longest wait for an answer of a worker.
        entry: of a worker's process, "package.module:function".
    """

    def __init__(
        self,
        fork_server: ForkServer,
        arena: ParameterArena,
        control: ControlBlock,
        shared_job: SharedObject,
        mesh: Mesh,
        rendezvous: str | None,
        *,
        trace: bool,
        timeout_s: Seconds,
        entry: str = ENTRY,
    ) -> None:
        self._processes = ProcessSupervisor(fork_server)
        self._mesh, self._rendezvous, self._entry, self._timeout_s = mesh, rendezvous, entry, timeout_s
        self._args = {"remembers": arena.layout.optimizer_vectors}
        self._ready: set[int] = set()
        self._eventfds = [EventFd() for _ in range(arena.layout.replicas)]
        self._wakeups = [Wakeup(eventfd, control.sleep_flag(r)) for r, eventfd in enumerate(self._eventfds)]
        # Datagrams: one socket for all workers, and a message is never cut or mixed with another one.
        self._link, self._remote_link = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._link.setblocking(False)
        self._traces = [memfd_create(f"paceline:spans {r}") for r in range(mesh.workers)] if trace else []
        self.eventfd = EventFd()
        self.wakeup = Wakeup(self.eventfd, control.sleep_flag(None))
        """Main's own, for workers to notify."""
        self._fds = (arena.segment.fd, shared_job.fd, self.eventfd.fileno(), self._remote_link.fileno())
        self.insisted: Callable[[], bool] = lambda: False
        """Returns True if main is to wait for nothing, as after a second Ctrl-C."""
        self.living: set[ReplicaId] = set()
        """The replicas that have a worker whose exit has not been handled."""
        self.poller = self._processes.poller
        """Returns ("ended", worker), ("report", 0) if main was notified, ("message", 0), and what the run adds."""
        self.poller.add(self.eventfd.fileno(), ("report", 0))
        self.poller.add(self._link.fileno(), ("message", 0))

    def start(self, stop: Callable[[], bool]) -> None:
        """Spawn all workers, or as many as there are when ``stop`` returns True."""
        for replica in range(self._mesh.replicas):
            if stop():
                return
            if self._rendezvous is None:
                self._spawn(replica, self._entry, {"replica": replica}, self._traces[replica : replica + 1])
            else:
                self._start_group(replica, self._rendezvous)
            self.living.add(replica)

    def _start_group(self, replica: ReplicaId, rendezvous: str) -> None:
        """Spawn all workers of a replica, with a socket between the leader and each follower."""
        leader, *followers = self._mesh.replica_ranks(replica)
        args = {"store": str(Path(rendezvous) / f"replica {replica}"), "traced": bool(self._traces)}
        with ExitStack() as sockets:
            pairs = [[sockets.enter_context(end) for end in socket.socketpair()] for _ in followers]
            ends = [[local.fileno() for local, _ in pairs], *([remote.fileno()] for _, remote in pairs)]
            for worker, own in zip((leader, *followers), ends, strict=True):
                fds = [*self._traces[worker : worker + 1], *own]
                self._spawn(worker, GROUP_ENTRY, {"place": self._mesh.coordinate(worker)} | args, fds)

    def _spawn(self, worker: int, entry: str, args: Mapping[str, Any], more_fds: Sequence[int]) -> None:
        store_fd, job_fd, main_fd, link_fd = self._fds
        own_fd = self._eventfds[self._mesh.coordinate(worker).replica].fileno()
        self._processes.spawn(
            worker, entry, dict(args) | self._args, [store_fd, job_fd, own_fd, main_fd, link_fd, *more_fds]
        )

    def wait_ready(self, timeout_s: Seconds, each: Callable[[int], None], stop: Callable[[], bool]) -> None:
        """Wait until all workers have built their model, or ``stop`` returns True; kill those that have not by then.

        Args:
            timeout_s: for all of them.
            each: called with the number of ready workers.
            stop: called after each event.

        Raises:
            WorkerError: a worker failed, or ended before it was ready.
            WaitTimeoutError: some were not ready in time; names them.
        """
        deadline = time.monotonic() + timeout_s
        early: list[int] = []
        while len(self._ready) < self._mesh.workers and not stop():
            left_s = deadline - time.monotonic()
            events = self._processes.poll(left_s)
            if not events and left_s <= 0:
                absent = sorted(set(range(self._mesh.workers)) - self._ready)
                late = absent if self._rendezvous is None else ", ".join(map(self._name, absent))
                raise WaitTimeoutError(
                    f"main waited {timeout_s:g} s for replicas {late} to build their model; write a larger timeout_s="
                )
            self.read_messages()
            for kind, worker in events:
                if kind != "ended":
                    continue
                if worker not in self._ready:
                    self.read_messages()
                    first = self._first_to_fail(self._mesh.coordinate(worker).replica)
                    raise WorkerError(f"replica {self._name(first)} ended while it started: {self._status(first)}")
                self.poller.remove(self._processes.processes[worker].pidfd)
                early.append(worker)
            each(len(self._ready))
        for worker in early:  # it was ready before it ended: its exit is an event of the training that follows
            self.poller.add(self._processes.processes[worker].pidfd, ("ended", worker))
        self._processes.signal(self._processes.running - self._ready)

    def _name(self, worker: int) -> str:
        place = self._mesh.coordinate(worker)
        return str(place.replica) if self._rendezvous is None else label(place)

    def pids(self) -> dict[Coordinate, int]:
        """Return the process ids."""
        return {self._mesh.coordinate(worker): process.pid for worker, process in self._processes.processes.items()}

    def notify(self, replica: ReplicaId) -> None:
        """Wake a worker if it sleeps: there is something for it in the control block."""
        self._wakeups[replica].notify()

    def wait_for(self, done: Callable[[ReplicaId], bool], replicas: Collection[ReplicaId], work: str) -> None:
        """Wait until each of some replicas has done something, or has ended; handle no other event meanwhile.

        Args:
            done: returns True if a replica has done it.
            replicas: to wait for.
            work: in words that follow "to make".

        Raises:
            WaitTimeoutError: a replica neither does it nor ends.
        """
        if self.wakeup.spin(lambda: all(map(done, replicas))):
            return
        deadline = time.monotonic() + self._timeout_s
        while late := [r for r in replicas if not done(r) and self._processes.alive(self._leader(r))]:
            if self.insisted():  # main can compute a slice itself once its worker can't write any more
                self._processes.signal(map(self._leader, late))
            elif time.monotonic() > deadline:
                raise WaitTimeoutError(
                    f"main waited {self._timeout_s:g} s for replicas {late} to make {work}; "
                    "write a larger timeout_s= if their loops pause for so long"
                )
            self.wakeup.sleep(lambda: all(map(done, late)), lambda s: self._block(late, s), self._timeout_s)

    def _block(self, replicas: Collection[ReplicaId], timeout_s: Seconds) -> None:
        """Sleep until main is notified, or one of these replicas has ended."""
        poll = select.poll()  # not self.poller: its events stay unread for the training loop
        for fd in (self.eventfd.fileno(), *(self._processes.processes[self._leader(r)].pidfd for r in replicas)):
            poll.register(fd, select.POLLIN)
        poll.poll(timeout_s * 1000)

    def read_messages(self) -> None:
        """Read all messages of the workers; raise the first failure among them."""
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
                raise WorkerError(failure_text(message))

    def handle_exit(self, worker: int) -> tuple[ReplicaId, str] | None:
        """Handle the exit of a worker. Unless it ended well, kill the rest of its replica.

        Returns:
            The replica that has ended by that, and how, in words; None if other workers of it still run, or its end
            has been handled before.

        Raises:
            PacelineError: the worker has sent a failure before it ended.
        """
        self.read_messages()
        if worker not in self._processes.running:
            return None
        replica, status = self._mesh.coordinate(worker).replica, self._status(worker)
        if status == EXIT_OK:
            self._processes.retire(worker)
        else:
            first = self._first_to_fail(replica)
            status = self._status(first)
            if self._rendezvous is not None:
                place = self._mesh.coordinate(first)
                status = f"{status} (stage {place.stage}, shard {place.shard})"
            # Wait until none of them writes to shared memory: the server reuses the replica's buffers afterwards.
            rest = self._processes.running.intersection(self._mesh.replica_ranks(replica))
            self._processes.kill(rest)
            for other in rest:
                self._processes.retire(other)
        if self._processes.running.intersection(self._mesh.replica_ranks(replica)):
            return None
        self.living.discard(replica)
        return replica, status

    def _first_to_fail(self, replica: ReplicaId) -> int:
        """Return a worker of a replica that has ended, if possible one that did not end because of a peer."""
        ended = [worker for worker in self._mesh.replica_ranks(replica) if not self._processes.alive(worker)]
        failed = (worker for worker in ended if self._status(worker) not in (EXIT_OK, EXIT_PEER_DIED))
        return next(failed, ended[0])

    def _status(self, worker: int) -> str:
        return self._processes.status(worker) or "running"

    def _leader(self, replica: ReplicaId) -> int:
        return self._mesh.replica_ranks(replica).start

    def signal(self, replica: ReplicaId, number: int) -> None:
        """Send a signal to a replica's worker, or to its leader."""
        self._processes.signal([self._leader(replica)], number)

    def kill_all(self) -> None:
        """Kill all workers at once, and wait until they have ended."""
        self._processes.kill(self._processes.processes)

    def spans(self) -> Iterator[Span]:
        """Read the spans that the workers have recorded, after they have ended."""
        for fd in self._traces:
            yield from read_packed(fd)

    def close(self) -> None:
        """Kill what still runs, and close everything."""
        self._processes.close()
        for eventfd in (*self._eventfds, self.eventfd):
            eventfd.close()
        self._link.close()
        self._remote_link.close()
        for fd in self._traces:
            os.close(fd)

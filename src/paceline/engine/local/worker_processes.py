"""The worker processes of a run, as main sees them: spawned, waited for until ready, woken, and ended."""

import json
import os
import select
import socket
import tempfile
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from paceline.comm.fork_server import ForkServer
from paceline.comm.linux import memfd_create
from paceline.comm.shared_pickle import SharedObject
from paceline.comm.wakeup import EventFd, Wakeup
from paceline.core.errors import WaitTimeoutError, WorkerError, failure_of, raised_text
from paceline.core.types import ReplicaId, Seconds
from paceline.engine.base import Job, Watcher, loop_event
from paceline.engine.local.arena import ParameterArena
from paceline.engine.loop import InterruptGuard
from paceline.engine.process_supervisor import EXIT_OK, ProcessSupervisor
from paceline.engine.spmd.rank_context import PREPARATION_S
from paceline.trace.recorder import drop_partial_span

# Exit code of a worker that stops because a peer in its replica exited.
PEER_DIED = 3

EXIT_PEER_DIED = f"exit code {PEER_DIED}"

# What a SIGSEGV of a worker may be of: its code is torch's and the user's, and A is mapped read-only.
WRITTEN = "it may have written a parameter of A, which replicas only read; load weights in Program(model=…)"

ENTRY = "paceline.engine.local.worker_main:main"

# Entry of a worker whose replica has several.
GROUP_ENTRY = "paceline.engine.local.replica_group_worker:main"


class WorkerProcesses:
    """All workers of one run. A replica of several workers ends as a whole, and its leader stands for it.

    Args:
        fork_server: spawns them.
        arena: of the run.
        shared_job: the job, in shared memory.
        job: the same.
        watch: takes what loops report.
        entry: of the process of a replica's only worker, "package.module:function".
    """

    def __init__(
        self,
        fork_server: ForkServer,
        arena: ParameterArena,
        shared_job: SharedObject,
        job: Job,
        watch: Watcher,
        entry: str = ENTRY,
    ) -> None:
        self._watch = watch
        self.supervisor = ProcessSupervisor(fork_server)
        self._mesh, self._spread, self._timeout_s = job.strategy.mesh, job.strategy.spread, job.timeout_s
        prepares = job.strategy.spread or job.strategy.compile
        self.start_timeout_s = job.timeout_s + (PREPARATION_S if prepares else 0.0)
        """Longest wait for workers to build their model."""
        self._entry = GROUP_ENTRY if self._spread else entry
        self._leaders = [self._mesh.replica_ranks(replica).start for replica in range(self._mesh.replicas)]
        self._optimizer_vectors = arena.layout.optimizer_vectors
        self.spawned: set[int] = set()
        """The workers that there were at any time."""
        self._ready: set[int] = set()
        self._survives = job.survives_deaths
        """Whether an exception ends its replica alone."""
        self._failures: dict[ReplicaId, str] = {}
        """What replicas have raised that have not ended yet."""
        self._kept: dict[ReplicaId, dict[str, Any]] = {}
        """What the workers of each replica have chosen."""
        self._terminated = set[ReplicaId]()
        """Replicas that main has killed, and whose exit it has not handled."""
        self._training = False
        """Whether what a worker raises counts as its death."""
        self._generation = 0
        self._eventfds = [EventFd() for _ in self._leaders]
        self.wakeups = [Wakeup(eventfd, arena.control.sleep_flag(r)) for r, eventfd in enumerate(self._eventfds)]
        """For each replica, to notify where there is something for it in the control block."""
        # Datagrams: one socket for all workers, and a message is never cut or mixed with another one.
        self._link, self._remote_link = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._link.setblocking(False)
        self.traces = [memfd_create(f"paceline:spans {r}") for r in range(self._mesh.workers)] if job.trace else []
        """Files of the spans of each worker, complete when it has ended."""
        self._rendezvous = tempfile.TemporaryDirectory(prefix="paceline-") if self._spread else None
        """Folder of the rendezvous files of replicas of several workers."""
        self.eventfd = EventFd()
        self.wakeup = Wakeup(self.eventfd, arena.control.sleep_flag(None))
        """Main's own, for workers to notify."""
        self._fds = (arena.segment.fd, shared_job.fd), (self.eventfd.fileno(), self._remote_link.fileno())
        self.interrupts = InterruptGuard(self.eventfd.set, watch.heard)
        """Counts Ctrl-C while the run has entered it."""
        self.living: set[ReplicaId] = set()
        """The replicas that have a worker whose exit has not been handled."""
        self.poller = self.supervisor.poller
        """Returns ("ended", worker), ("report", 0) if main was notified, ("message", 0), and what the run adds."""
        self.poller.add(self.eventfd.fileno(), ("report", 0))
        self.poller.add(self._link.fileno(), ("message", 0))

    def start(self, replicas: int) -> None:
        """Spawn the workers of the first replicas, or of as many as there are at the first Ctrl-C."""
        for replica in range(replicas):
            if self.interrupts.count:
                return
            self.spawn(replica, 0)

    def spawn(self, replica: ReplicaId, first: int) -> None:
        """Spawn the workers of a replica that has none, or has ended; they begin after so many micro-steps of the run.

        Of several workers, there is a socket between the leader and each follower.
        """
        for worker in self.spawned.intersection(self._mesh.replica_ranks(replica)):
            self.supervisor.forget(worker)
            self._ready.discard(worker)
            for sink in self.traces[worker : worker + 1]:
                drop_partial_span(sink)
        self.spawned.update(self._mesh.replica_ranks(replica))
        (arena_fd, job_fd), main_fds = self._fds
        args: dict[str, Any] = {"remembers": self._optimizer_vectors, "traced": bool(self.traces), "first": first}
        if self._rendezvous is not None:
            self._generation += 1
            args["kept"] = self._kept.get(replica, {})
            args["store"] = str(Path(self._rendezvous.name) / f"replica {replica} {self._generation}")
        ranks, eventfd = self._mesh.replica_ranks(replica), self._eventfds[replica].fileno()
        with ExitStack() as sockets:
            pairs = [[sockets.enter_context(end) for end in socket.socketpair()] for _ in ranks[1:]]
            ends = [[local.fileno() for local, _ in pairs], *([remote.fileno()] for _, remote in pairs)]
            for worker, own in zip(ranks, ends, strict=True):
                fds = [arena_fd, job_fd, eventfd, *main_fds, *self.traces[worker : worker + 1], *own]
                self.supervisor.spawn(worker, self._entry, args | {"place": self._mesh.coordinate(worker)}, fds)
        self.living.add(replica)

    def wait_ready(self, each: Callable[[float], None]) -> None:
        """Wait until all that were spawned have built their model, or for Ctrl-C; kill those that have not by then.

        Args:
            each: called with the share of workers that are ready.

        Raises:
            WorkerError: a worker failed, or ended before it was ready.
            WaitTimeoutError: some were not ready in time; names them.
        """
        timeout_s = self.start_timeout_s
        deadline = time.monotonic() + timeout_s
        early: list[int] = []
        while len(self._ready) < len(self.spawned) and not self.interrupts.count:
            left_s = deadline - time.monotonic()
            events = self.supervisor.poll(left_s)
            if not events and left_s <= 0:
                absent = sorted(self.spawned - self._ready)
                late = ", ".join(map(self._name, absent)) if self._spread else absent
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
                self.poller.remove(self.supervisor.processes[worker].pidfd)
                early.append(worker)
            each(len(self._ready) / len(self.spawned))
        self._training = self._survives
        for worker in early:  # it was ready before it ended: its exit is an event of the training that follows
            self.poller.add(self.supervisor.processes[worker].pidfd, ("ended", worker))
        self.supervisor.signal(self.supervisor.running - self._ready)

    def is_ready(self, replica: ReplicaId) -> bool:
        """Return whether all workers of a replica have built their model."""
        return self._ready.issuperset(self._mesh.replica_ranks(replica))

    def _name(self, worker: int) -> str:
        place = self._mesh.coordinate(worker)
        return place.label if self._spread else str(place.replica)

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
        while late := [r for r in replicas if not done(r) and self.supervisor.alive(self._leaders[r])]:
            if self.interrupts.insisted:  # main can compute a slice itself once its worker can't write any more
                self.supervisor.signal(self._leaders[r] for r in late)
            elif time.monotonic() > deadline:
                raise WaitTimeoutError(
                    f"main waited {self._timeout_s:g} s for replicas {late} to make {work}; "
                    "write a larger timeout_s= if their loops pause for so long"
                )
            self.wakeup.sleep(lambda: all(map(done, late)), lambda s: self._block(late, s), self._timeout_s)

    def _block(self, replicas: Collection[ReplicaId], timeout_s: Seconds) -> None:
        """Sleep until main is notified, or one of these replicas has ended."""
        poll = select.poll()  # not self.poller: its events stay unread for the training loop
        for fd in (self.eventfd.fileno(), *(self.supervisor.processes[self._leaders[r]].pidfd for r in replicas)):
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
                self._kept[self._mesh.coordinate(message["ready"]).replica] = message.get("kept", {})
                continue
            if (reported := loop_event(message)) is not None:
                self._watch.event(reported)
                continue
            error = failure_of(message)
            if "refused" in message:  # what can't be done as written can't be done by a replacement either
                raise error
            # The replica, or its worker: "1 (stage 0, shard 2)".
            replica = str(message.get("replica", message.get("failed"))).partition(" ")[0]
            if not self._training or not replica.isdecimal():
                raise error
            self._failures.setdefault(int(replica), raised_text(message))

    def handle_exit(self, worker: int) -> tuple[ReplicaId, str] | None:
        """Handle the exit of a worker. Unless it ended well, kill the rest of its replica.

        Returns:
            The replica that has ended by that, and how, in words; None if other workers of it still run, or its end
            has been handled before.

        Raises:
            PacelineError: the worker has sent a failure before it ended.
        """
        self.read_messages()
        if worker not in self.supervisor.running or self.supervisor.alive(worker):  # it was ended, or replaced, since
            return None
        replica, status = self._mesh.coordinate(worker).replica, self._status(worker)
        if status == EXIT_OK:
            self.supervisor.retire(worker)
        else:
            first = self._first_to_fail(replica)
            status = self._status(first)
            if self._spread:
                place = self._mesh.coordinate(first)
                status = f"{status} (stage {place.stage}, shard {place.shard})"
            # Wait until none of them writes to shared memory: the server reuses the replica's buffers afterwards.
            rest = self.supervisor.running.intersection(self._mesh.replica_ranks(replica))
            self.supervisor.kill(rest)
            for other in rest:
                self.supervisor.retire(other)
        if self.supervisor.running.intersection(self._mesh.replica_ranks(replica)):
            return None
        self.living.discard(replica)
        said, ended = self._failures.pop(replica, status), replica in self._terminated
        self._terminated.discard(replica)
        return replica, said if ended or not status.startswith("killed") else status

    def _first_to_fail(self, replica: ReplicaId) -> int:
        """Return a worker of a replica that has ended, if possible one that did not end because of a peer.

        What a worker raises may be a consequence, too; a signal comes from outside.
        """
        ended = [worker for worker in self._mesh.replica_ranks(replica) if not self.supervisor.alive(worker)]
        failed = [worker for worker in ended if self._status(worker) not in (EXIT_OK, EXIT_PEER_DIED)]
        killed = (worker for worker in failed if self._status(worker).startswith("killed"))
        return next(killed, (failed or ended)[0])

    def _status(self, worker: int) -> str:
        status = self.supervisor.status(worker) or "running"
        return f"{status}: {WRITTEN}" if status == "killed by SIGSEGV" else status

    def terminate(self, replica: ReplicaId, reason: str) -> None:
        """Kill the workers of a replica; ``reason`` is how it has ended, in words."""
        self._failures[replica] = reason
        self._terminated.add(replica)
        self.supervisor.signal(self.supervisor.running.intersection(self._mesh.replica_ranks(replica)))

    def signal(self, replica: ReplicaId, number: int) -> None:
        """Send a signal to a replica's worker, or to its leader."""
        self.supervisor.signal([self._leaders[replica]], number)

    def close(self) -> None:
        """Kill what still runs, and close everything."""
        self.supervisor.close()
        for eventfd in (*self._eventfds, self.eventfd):
            eventfd.close()
        self._link.close()
        self._remote_link.close()
        for fd in self.traces:
            os.close(fd)
        if self._rendezvous is not None:
            self._rendezvous.cleanup()

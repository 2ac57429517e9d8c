"""Processes of this host that main spawns, watches and ends: the workers of the local engine, ranks of a process group.

::

    main       spawn --- poll: a message? an exit? ------- messages first, then exits ---- close: kill, wait, reap
    process        \\---- imports are done: ready .. works .. sends messages .. exits /

A pidfd is watched for each process: it becomes readable on any kind of death, and no other process can reuse it as one
can reuse a pid. The first failure wins. Since processes that work together fail together, main waits a moment for a
message with a reason before it reports an exit without one.
"""

import contextlib
import math
import signal
import socket
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from paceline.comm import liveness
from paceline.comm.fork_server import ForkServer, ProcessHandle
from paceline.comm.shared_pickle import share
from paceline.comm.wakeup import Poller
from paceline.core.errors import WorkerError
from paceline.core.types import Seconds

# What a poll returns: ("ended", process), ("message", process), or what else was added to the poller.
Event: TypeAlias = tuple[str, int]

# Exit status of a process that finished normally.
EXIT_OK = "exit code 0"

# Longest wait for a process that was killed.
GONE_TIMEOUT_S: Seconds = 10.0

# Longest wait for a reason from the other ranks after one has exited: they look for dead peers many times a second.
REASON_S: Seconds = 5.0


class ProcessSupervisor:
    """Numbered processes of one fork server; none of them outlives :meth:`close`.

    Args:
        fork_server: spawns them.
    """

    def __init__(self, fork_server: ForkServer) -> None:
        self._fork_server = fork_server
        self.processes: dict[int, ProcessHandle] = {}
        self.running: set[int] = set()
        """The processes whose exit has not been handled by :meth:`retire`."""
        self.poller = Poller[Event]()

    def spawn(self, number: int, entry: str, args: Mapping[str, Any], fds: Sequence[int]) -> None:
        """Fork a process that calls ``entry(args, fds)``; its exit is polled as ("ended", number)."""
        process = self.processes[number] = self._fork_server.spawn(entry, args, fds)
        self.running.add(number)
        self.poller.add(process.pidfd, ("ended", number))

    def poll(self, timeout_s: Seconds) -> list[Event]:
        """Wait for events; exits come last, since a process may have sent a message before it ended."""
        return sorted(self.poller.wait(max(0.0, timeout_s)), key=lambda event: event[0] == "ended")

    def alive(self, number: int) -> bool:
        return liveness.alive(self.processes[number].pidfd)

    def status(self, number: int) -> str | None:
        """Return how a process ended, as "exit code 0", "killed by SIGKILL"; None while it runs."""
        return self._fork_server.status(self.processes[number].pid)

    def retire(self, number: int) -> None:
        """Poll a process no more, once its exit has been handled."""
        self.running.discard(number)
        self.poller.remove(self.processes[number].pidfd)

    def forget(self, number: int) -> None:
        """Release what is kept of a process that has ended and was retired, before another takes its number."""
        self._fork_server.forget(self.processes.pop(number))

    def signal(self, numbers: Iterable[int], signal_number: int = signal.SIGKILL) -> None:
        """Send a signal to some processes; those that have ended are skipped."""
        for number in numbers:
            liveness.kill(self.processes[number].pidfd, signal_number)

    def kill(self, numbers: Collection[int]) -> None:
        """Kill some processes, all at once, and wait until they can write to shared memory no more."""
        self.signal(numbers)
        liveness.wait_gone([self.processes[number].pidfd for number in numbers], GONE_TIMEOUT_S)

    def close(self) -> None:
        """Kill what still runs, and close all descriptors."""
        self.signal(self.processes)  # all at once: the fork server would wait for one after the other
        for process in self.processes.values():
            self._fork_server.forget(process)
        self.processes.clear()
        self.poller.close()


class RankProcesses:
    """The ranks of one process group, each with a socket of its own to main.

    Args:
        fork_server: spawns them.
        entry: of each process; it gets ``rank``, ``size`` and ``store``, the path of the rendezvous file, and the
            descriptors of the payload and of its socket.
        size: number of ranks.
        payload: object that each rank unpacks.
        args: more arguments of the entry.
    """

    def __init__(
        self, fork_server: ForkServer, entry: str, size: int, payload: object, args: Mapping[str, Any] | None = None
    ) -> None:
        self.supervisor = ProcessSupervisor(fork_server)
        self.links: list[socket.socket] = []
        self.deadline = math.inf
        """Time on the monotonic clock after which nothing is waited for."""
        self.exits: dict[int, str] = {}
        """Exit status of each rank that has ended."""
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-")
        try:
            with contextlib.closing(share(payload)) as shared:
                for rank in range(size):
                    local, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    self.links.append(local)
                    with remote:
                        own = {"rank": rank, "size": size, "store": str(Path(self._folder.name) / "store")}
                        self.supervisor.spawn(rank, entry, {**(args or {}), **own}, [shared.fd, remote.fileno()])
                    self.supervisor.poller.add(local.fileno(), ("message", rank))
        except BaseException:
            self.close()
            raise

    def limit(self, seconds: Seconds) -> None:
        """Wait no longer than ``seconds`` from now on."""
        self.deadline = min(self.deadline, time.monotonic() + seconds)

    def poll(self, timeout_s: Seconds = math.inf) -> list[Event]:
        """Wait for events until ``timeout_s`` or the deadline is up; exits are recorded on the way."""
        events = self.supervisor.poll(min(timeout_s, self.deadline - time.monotonic()))
        for kind, rank in events:
            if kind == "ended":
                self.exits[rank] = self.supervisor.status(rank) or "hangs"
                self.supervisor.retire(rank)
        return events

    def silent_exit(self) -> WorkerError:
        """Return the error for ranks that ended, or hang, without a message; it lists how each of them ended."""
        statuses = "; ".join(f"rank {rank} {self.exits.get(rank, 'hangs')}" for rank in range(len(self.links)))
        return WorkerError(f"a rank ended without a message: {statuses}")

    def close(self) -> None:
        """Kill the ranks that still run, and close everything."""
        self.supervisor.close()
        for link in self.links:
            link.close()
        self._folder.cleanup()

"""The ranks of a run as one of them sees the others: their processes, rank 0's clock, signals in the job's store."""

import contextlib
import json
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from paceline.comm import liveness
from paceline.core import errors
from paceline.core.errors import PacelineError, WorkerError
from paceline.core.mesh import Coordinate, Mesh
from paceline.core.types import Nanoseconds, Seconds
from paceline.engine.spmd.bounded_store import BoundedStore
from paceline.engine.spmd.launch_env import LaunchEnv
from paceline.engine.spmd.process_group import ProcessGroup

# Round trips to measure a clock offset; the fastest one counts.
CLOCK_PINGS = 8


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """Description of a rank for the others.

    Args:
        kernel: equal for ranks that share a clock and see each other's processes: one boot of one host, and one
            namespace of process ids.
    """

    rank: int
    host: str
    kernel: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


def kernel_of(rank: int) -> str:
    """Return what processes have in common that share a clock and see each other; ``rank`` is this one's."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() + os.readlink("/proc/self/ns/pid") if boot.exists() else f"alone {rank}"


class RankRegistry:
    """All ranks of a run: their processes, and the offset of rank 0's clock.

    Args:
        world: this rank's launch environment.
        group: by which the ranks exchange their descriptions; None: this rank is alone.
    """

    def __init__(self, world: LaunchEnv, group: ProcessGroup | None) -> None:
        self.own = PeerInfo(world.rank, socket.gethostname(), kernel_of(world.rank), os.getpid())
        self.peers = [self.own] * world.size
        # A pidfd stays that of one process, where a process id may be given to another.
        self._pidfds: dict[int, int] = {}
        if group is not None:
            peers = [self.own] * world.size
            dist.all_gather_object(peers, self.own, group=group.handle)
            self.know(peers)
        self.tells = False
        """Whether deaths are printed; False: main does it."""
        self._told = set[int]()
        self.clock_offset_ns: Nanoseconds = 0
        """How far rank 0's clock is ahead of this host's."""
        if group is not None:
            # One after the other, so that rank 0 answers at once; ranks of its own kernel share its clock.
            for peer in self.peers:
                if peer.kernel != self.peers[0].kernel and self.own.rank in (0, peer.rank):
                    self.clock_offset_ns = _clock_offset(group.handle, self.own.rank, peer.rank)

    def know(self, peers: Iterable[PeerInfo]) -> None:
        """Take these for the processes of their ranks from now on."""
        for peer in peers:
            self.peers[peer.rank] = peer
            if (pidfd := self._pidfds.pop(peer.rank, None)) is not None:
                os.close(pidfd)
            if peer.kernel == self.own.kernel and peer.rank != self.own.rank:
                self._pidfds[peer.rank] = liveness.open_pid(peer.pid)

    def workers(self, mesh: Mesh) -> dict[Coordinate, dict[str, int | str]]:
        """Return process and host of each worker of a run, as ``workers.json`` has them."""
        return {mesh.coordinate(peer.rank): {"pid": peer.pid, "node": peer.host} for peer in self.peers}

    def first_exited(self) -> PeerInfo | None:
        """Return a rank of this host whose process has ended, or None."""
        for rank, pidfd in self._pidfds.items():
            if not liveness.alive(pidfd):
                return self.peers[rank]
        return None

    def ended_while(self, dead: PeerInfo, doing: str) -> WorkerError:
        """Return the error of a rank of this host that has ended while this one did something; say so at once.

        torchrun ends this process any moment, and then nobody would read the error.
        """
        how = liveness.how_ended(self._pidfds[dead.rank], dead.pid).removeprefix("ended")
        sentence = f"{dead} ended while {self.own} {doing}{how and f': {how}'}"
        if self.tells and dead.rank not in self._told:
            self._told.add(dead.rank)
            print(f"paceline: {sentence}", file=sys.stderr, flush=True)
        return WorkerError(sentence)

    def exited(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return how those of some ranks have ended that are on this host and have."""
        ended = (rank for rank in ranks if rank in self._pidfds and not liveness.alive(self._pidfds[rank]))
        return {rank: liveness.how_ended(self._pidfds[rank], self.peers[rank].pid) for rank in ended}

    def close(self) -> None:
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        self._pidfds.clear()


def _clock_offset(handle: Any, own: int, other: int) -> Nanoseconds:
    """Measure how far rank 0's clock is ahead of ``other``'s; rank 0 answers, and its own offset stays 0.

    Half of the fastest round trip bounds the error (Cristian 1989).
    """
    message = torch.zeros(1, dtype=torch.int64)
    pings: list[tuple[Nanoseconds, Nanoseconds]] = []
    for _ in range(CLOCK_PINGS):
        if own == 0:
            dist.recv(message, group=handle, group_src=other)
            dist.send(torch.tensor([time.monotonic_ns()]), group=handle, group_dst=other)
        else:
            sent = time.monotonic_ns()
            dist.send(message, group=handle, group_dst=0)
            dist.recv(message, group=handle, group_src=0)
            received = time.monotonic_ns()
            pings.append((received - sent, int(message) - (sent + received) // 2))
    return min(pings)[1] if pings else 0


_FAILURE, _PING = "failure", "ping"


@dataclass(frozen=True)
class StoreSignals:
    """Failures and signs of life in the job's c10d store, which outlives a rank: torchrun keeps it, or rank 0.

    Args:
        _store: with a prefix of this run.
    """

    _store: Store | BoundedStore
    _rank: int
    _size: int
    _reports: Counter[int] = field(default_factory=Counter[int])
    """Reports of each rank: that it has left, or that the first one has read."""

    def report_failure(self, error: PacelineError) -> PacelineError:
        """Report why the run ends, unless another rank has; return the error that all ranks raise."""
        own = json.dumps({"kind": type(error).__name__, "text": str(error)})
        return _rebuilt(self._store.compare_set(_FAILURE, "", own))  # atomic: the first one wins

    def first_failure(self) -> PacelineError | None:
        """Return the failure that has been reported, or None."""
        return _rebuilt(self._store.get(_FAILURE)) if self._store.check([_FAILURE]) else None

    def extend_timeout(self, until_ns: int) -> None:
        """Announce that this rank may take until then, by rank 0's clock; 0: no longer."""
        self._store.set(f"extended {self._rank}", str(until_ns))

    def extended_until_ns(self) -> Nanoseconds:
        """Return when the last of the extended timeouts ends; 0: there is none."""
        names = [f"extended {rank}" for rank in range(self._size)]
        return max((int(self._store.get(name)) for name in names if self._store.check([name])), default=0)

    def report(self, text: str) -> None:
        """Leave a report for the first rank."""
        self._reports[self._rank] += 1
        self._store.set(f"report {self._rank} {self._reports[self._rank]}", text)

    def reports(self) -> Iterator[str]:
        """Yield the reports of all ranks that were not read yet."""
        for rank in range(self._size):
            while self._store.check([name := f"report {rank} {self._reports[rank] + 1}"]):
                self._reports[rank] += 1
                yield self._store.get(name).decode()

    def answer_ping(self) -> None:
        """Give a sign of life if a rank has asked for it."""
        if self._store.check([_PING]):
            self._store.set(f"alive {self._rank}", "")

    def unanswered_ping(self, timeout_s: Seconds) -> list[int]:
        """Ask all waiting ranks for a sign of life, and return those that give none in time."""
        self._store.set(_PING, "")
        self.answer_ping()
        names = {rank: f"alive {rank}" for rank in range(self._size)}
        self._await(list(names.values()), timeout_s)
        return [rank for rank, name in names.items() if not self._store.check([name])]

    def acknowledge(self, timeout_s: Seconds, dead: Collection[int] = ()) -> None:
        """Announce that this rank has read the failure; wait until all others but the dead have, or the time is up."""
        self._store.set(f"read {self._rank}", "")
        if timeout_s:
            self._await([f"read {rank}" for rank in {*range(self._size)}.difference(dead, {self._rank})], timeout_s)

    def _await(self, keys: list[str], timeout_s: Seconds) -> None:
        if not keys:
            return
        with contextlib.suppress(RuntimeError):  # of a wait that has timed out; a FileStore raises no DistStoreError
            self._store.wait(keys, timedelta(seconds=timeout_s))


def _rebuilt(content: bytes) -> PacelineError:
    failure = json.loads(content)
    error: PacelineError = getattr(errors, failure["kind"], WorkerError)(failure["text"])
    return error

"""Waits on a collective in 50 ms slices; between slices checks for dead, failed or missing ranks.

What ranks tell each other outside the collectives: who has failed, who is slow on purpose, who is there.

Waits for collectives, and learns meanwhile who has died, failed or does not come.

::

    collective under way -- 50 ms -- look: a verdict? a process of this host gone? -- 50 ms -- look ...
                                       |               |                     timeout_s: call the roll, name the absent
                                       +-- raise it    +-- give the verdict: all ranks raise the same error

The first verdict wins. A rank that has failed gives it with its traceback.
"""

import json
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from paceline.comm import liveness
from paceline.core import errors
from paceline.core.errors import PacelineError, WaitTimeoutError, WorkerError
from paceline.core.types import Nanoseconds, Seconds
from paceline.engine.spmd.process_group import LaunchEnv, ProcessGroup, host_name

PINGS = 8
"""How often another host's clock is asked for; the quickest answer counts."""


@dataclass(frozen=True, slots=True)
class Peer:
    """What a rank tells the others of itself."""

    rank: int
    host: str
    """As people know it."""
    kernel: str
    """Equal for those who share a clock and see each other's processes."""
    pid: int

    @classmethod
    def me(cls, rank: int) -> "Peer":
        boot = Path("/proc/sys/kernel/random/boot_id")
        kernel = boot.read_text().strip() + os.readlink("/proc/self/ns/pid") if boot.exists() else f"alone {rank}"
        return cls(rank, host_name(), kernel, os.getpid())

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


class RankRegistry:
    """All ranks of a run.

    Args:
        world: whose.
        group: by which they introduce themselves.
    """

    def __init__(self, world: LaunchEnv, group: ProcessGroup | None) -> None:
        self.own = Peer.me(world.rank)
        self.peers: list[Peer] = [self.own] if group is None else group.gather(self.own)
        self._pidfds: dict[int, int] = {}
        for peer in self.peers:
            if peer.kernel == self.own.kernel and peer.rank != world.rank:
                self._pidfds[peer.rank] = liveness.open_pid(peer.pid)
        self.clock_offset_ns: Nanoseconds = 0 if group is None else self._clock_offset(group)
        """How far rank 0's clock is ahead of this host's."""

    def first_exited(self) -> Peer | None:
        """One of this host that has ended, if any has."""
        for rank, pidfd in self._pidfds.items():
            if not liveness.alive(pidfd):
                return self.peers[rank]
        return None

    def close(self) -> None:
        """Look no more."""
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        self._pidfds.clear()

    def _clock_offset(self, group: ProcessGroup) -> Nanoseconds:
        """Asked of rank 0, one rank after the other, by those who don't share its clock."""
        first, ahead = self.peers[0], 0
        for peer in self.peers[1:]:
            if peer.kernel == first.kernel:
                continue
            if self.own.rank == 0:
                _answer(group.handle, peer.rank)
            elif self.own.rank == peer.rank:
                ahead = _ask(group.handle)
        return ahead


def _ask(handle: Any) -> Nanoseconds:
    """How far rank 0's clock is ahead, from the quickest of some answers."""
    pings: list[tuple[Nanoseconds, Nanoseconds]] = []
    there = torch.zeros(1, dtype=torch.int64)
    for _ in range(PINGS):
        asked = time.monotonic_ns()
        dist.send(there, 0, group=handle)
        dist.recv(there, 0, group=handle)
        answered = time.monotonic_ns()
        pings.append((answered - asked, int(there) - (asked + answered) // 2))
    return min(pings)[1]


def _answer(handle: Any, rank: int) -> None:
    question = torch.zeros(1, dtype=torch.int64)
    for _ in range(PINGS):
        dist.recv(question, rank, group=handle)
        dist.send(torch.tensor([time.monotonic_ns()]), rank, group=handle)


_VERDICT, _ROLL = "verdict", "roll"


class StoreSignals:
    """Notes in the job's store, which outlives a rank: torchrun keeps it, or rank 0.

    Args:
        store: with names of this run alone.
        rank: who writes.
        size: how many there are.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size

    def report_failure(self, error: PacelineError) -> PacelineError:
        """Say why the run ends; the first who says it wins. Returns what all ranks raise."""
        said = json.dumps({"kind": type(error).__name__, "text": str(error)})
        return _read(self._store.compare_set(_VERDICT, "", said))

    def first_failure(self) -> PacelineError | None:
        """Why the run ends, if somebody has said so."""
        return _read(self._store.get(_VERDICT)) if self._store.check([_VERDICT]) else None

    def extend_timeout(self, until_ns: int) -> None:
        """This rank will say nothing until then, by rank 0's clock."""
        self._store.set(f"excused {self._rank}", str(until_ns))

    def extended_until_ns(self) -> int:
        """When the last of those who have excused themselves will be back; 0: nobody has."""
        names = [f"excused {rank}" for rank in range(self._size)]
        return max((int(self._store.get(name)) for name in names if self._store.check([name])), default=0)

    def ping(self) -> None:
        """Ask all who wait to say so."""
        self._store.set(_ROLL, "")

    def pinged(self) -> bool:
        """Whether somebody asks who is there."""
        return bool(self._store.check([_ROLL]))

    def answer_ping(self) -> None:
        """Answer it."""
        self._store.set(_here(self._rank), "")

    def unanswered(self, seconds: Seconds) -> list[int]:
        """Who has not answered within so long."""
        names = {rank: _here(rank) for rank in range(self._size)}
        try:
            self._store.wait(list(names.values()), timedelta(seconds=seconds))
        except RuntimeError:  # of a file store no DistStoreError
            return [rank for rank, name in names.items() if not self._store.check([name])]
        return []

    def acknowledge(self, rank: int) -> None:
        """This rank has read the verdict."""
        self._store.set(f"read {rank}", "")

    def await_acknowledgements(self, seconds: Seconds) -> None:
        """Wait so long for all others to read it."""
        try:
            self._store.wait([f"read {r}" for r in range(self._size) if r != self._rank], timedelta(seconds=seconds))
        except RuntimeError:  # of a file store no DistStoreError
            return


def _here(rank: int) -> str:
    return f"here {rank}"


def _read(said: bytes) -> PacelineError:
    verdict = json.loads(said)
    kind = getattr(errors, verdict["kind"], WorkerError)
    error: PacelineError = kind(verdict["text"])
    return error


SLICE = timedelta(milliseconds=50)
"""How long a wait lasts between two looks; a collective that is over sooner costs none."""

GLANCE_S: Seconds = 0.25
"""How often the job's store is asked: that is a message to another process."""

GRACE_S: Seconds = 3.0
"""How long others may take to say why a connection broke, or that they are there."""


class CollectiveWatchdog:
    """One rank's.

    Args:
        store_signals: of the run.
        registry: of the run.
        timeout_s: the longest wait.
        backend: whose work is waited for.
    """

    def __init__(self, store_signals: StoreSignals, registry: RankRegistry, timeout_s: Seconds, backend: str) -> None:
        self._store_signals, self._registry, self._timeout_s, self._backend = (
            store_signals,
            registry,
            timeout_s,
            backend,
        )
        self._glanced_s = 0.0

    def wait(self, work: Any, what: str) -> None:
        """Wait for a collective that has been begun.

        Args:
            work: torch's.
            what: it is, in words that follow "waited for".

        Raises:
            WorkerError: a rank has failed or died.
            WaitTimeoutError: a rank did not come in time.
        """
        began = time.monotonic()
        while not self._over(work, what):
            self._look(what, time.monotonic() - began)

    def _over(self, work: Any, what: str) -> bool:
        try:
            return _by_asking(work) if self._backend == "nccl" else _in_slices(work)
        except RuntimeError as error:
            raise self._why(error, what) from error

    def _look(self, what: str, waited_s: Seconds) -> None:
        self._miss_the_dead(what)
        if time.monotonic() - self._glanced_s < GLANCE_S:
            return
        self._glanced_s = time.monotonic()
        verdict = self._asked(what)
        if verdict is not None:
            raise verdict
        if (
            waited_s > self._timeout_s
            and time.monotonic_ns() + self._registry.clock_offset_ns > self._extended_until_ns()
        ):
            raise self._late(what)

    def _miss_the_dead(self, what: str) -> None:
        dead = self._registry.first_exited()
        if dead is not None:
            raise self._judged(WorkerError(f"{dead} ended while {self._registry.own} waited for {what}"))

    def _judged(self, error: PacelineError) -> PacelineError:
        """What has been said already, or this; also where the store has gone with who kept it."""
        try:
            return self._store_signals.first_failure() or self._store_signals.report_failure(error)
        except RuntimeError:
            return error

    def _asked(self, what: str) -> PacelineError | None:
        """What the others have said meanwhile."""
        try:
            if self._store_signals.pinged():
                self._store_signals.answer_ping()
            return self._store_signals.first_failure()
        except RuntimeError as error:
            return WorkerError(
                f"the job's store, which rank 0 or torchrun keeps, is gone while {self._registry.own} waited for "
                f"{what}: {error}"
            )

    def _why(self, error: RuntimeError, what: str) -> PacelineError:
        """Why a collective broke: what somebody says, who has died, or who does not answer."""
        try:
            if isinstance(error, PacelineError):  # shared memory has seen it first
                self._miss_the_dead(what)
                return self._asked(what) or error
            said = self._heard_of(what)
            absent = [] if said is not None else self._absent()
        except PacelineError as known:
            return known
        except RuntimeError:
            said, absent = None, []
        who = ", ".join(str(self._registry.peers[rank]) for rank in absent) or "a rank"
        return said or self._judged(
            WorkerError(f"{who} was lost while {self._registry.own} waited for {what}: {error}")
        )

    def _heard_of(self, what: str) -> PacelineError | None:
        """What is said, or seen of a process of this host, within the time of grace."""
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline:
            said = self._store_signals.first_failure()
            if said is not None:
                return said
            self._miss_the_dead(what)
            time.sleep(SLICE.total_seconds())  # the store's own wait would print each time that it ends in vain
        return None

    def _late(self, what: str) -> PacelineError:
        absent = self._absent()
        present = ", ".join(f"rank {p.rank}" for p in self._registry.peers if p.rank not in absent)
        late = ", ".join(str(self._registry.peers[rank]) for rank in absent) or "nobody in particular"
        return self._judged(
            WaitTimeoutError(
                f"{present} waited {self._timeout_s:g} s for {late} in {what}; write a larger timeout_s= if a step "
                "takes so long"
            )
        )

    def _absent(self) -> list[int]:
        self._store_signals.ping()
        self._store_signals.answer_ping()
        return self._store_signals.unanswered(GRACE_S)

    def _extended_until_ns(self) -> int:
        return self._store_signals.extended_until_ns() + int(self._timeout_s * 1e9)


def _in_slices(work: Any) -> bool:
    """Where a wait that has timed out may be made again, as all do but NCCL."""
    try:
        work.wait(SLICE)
        return True
    except RuntimeError:
        if not work.is_completed():
            return False
    work.wait()  # raises what is wrong, unless it was over just then
    return True


def _by_asking(work: Any) -> bool:
    """NCCL's: it gives up a collective whose wait has timed out."""
    deadline = time.monotonic() + SLICE.total_seconds()
    while time.monotonic() < deadline and not work.is_completed():
        os.sched_yield()
    if not work.is_completed():
        return False
    work.wait()
    return True

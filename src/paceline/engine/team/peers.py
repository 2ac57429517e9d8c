"""Who the other ranks are, whether those of this host still live, and how far their clocks are apart."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.comm import liveness
from paceline.core.types import Nanoseconds
from paceline.engine.team.group import Group
from paceline.engine.team.world import World, host_name

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


class Peers:
    """All ranks of a run.

    Args:
        world: whose.
        group: by which they introduce themselves.
    """

    def __init__(self, world: World, group: Group | None) -> None:
        self.me = Peer.me(world.rank)
        self.all: list[Peer] = [self.me] if group is None else group.gather(self.me)
        self._pidfds: dict[int, int] = {}
        for peer in self.all:
            if peer.kernel == self.me.kernel and peer.rank != world.rank:
                self._pidfds[peer.rank] = liveness.open_pid(peer.pid)
        self.ahead_ns: Nanoseconds = 0 if group is None else self._ahead(group)
        """How far rank 0's clock is ahead of this host's."""

    def gone(self) -> Peer | None:
        """One of this host that has ended, if any has."""
        for rank, pidfd in self._pidfds.items():
            if not liveness.alive(pidfd):
                return self.all[rank]
        return None

    def close(self) -> None:
        """Look no more."""
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        self._pidfds.clear()

    def _ahead(self, group: Group) -> Nanoseconds:
        """Asked of rank 0, one rank after the other, by those who don't share its clock."""
        first, ahead = self.all[0], 0
        for peer in self.all[1:]:
            if peer.kernel == first.kernel:
                continue
            if self.me.rank == 0:
                _answer(group.handle, peer.rank)
            elif self.me.rank == peer.rank:
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

"""Where a process is woken, whatever group the news comes from; and the doors of its peers.

A door is a page of shared memory with one word, on which its owner sleeps. Peers reach it through
``/proc/PID/fd/N`` of its owner, so that nothing has a name that could outlive the job.
"""

import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from paceline.comm import liveness
from paceline.comm.shared_memory import SharedMemory
from paceline.comm.wakeup import Futex, Wakeup, fence
from paceline.core.errors import CollectiveError
from paceline.core.types import Nanoseconds

TOKEN_BYTES = 16
"""At the start of what is shared: tells it from whatever else a file descriptor might stand for."""

SPIN_NS: Nanoseconds = 50_000
"""With more ranks than cores a wait that looks for longer keeps those from running that it waits for."""

_WORD = slice(64, 72)
_SIZE = 128


class WakeupPage:
    """One process's, as its owner or a peer sees it."""

    def __init__(self, segment: SharedMemory) -> None:
        self._segment = segment
        word = segment.buffer[_WORD].cast("q")
        self.wakeup = Wakeup(Futex(word), word, SPIN_NS)

    @property
    def place(self) -> "PageAddress":
        """Where peers find it."""
        return place_of(self._segment)


@dataclass(frozen=True, slots=True)
class PageAddress:
    """Where a segment of another process lies."""

    pid: int
    fd: int
    size_bytes: int
    token: str

    def open(self) -> SharedMemory:
        """Map it.

        Raises:
            OSError: its process has gone, or may not be looked into.
            CollectiveError: what lies there is another's.
        """
        path = f"/proc/{self.pid}/fd/{self.fd}"
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(fd).st_size != self.size_bytes:
            os.close(fd)
            raise CollectiveError(f"{path} is not what was to be found there")
        segment = SharedMemory.attach(fd, self.size_bytes)
        if bytes(segment.buffer[:TOKEN_BYTES]).hex() != self.token:
            segment.close()
            raise CollectiveError(f"{path} is not what was to be found there")
        return segment


def create(name: str, size_bytes: int, *, reserved_bytes: int = 0) -> SharedMemory:
    """Shared memory that peers can find by its :func:`place_of`."""
    segment = SharedMemory.create(name, size_bytes, reserved_bytes=reserved_bytes)
    segment.buffer[:TOKEN_BYTES] = secrets.token_bytes(TOKEN_BYTES)
    return segment


def place_of(segment: SharedMemory) -> PageAddress:
    """Where peers find what this process has made."""
    token = bytes(segment.buffer[:TOKEN_BYTES]).hex()
    return PageAddress(os.getpid(), segment.fd, segment.size_bytes, token)


@cache
def mine() -> WakeupPage:
    """This process's door; one for all its groups, since it can sleep at one only."""
    return WakeupPage(create("door", _SIZE))


@dataclass(frozen=True, slots=True)
class Peer:
    """Another process of a group, or this one."""

    pid: int
    pidfd: int
    door: WakeupPage

    @property
    def alive(self) -> bool:
        return liveness.alive(self.pidfd)


@cache
def peer(place: PageAddress) -> Peer:
    """The process whose door is there; the same for all groups. Raises as :meth:`PageAddress.open`."""
    pidfd = liveness.open_pid(place.pid)
    return Peer(place.pid, pidfd, WakeupPage(place.open()))


def wake(peers: Iterable[Peer]) -> None:
    """Ring those that sleep; what they are to see has been written before."""
    fence()
    for other in peers:
        other.door.wakeup.notify_fenced()


def host() -> str:
    """Tells this host, since its start, from all others; and a container or network namespace from its neighbours."""
    spaces = (os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))
    return " ".join([Path("/proc/sys/kernel/random/boot_id").read_text().strip(), *spaces])

"""The shared memory of one process group: its layout, its members, their rendezvous, and how one wakes another.

Two kinds of segment are shared. The *region* belongs to a group and holds its counters, data and failures. A *wakeup
page* belongs to a process and holds one word, on which the process sleeps whatever group the news comes from, since it
can sleep on one word only. Members find both through ``/proc/PID/fd/N`` of the owner, so that nothing has a name that
could outlive the job. Linux only.

::

    | token | posted | failures | headers | notes | stages | channels |
              N        N          2 x N     2 x N   2 x N    N x N         N ranks; 2: even and odd rounds

A round's headers, notes and stages are those of its parity, so that a fast rank can write the next round while a slow
one still reads this one.
"""

import json
import os
import secrets
import socket
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from paceline.comm import liveness
from paceline.comm.shared_memory import SharedMemory
from paceline.comm.wakeup import Futex, Wakeup, fence
from paceline.core.errors import CollectiveError, InputError, WaitTimeoutError
from paceline.core.types import Nanoseconds, Seconds

LINE = 64
"""Bytes of a cache line. Words that different ranks write lie on different lines, or each write would slow all."""

PAGE = 4096

TOKEN_BYTES = 16
"""Random bytes at the start of a segment: they tell it from whatever else a file descriptor might have become."""

FAILURE_BYTES = 2048
"""Bytes for the failure that a rank reports: a flag, the length, and the text."""

PIECE_BYTES = 256 * 1024
"""Bytes of one slot of a channel."""

PIECES = 4
"""Slots of a channel: how many pieces a sender may be ahead of its receiver."""

STAGE_BYTES = 2**21
"""Bytes that a rank shows the others in one round: smaller rounds have more barriers. On 2 cores of an Intel Xeon
100 MiB among 8 ranks took 180 ms with 1 MiB, 162 with 2 and 165 with 4."""

SPIN_NS: Nanoseconds = 50_000
"""Longest spin of a wait. With more ranks than cores a longer one keeps those from running that it waits for."""

OTHERWISE = "write init_process_group('gloo'), or 'nccl' for GPUs"

_WORD = 8
_WAKEUP_WORD, _WAKEUP_BYTES = slice(LINE, LINE + _WORD), 2 * LINE


@dataclass(frozen=True, slots=True)
class RegionLayout:
    """Offsets in bytes, in the order in which they lie in the region.

    Args:
        size: N, the number of ranks.
        stage_bytes: bytes that a rank can show the others in one round; a multiple of the page size.
    """

    size: int
    stage_bytes: int

    @property
    def posted(self) -> int:
        """One line for each rank: how many rounds it has posted."""
        return LINE

    @property
    def failures(self) -> int:
        return self.posted + LINE * self.size

    @property
    def headers(self) -> int:
        """One line for each parity of the round and each rank: the fingerprint of its collective."""
        return self.failures + FAILURE_BYTES * self.size

    @property
    def sizes(self) -> int:
        """2·N words for each parity and each rank: elements that it has for each rank, then that it expects of each."""
        return self.headers + 2 * LINE * self.size

    @property
    def stages(self) -> int:
        return _paged(self.sizes + 2 * self.size * 2 * self.size * _WORD)

    @property
    def channels(self) -> int:
        return self.stages + 2 * self.size * self.stage_bytes

    @property
    def channel_bytes(self) -> int:
        """Two counters on lines of their own, then the envelopes of the slots, then their pieces."""
        return _paged(LINE * (2 + PIECES)) + PIECES * PIECE_BYTES

    @property
    def size_bytes(self) -> int:
        return self.channels + self.size * self.size * self.channel_bytes

    def stage(self, parity: int, rank: int) -> int:
        return self.stages + (parity * self.size + rank) * self.stage_bytes

    def channel(self, source: int, destination: int) -> int:
        return self.channels + (source * self.size + destination) * self.channel_bytes


def _paged(size_bytes: int) -> int:
    return -(-size_bytes // PAGE) * PAGE


@dataclass(frozen=True, slots=True)
class SegmentAddress:
    """Where another process finds a segment."""

    pid: int
    fd: int
    size_bytes: int
    token: str

    def open(self) -> SharedMemory:
        """Map the segment.

        Raises:
            OSError: its process has ended, or belongs to another user or container.
            CollectiveError: the descriptor is another file by now.
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


def create_segment(name: str, size_bytes: int, *, reserved_bytes: int = 0) -> SharedMemory:
    """Create shared memory that peers can find by its :func:`address_of`."""
    segment = SharedMemory.create(name, size_bytes, reserved_bytes=reserved_bytes)
    segment.buffer[:TOKEN_BYTES] = secrets.token_bytes(TOKEN_BYTES)
    return segment


def address_of(segment: SharedMemory) -> SegmentAddress:
    """Return where peers find a segment that this process has created."""
    return SegmentAddress(os.getpid(), segment.fd, segment.size_bytes, bytes(segment.buffer[:TOKEN_BYTES]).hex())


@cache
def own_wakeup_page() -> SharedMemory:
    """Return this process's wakeup page; one for all its groups."""
    return create_segment("wakeup", _WAKEUP_BYTES)


def wakeup_on(page: SharedMemory) -> Wakeup:
    """Return the wakeup of a page's owner, for the owner or a peer."""
    word = page.buffer[_WAKEUP_WORD].cast("q")
    return Wakeup(Futex(word), word, SPIN_NS)


@dataclass(frozen=True, slots=True)
class Peer:
    """A process of a group, this one included."""

    pidfd: int
    wakeup: Wakeup


@cache
def peer_at(page: SegmentAddress) -> Peer:
    """Return the process that owns a wakeup page; the same object for all groups. Raises as SegmentAddress.open."""
    return Peer(liveness.open_pid(page.pid), wakeup_on(page.open()))


def host_id() -> str:
    """Return a name of this host that holds until it restarts; containers and network namespaces differ."""
    namespaces = (os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))
    return " ".join([Path("/proc/sys/kernel/random/boot_id").read_text().strip(), *namespaces])


class Region:
    """A group's shared memory, as one rank maps it.

    Args:
        name: of the group, in messages.
        rank: this process's, in the group.
        ranks: the members' ranks in the whole job; messages name them.
        segment: laid out by ``layout``.
        layout: for the group's size.
        peers: all members, in order.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        ranks: Sequence[int],
        segment: SharedMemory,
        layout: RegionLayout,
        peers: Sequence[Peer],
    ) -> None:
        self.name, self.rank, self.ranks, self.layout = name, rank, tuple(ranks), layout
        self.size = len(peers)
        self._peers = tuple(peers)
        self._others = tuple(peer.wakeup for other, peer in enumerate(peers) if other != rank)
        self._segment: SharedMemory | None = segment
        self._failures = []
        for member in range(self.size):
            start = layout.failures + FAILURE_BYTES * member
            self._failures.append((self.words(start, 2), self.bytes(start + LINE, FAILURE_BYTES - LINE)))

    def words(self, offset: int, count: int) -> "memoryview[int]":
        """Return a view of 8-byte words."""
        return self.bytes(offset, count * _WORD).cast("q")

    def bytes(self, offset: int, size_bytes: int) -> "memoryview[int]":
        assert self._segment is not None, "this group has been destroyed"
        return self._segment.buffer[offset : offset + size_bytes]

    def tensor(self, offset: int, size_bytes: int, dtype: torch.dtype) -> Tensor:
        """Return a view of bytes as a vector."""
        assert self._segment is not None, "this group has been destroyed"
        return self._segment.tensor(offset, (size_bytes // dtype.itemsize,), dtype)

    def wake_all(self) -> None:
        """Wake all other members that sleep."""
        fence()  # one for all of them: between what was written and the reading of their words
        for wakeup in self._others:
            wakeup.notify_fenced()

    def wake(self, rank: int) -> None:
        """Wake one member, if it sleeps."""
        self._peers[rank].wakeup.notify()

    def fail(self, text: str) -> None:
        """Report a failure to every member, unless one has been reported; the group is of no use afterwards."""
        if self.failure() is None:
            words, content = self._failures[self.rank]
            encoded = text.encode()[: len(content)]
            content[: len(encoded)] = encoded
            words[1] = len(encoded)
            words[0] = 1  # the flag last: a rank that reads it finds the text complete
        self.wake_all()

    def failure(self) -> str | None:
        """Return the failure of the lowest rank that has reported one; None: the group is sound."""
        if self._segment is None:
            return f"group {self.name} has been destroyed; make its calls before that"
        for words, content in self._failures:
            if words[0]:
                return bytes(content[: words[1]]).decode(errors="replace")
        return None

    def exited(self, ranks: Iterable[int]) -> list[int]:
        """Return those of some members whose processes have ended."""
        return [rank for rank in ranks if not liveness.alive(self._peers[rank].pidfd)]

    def named(self, ranks: Iterable[int]) -> str:
        """Name members by their ranks in the job: ``rank 3``, ``ranks 1, 2``."""
        names = [str(self.ranks[rank]) for rank in ranks]
        return f"rank{'s' if len(names) > 1 else ''} {', '.join(names)}"

    def close(self) -> None:
        """Unmap the memory; it is freed when all members have."""
        if self._segment is not None:
            self._failures = []
            self._segment.close()
            self._segment = None


def rendezvous(store: Store, name: str, rank: int, ranks: Sequence[int], timeout_s: Seconds) -> Region:
    """Find the other members and the group's memory, which the first rank creates.

    Raises:
        InputError: members are on different hosts, or can't map each other's memory.
        WaitTimeoutError: some did not come in time.
    """
    layout = RegionLayout(len(ranks), STAGE_BYTES)
    created = None
    if rank == 0:
        created = create_segment("group", layout.size_bytes, reserved_bytes=layout.channels)
    segment_address = asdict(address_of(created)) if created is not None else None
    page_address = asdict(address_of(own_wakeup_page()))
    own = {"host": host_id(), "name": socket.gethostname(), "page": page_address, "segment": segment_address}
    keys = [str(member) for member in range(len(ranks))]
    store.set(keys[rank], json.dumps(own))
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        absent = [str(ranks[member]) for member, key in enumerate(keys) if not store.check([key])]
        raise WaitTimeoutError(
            f"rank {ranks[rank]} waited {timeout_s:g} s for ranks {', '.join(absent)} to join group {name}; "
            "start them, or write a larger timeout="
        ) from error
    members = [json.loads(store.get(key)) for key in keys]
    for other, member in zip(ranks, members, strict=True):
        if member["host"] != members[0]["host"]:
            raise InputError(
                f"ranks {ranks[0]} and {other} are on different hosts ({members[0]['name']}, {member['name']}), but "
                f"backend shm joins CPU ranks of one host; {OTHERWISE}"
            )
    try:
        peers = [peer_at(SegmentAddress(**member["page"])) for member in members]
        segment = created or SegmentAddress(**members[0]["segment"]).open()
    except (OSError, CollectiveError) as error:
        raise InputError(
            f"rank {ranks[rank]} can't reach the memory of another rank of group {name}: {error}; backend shm is for "
            f"ranks of one user in one container, that are all still there; {OTHERWISE}"
        ) from error
    return Region(name, rank, ranks, segment, layout, peers)

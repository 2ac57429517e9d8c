"""The shared memory of one process group: its layout, its members, and their rendezvous.

The shared memory of one group, and who is in it.
"""

import json
import socket
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from paceline.comm.shared_memory import SharedMemory
from paceline.comm.shm import wakeup_page
from paceline.comm.shm.wakeup_page import PageAddress, Peer
from paceline.core.errors import CollectiveError, InputError, WaitTimeoutError
from paceline.core.types import Seconds

LINE = 64
"""Bytes. Words that different ranks write are so far apart that they share no cache line."""

PAGE = 4096

TOKEN_BYTES = 16

FAILURE_BYTES = 2048
"""Of what a rank says when it fails: two words, whether and how long, and the text."""

PIECE_BYTES = 256 * 1024
"""What one slot of a channel carries."""

PIECES = 4
"""Slots of a channel: how many pieces a sender may be ahead."""

_WORD = 8


@dataclass(frozen=True, slots=True)
class RegionLayout:
    """Offsets in bytes, for a group of so many ranks.

    Args:
        size: N, the ranks.
        stage_bytes: what a rank can show the others in one round; a multiple of the page size.
    """

    size: int
    stage_bytes: int

    @property
    def posted(self) -> int:
        """One line a rank: how many rounds it has posted."""
        return LINE

    @property
    def failures(self) -> int:
        return self.posted + LINE * self.size

    @property
    def headers(self) -> int:
        """One line a rank and parity: what it calls."""
        return self.failures + FAILURE_BYTES * self.size

    @property
    def notes_words(self) -> int:
        """Of one rank and parity: how much it has for each rank, then how much it expects from each."""
        return 2 * self.size

    @property
    def notes(self) -> int:
        return self.headers + 2 * LINE * self.size

    @property
    def stages(self) -> int:
        return _paged(self.notes + 2 * self.size * self.notes_words * _WORD)

    @property
    def channels(self) -> int:
        return self.stages + 2 * self.size * self.stage_bytes

    @property
    def channel_bytes(self) -> int:
        """Two lines that count, then the headers of the slots, then their pieces."""
        return _paged(LINE * (2 + PIECES)) + PIECES * PIECE_BYTES

    @property
    def size_bytes(self) -> int:
        return self.channels + self.size * self.size * self.channel_bytes

    def stage(self, parity: int, rank: int) -> int:
        """A rank's stage in the rounds of a parity."""
        return self.stages + (parity * self.size + rank) * self.stage_bytes

    def channel(self, source: int, destination: int) -> int:
        """Where the channel between two ranks begins."""
        return self.channels + (source * self.size + destination) * self.channel_bytes


def _paged(size_bytes: int) -> int:
    return -(-size_bytes // PAGE) * PAGE


OTHERWISE = "write init_process_group('gloo'), or 'nccl' for GPUs"

STAGE_BYTES = 2**21
"""What a rank shows the others in one round: smaller rounds meet more often. On 2 cores of an Intel Xeon 100 MiB among
8 ranks took 180 ms with 1 MiB, 162 with 2 and 165 with 4."""


@dataclass(frozen=True, slots=True)
class Member:
    """What a rank tells the others of itself."""

    host: str
    name: str
    """Of the host, as people know it."""
    door: PageAddress
    segment: PageAddress | None
    """Of the group: the first rank makes it."""


class Region:
    """A group's shared memory, as one rank sees it.

    Args:
        name: of the group, in messages.
        rank: mine, in the group.
        ranks: of the members, in the whole job; messages name them.
        segment: laid out by ``layout``.
        layout: for so many ranks.
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
        self.name, self.rank, self.ranks, self.layout, self.peers = name, rank, tuple(ranks), layout, tuple(peers)
        self.size = len(self.peers)
        self.others = tuple(p for i, p in enumerate(self.peers) if i != rank)
        self._segment: SharedMemory | None = segment
        self._failures = [self._failure(i) for i in range(self.size)]

    @property
    def segment(self) -> SharedMemory:
        """Its memory, until it is closed."""
        assert self._segment is not None, "this group has been destroyed"
        return self._segment

    def words(self, offset: int, count: int) -> "memoryview[int]":
        """So many 8-byte words."""
        return self.segment.buffer[offset : offset + count * _WORD].cast("q")

    def bytes(self, offset: int, size_bytes: int) -> "memoryview[int]":
        """So many bytes."""
        return self.segment.buffer[offset : offset + size_bytes]

    def tensor(self, offset: int, size_bytes: int, dtype: torch.dtype) -> Tensor:
        """So many bytes as a vector of a dtype."""
        return self.segment.tensor(offset, (size_bytes // dtype.itemsize,), dtype)

    def wake(self) -> None:
        """Ring all other members that sleep."""
        wakeup_page.wake(self.others)

    def wake_one(self, rank: int) -> None:
        """Ring one, if it sleeps."""
        self.peers[rank].door.wakeup.notify()

    def fail(self, text: str) -> None:
        """Have every member told what happened; the first word stands."""
        if self.failure() is None:
            words, letters = self._failures[self.rank]
            said = text.encode()[: len(letters)]
            letters[: len(said)] = said
            words[1] = len(said)
            words[0] = 1
        self.wake()

    def failure(self) -> str | None:
        """What has gone wrong, as the first member that noticed it said."""
        if self._segment is None:
            return f"group {self.name} has been destroyed; make its calls before that"
        for words, letters in self._failures:
            if words[0]:
                return bytes(letters[: words[1]]).decode(errors="replace")
        return None

    def gone(self, ranks: Iterable[int]) -> list[int]:
        """Which of these members have ended."""
        return [rank for rank in ranks if not self.peers[rank].alive]

    def named(self, ranks: Iterable[int]) -> str:
        """Members as the job knows them: ``rank 3``, ``ranks 1, 2``."""
        known = [str(self.ranks[rank]) for rank in ranks]
        return f"rank{'s' if len(known) > 1 else ''} {', '.join(known)}"

    def close(self) -> None:
        """Let go of the memory; it is gone when all members have."""
        if self._segment is not None:
            self._failures = []
            self._segment.close()
            self._segment = None

    def _failure(self, rank: int) -> "tuple[memoryview[int], memoryview[int]]":
        at = self.layout.failures + FAILURE_BYTES * rank
        return self.words(at, 2), self.bytes(at + LINE, FAILURE_BYTES - LINE)


def meet(store: Store, name: str, rank: int, ranks: Sequence[int], timeout_s: Seconds) -> Region:
    """Find the other members, and the memory that is shared with them.

    Raises:
        InputError: members are on different hosts, or can't look into each other's memory.
        WaitTimeoutError: some did not come.
    """
    layout = RegionLayout(len(ranks), STAGE_BYTES)
    made = None
    if rank == 0:
        made = wakeup_page.create("group", layout.size_bytes, reserved_bytes=layout.channels)
    told = Member(
        wakeup_page.host(), socket.gethostname(), wakeup_page.mine().place, wakeup_page.place_of(made) if made else None
    )
    store.set(str(rank), json.dumps(asdict(told)))
    members = _members(store, name, rank, ranks, timeout_s)
    _refuse_hosts(members, ranks)
    place = members[0].segment
    assert place is not None, "the first rank makes the segment"
    try:
        peers = [wakeup_page.peer(member.door) for member in members]
        segment = made or place.open()
    except (OSError, CollectiveError) as error:
        raise InputError(
            f"rank {ranks[rank]} can't reach the memory of another rank of group {name}: {error}; backend shm is for "
            f"ranks of one user in one container, that are all still there; {OTHERWISE}"
        ) from error
    return Region(name, rank, ranks, segment, layout, peers)


def _members(store: Store, name: str, rank: int, ranks: Sequence[int], timeout_s: Seconds) -> list[Member]:
    keys = [str(i) for i in range(len(ranks))]
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        absent = [ranks[i] for i, key in enumerate(keys) if not store.check([key])]
        raise WaitTimeoutError(
            f"rank {ranks[rank]} waited {timeout_s:g} s for ranks {', '.join(map(str, absent))} to join group {name}; "
            "start them, or write a larger timeout="
        ) from error
    return [_member(json.loads(store.get(key))) for key in keys]


def _member(told: dict[str, Any]) -> Member:
    segment = PageAddress(**told["segment"]) if told["segment"] else None
    return Member(told["host"], told["name"], PageAddress(**told["door"]), segment)


def _refuse_hosts(members: Sequence[Member], ranks: Sequence[int]) -> None:
    first = members[0]
    for rank, member in zip(ranks, members, strict=True):
        if member.host != first.host:
            raise InputError(
                f"ranks {ranks[0]} and {rank} are on different hosts ({first.name}, {member.name}), but backend shm "
                f"joins CPU ranks of one host; {OTHERWISE}"
            )

"""The shared memory of one process group: its layout, the failures that ranks report in it, and its staged rounds.

::

    | token | posted | failures | headers | sizes | stages | channels |
              N        N          2 x N     2 x N   2 x N    N x N         N ranks; 2: even and odd rounds

In a round of a collective every rank writes its data to its stage, and in the first one the fingerprint of its call to
its header, before any rank goes on::

    rank 0   write  post 1 .......... read | write  post 2 . read |
    rank 1   write ........... post 1 read | write ... post 2 read |
             stages of odd rounds            stages of even rounds

A rank that posts round n + 1 has read all of round n. So when all have posted n + 1, the stages of round n may be
written again: two stages and one counter for each rank are enough, and a fast rank writes the next round while a slow
one still reads this one.
"""

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import torch
from torch import Tensor

from paceline.comm import liveness
from paceline.comm.shared_memory import SharedMemory
from paceline.comm.wakeup import FENCED, Wakeup, fence
from paceline.core.errors import CollectiveError

# Bytes of a cache line. Words that different ranks write lie on different lines, or each write would slow all.
LINE = 64

WORD = 8

PAGE = 4096

# Random bytes at the start of a segment: they tell it from whatever else a file descriptor might have become.
TOKEN_BYTES = 16

# Bytes for the failure that a rank reports: a flag, the length, and the text.
FAILURE_BYTES = 2048

# Bytes for the fingerprint of a rank's call.
HEADER_BYTES = 2 * LINE

# Bytes of one slot of a channel.
PIECE_BYTES = 256 * 1024

# Slots of a channel: how many pieces a sender may be ahead of its receiver.
PIECES = 4

# Views that are kept for the next collective of the same size: creating them takes as long as a small sum.
MAX_VIEWS = 1024

OTHERWISE = "write init_process_group('gloo'), or 'nccl' for GPUs"

# A collective in steps: between two of them it waits until the function that it has yielded returns True.
Steps: TypeAlias = Iterator[Callable[[], bool]]


class RegionLayout:
    """Offsets in bytes, in the order in which they lie in the region.

    Args:
        size: N, the number of ranks.
        stage_bytes: bytes that a rank can show the others in one round; a multiple of the page size.
    """

    def __init__(self, size: int, stage_bytes: int) -> None:
        self.size, self.stage_bytes = size, stage_bytes
        self.posted = LINE
        """One line for each rank: how many rounds it has posted."""
        self.failures = self.posted + LINE * size
        self.headers = self.failures + FAILURE_BYTES * size
        """For each parity of the round and each rank: the fingerprint of its call."""
        self.sizes = self.headers + 2 * HEADER_BYTES * size
        """2·N words for each parity and each rank: elements that it has for each rank, then that it expects of each."""
        self.stages = _paged(self.sizes + 2 * size * 2 * size * WORD)
        """One for each parity and each rank."""
        self.channels = self.stages + 2 * size * stage_bytes
        """One for each source and each destination."""
        self.channel_bytes = _paged(LINE * (2 + PIECES)) + PIECES * PIECE_BYTES
        """Two counters on lines of their own, then the envelopes of the slots, then their pieces."""
        self.size_bytes = self.channels + size * size * self.channel_bytes


def _paged(size_bytes: int) -> int:
    return -(-size_bytes // PAGE) * PAGE


@dataclass(frozen=True, slots=True)
class Peer:
    """A process of a group, this one included."""

    pidfd: int
    wakeup: Wakeup


@dataclass(eq=False)
class Region:
    """A group's shared memory, as one rank maps it.

    Args:
        name: of the group, in messages.
        rank: this process's, in the group.
        ranks: the members' ranks in the whole job; messages name them.
        layout: for the group's size.
        peers: all members, in order.
        segment: laid out by ``layout``; None once the group has been destroyed.
    """

    name: str
    rank: int
    ranks: Sequence[int]
    layout: RegionLayout
    peers: Sequence[Peer]
    segment: SharedMemory | None

    def __post_init__(self) -> None:
        self.size = self.layout.size
        self._others = tuple(peer.wakeup for other, peer in enumerate(self.peers) if other != self.rank)
        starts = range(self.layout.failures, self.layout.headers, FAILURE_BYTES)
        self._failures = [(self.words(at, 2), self.bytes(at + LINE, FAILURE_BYTES - LINE)) for at in starts]

    def words(self, offset: int, count: int) -> "memoryview[int]":
        """Return a view of 8-byte words."""
        return self.bytes(offset, count * WORD).cast("q")

    def bytes(self, offset: int, size_bytes: int) -> "memoryview[int]":
        assert self.segment is not None, "this group has been destroyed"
        return self.segment.buffer[offset : offset + size_bytes]

    def tensor(self, offset: int, size_bytes: int, dtype: torch.dtype) -> Tensor:
        """Return a view of bytes as a vector."""
        assert self.segment is not None, "this group has been destroyed"
        return self.segment.tensor(offset, (size_bytes // dtype.itemsize,), dtype)

    def wake_all(self) -> None:
        """Wake all other members that sleep."""
        fence()  # one for all of them: between what was written and the reading of their words
        for wakeup in self._others:
            wakeup.notify_fenced()

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
        if self.segment is None:
            return f"group {self.name} has been destroyed; make its calls before that"
        for words, content in self._failures:
            if words[0]:
                return bytes(content[: words[1]]).decode(errors="replace")
        return None

    def exited(self, ranks: Iterable[int]) -> list[int]:
        """Return those of some members whose processes have ended."""
        return [rank for rank in ranks if not liveness.alive(self.peers[rank].pidfd)]

    def named(self, ranks: Iterable[int]) -> str:
        """Name members by their ranks in the job: ``rank 3``, ``ranks 1, 2``."""
        names = [str(self.ranks[rank]) for rank in ranks]
        return f"rank{'s' if len(names) > 1 else ''} {', '.join(names)}"

    def close(self) -> None:
        """Unmap the memory; it is freed when all members have."""
        if self.segment is not None:
            self._failures = []
            self.segment.close()
            self.segment = None


@lru_cache(maxsize=4096)
def fingerprint(
    call: str,
    dtype: torch.dtype | None = None,
    elements: int | None = None,
    *,
    root: int | None = None,
    rule: str = "",
    sizes: tuple[int, ...] = (),
) -> bytes:
    """Return what must be the same on all ranks that make a call, as the text of a header.

    Args:
        call: the collective's name.
        dtype: of its tensors; None: a barrier has none.
        elements: of this rank's tensor; None if ranks may differ, and are compared in another way.
        root: rank in the group.
        rule: of a reduction.
        sizes: of several parts, if ranks must cut alike; a checksum stands for them.

    >>> fingerprint("all_reduce", torch.float32, 1000, rule="sum").rstrip(b"\\0")
    b'all_reduce(sum) of 1,000 float32'
    """
    text = f"{call}({rule})" if rule else call
    if root is not None:
        text += f" with root {root}"
    if dtype is not None:
        count = "" if elements is None else f"{elements:,} "
        text += f" of {count}{str(dtype).removeprefix('torch.')}"
    if sizes:
        text += f" in parts (checksum {zlib.crc32(struct.pack(f'<{len(sizes)}q', *sizes)):08x})"
    return text.encode().ljust(HEADER_BYTES, b"\0")


class StagedRounds:
    """The rounds of one group, as one rank makes them. Between two posts all methods mean the round being written."""

    def __init__(self, region: Region) -> None:
        self.region, self.rank, self.size = region, region.rank, region.size
        layout, header_bytes, words = region.layout, region.size * HEADER_BYTES, 2 * region.size * region.size
        self.stage_bytes = layout.stage_bytes
        self._posted = region.words(layout.posted, region.size * LINE // WORD)[:: LINE // WORD]
        self._headers = [region.bytes(layout.headers + parity * header_bytes, header_bytes) for parity in (0, 1)]
        self._own_headers = [h[self.rank * HEADER_BYTES : (self.rank + 1) * HEADER_BYTES] for h in self._headers]
        self._sizes = [region.words(layout.sizes + parity * words * WORD, words) for parity in (0, 1)]
        self._joint: dict[tuple[int, torch.dtype], Tensor] = {}
        self._stages: dict[tuple[int, torch.dtype, int | None], list[Tensor]] = {}
        self._number = 0

    def joint(self, dtype: torch.dtype) -> Tensor:
        """Return all stages as one vector, for a collective in which one rank alone shows something."""
        parity = (self._number + 1) & 1
        joint = self._joint.get((parity, dtype))
        if joint is None:
            size_bytes = self.stage_bytes * self.size
            joint = self.region.tensor(self.region.layout.stages + parity * size_bytes, size_bytes, dtype)
            self._joint[parity, dtype] = joint
        return joint

    def stages(self, dtype: torch.dtype, count: int | None = None) -> list[Tensor]:
        """Return all ranks' stages as vectors, of the first ``count`` elements if that is given."""
        key = ((self._number + 1) & 1, dtype, count)
        stages = self._stages.get(key)
        if stages is None:
            if len(self._stages) == MAX_VIEWS:
                self._stages.clear()
            stages = self._stages[key] = list(self.joint(dtype).view(self.size, -1)[:, :count])
        return stages

    def sizes(self) -> "memoryview[int]":
        """Return, rank after rank, the elements that it has for each rank, and then that it expects of each."""
        return self._sizes[(self._number + 1) & 1]

    def barrier(self, header: bytes | None) -> Steps:
        """Post this round and wait for all ranks.

        Args:
            header: the fingerprint of the call, to be compared; None in its later rounds, which then are the same.

        Raises:
            CollectiveError: ranks make different calls; on every rank alike.
        """
        if header is not None:
            self._own_headers[(self._number + 1) & 1][:] = header
        # The data before the counter: x86 keeps the order of stores, other processors need a fence.
        if not FENCED:
            fence()
        self._number = number = self._number + 1
        self._posted[self.rank] = number
        self.region.wake_all()
        if not self.all_posted():
            yield self.all_posted
        if header is None:
            return
        headers = bytes(self._headers[number & 1])
        if headers != header * self.size:
            callers: dict[str, list[int]] = {}
            for rank in range(self.size):
                line = headers[rank * HEADER_BYTES : (rank + 1) * HEADER_BYTES]
                callers.setdefault(line.rstrip(b"\0").decode(), []).append(rank)
            calls = "; ".join(f"{self.region.named(ranks)}: {call}" for call, ranks in callers.items())
            raise CollectiveError(
                f"ranks of group {self.region.name} call different things: {calls}; make the same call on all of them"
            )

    def all_posted(self) -> bool:
        """Return whether all ranks have posted the round that this rank has posted last."""
        return min(self._posted) >= self._number

    def missing(self) -> list[int]:
        """Return the ranks that have not posted it."""
        return [rank for rank, number in enumerate(self._posted) if number < self._number]

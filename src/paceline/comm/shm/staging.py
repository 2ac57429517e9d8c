"""Staged rounds of a collective: every rank shows its fingerprint and its data before any goes on.

Rounds: every rank shows the others something, and nobody goes on before all have.

::

    rank 0   write  post 1 .......... read | write  post 2 . read |
    rank 1   write ........... post 1 read | write ... post 2 read |
             stage of odd rounds            stage of even rounds

Who posts round n + 1 has read all of round n. So when all have posted n + 1, the stages of round n may be written
again: two of them are enough, and one counter a rank.
"""

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import TypeAlias

import torch
from torch import Tensor

from paceline.comm.shm.region import LINE, Region
from paceline.comm.wakeup import FENCED, fence
from paceline.core.errors import CollectiveError

_PACKED = struct.Struct("<4q2q")
_DTYPES = tuple(sorted((d for d in vars(torch).values() if isinstance(d, torch.dtype)), key=str))
"""All of them, aliases among them; every rank runs the same torch."""

_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}

NOBODY = -1
UNEVEN = -1


class CollectiveKind(IntEnum):
    """Which collective."""

    barrier = 1
    broadcast = 2
    all_reduce = 3
    reduce = 4
    all_gather = 5
    gather = 6
    scatter = 7
    reduce_scatter = 8
    all_to_all = 9


class ReduceRule(IntEnum):
    """How elements are combined."""

    nothing = 0
    sum = 1
    avg = 2
    product = 3
    min = 4
    max = 5
    band = 6
    bor = 7
    bxor = 8


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """One collective, as far as it must be the same on all ranks.

    Args:
        kind: which.
        dtype: of its tensors; None: a barrier has none.
        elements: of this rank's tensor; ``UNEVEN`` where ranks may differ, and compare in another way.
        root: rank in the group, or ``NOBODY``.
        rule: of a reduction.
        sizes: of several parts, where they must be the same on all ranks.

    >>> call = Fingerprint(CollectiveKind.all_reduce, torch.float32, 10, rule=ReduceRule.sum)
    >>> Fingerprint.unpacked(call.packed()) == call, str(call)
    (True, 'all_reduce(sum) of 10 float32')
    """

    kind: CollectiveKind
    dtype: torch.dtype | None = None
    elements: int = 0
    root: int = NOBODY
    rule: ReduceRule = ReduceRule.nothing
    sizes_sum: int = 0

    def packed(self) -> bytes:
        """One line."""
        fields = (self.kind, dtype_code(self.dtype), self.elements, self.root, self.rule, self.sizes_sum)
        return _PACKED.pack(*fields).ljust(LINE, b"\0")

    @classmethod
    def unpacked(cls, line: bytes) -> "Fingerprint":
        """What a line says."""
        kind, code, elements, root, rule, sizes_sum = _PACKED.unpack_from(line)
        return cls(
            CollectiveKind(kind), dtype_of(code) if code >= 0 else None, elements, root, ReduceRule(rule), sizes_sum
        )

    def __str__(self) -> str:
        rule = f"({self.rule.name})" if self.rule else ""
        where = f" with root {self.root}" if self.root != NOBODY else ""
        if self.dtype is None:
            return f"{self.kind.name}{where}"
        count = "" if self.elements == UNEVEN else f"{self.elements:,} "
        parts = f" in parts (checksum {self.sizes_sum:08x})" if self.sizes_sum else ""
        return f"{self.kind.name}{rule}{where} of {count}{str(self.dtype).removeprefix('torch.')}{parts}"


def dtype_code(dtype: torch.dtype | None) -> int:
    """A number for it, the same on every rank."""
    return -1 if dtype is None else _CODES[dtype]


def dtype_of(code: int) -> torch.dtype:
    """The dtype of a number."""
    return _DTYPES[code]


def checksum(sizes: Sequence[int]) -> int:
    """Of the sizes of parts, so that ranks which cut differently notice."""
    return zlib.crc32(struct.pack(f"<{len(sizes)}q", *sizes))


Steps: TypeAlias = Iterator[Callable[[], bool]]
"""A call in parts: between two of them it waits until what it has yielded is true."""

MOST_FRONTS = 1024
"""So many views are kept for the next call of the same size: making them takes as long as a small sum."""

_packed = lru_cache(maxsize=4096)(Fingerprint.packed)


class StagedRounds:
    """The rounds of one group, as one rank makes them."""

    def __init__(self, room: Region) -> None:
        self.room, self.rank, self.size = room, room.rank, room.size
        layout = room.layout
        self._posted = room.words(layout.posted, room.size * LINE // 8)[:: LINE // 8]
        self._headers = [room.bytes(layout.headers + parity * room.size * LINE, room.size * LINE) for parity in (0, 1)]
        self._mine = [h[self.rank * LINE : (self.rank + 1) * LINE] for h in self._headers]
        words = room.size * layout.notes_words
        self._notes = [room.words(layout.notes + parity * words * 8, words) for parity in (0, 1)]
        self._stages: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self._fronts: dict[tuple[int, torch.dtype, int], list[Tensor]] = {}
        self._whole: dict[tuple[int, torch.dtype], Tensor] = {}
        self._number = 0
        self.stage_bytes = layout.stage_bytes

    @property
    def _parity(self) -> int:
        """Of the round that is being written."""
        return (self._number + 1) & 1

    def stages(self, dtype: torch.dtype) -> list[Tensor]:
        """All ranks' stages of the round that is being written or, after ``post``, of the next one."""
        key = (self._parity, dtype)
        found = self._stages.get(key)
        if found is None:
            layout = self.room.layout
            found = self._stages[key] = [
                self.room.tensor(layout.stage(key[0], rank), layout.stage_bytes, dtype) for rank in range(self.size)
            ]
        return found

    def fronts(self, dtype: torch.dtype, count: int) -> list[Tensor]:
        """The first elements of all ranks' stages, as :meth:`stages`."""
        key = (self._parity, dtype, count)
        found = self._fronts.get(key)
        if found is None:
            if len(self._fronts) == MOST_FRONTS:
                self._fronts.clear()
            found = self._fronts[key] = [stage[:count] for stage in self.stages(dtype)]
        return found

    def whole(self, dtype: torch.dtype) -> Tensor:
        """All of them as one, for a call in which one rank has something to show."""
        key = (self._parity, dtype)
        found = self._whole.get(key)
        if found is None:
            layout = self.room.layout
            size_bytes = layout.stage_bytes * self.size
            found = self._whole[key] = self.room.tensor(layout.stage(key[0], 0), size_bytes, dtype)
        return found

    def notes(self) -> "memoryview[int]":
        """Of the round being written: rank after rank how much it has for each, then how much it expects from each."""
        return self._notes[self._parity]

    def say(self, call: Fingerprint) -> None:
        """Say in the round that is being written what this rank calls."""
        self._mine[self._parity][:] = _packed(call)

    def post(self) -> None:
        """Show the others what has been written."""
        if not FENCED:
            fence()
        self._number = number = self._number + 1
        self._posted[self.rank] = number
        self.room.wake()

    def all_in(self) -> bool:
        """Whether all ranks have posted this round."""
        return min(self._posted) >= self._number

    def late(self) -> list[int]:
        """Who has not."""
        return [rank for rank, number in enumerate(self._posted) if number < self._number]

    def agree(self, call: Fingerprint) -> None:
        """Raise CollectiveError, on every rank alike, where ranks call different things."""
        headers = bytes(self._headers[self._number & 1])
        if headers != _packed(call) * self.size:
            raise CollectiveError(self._differ(headers))

    def _differ(self, headers: bytes) -> str:
        groups: dict[str, list[int]] = {}
        for rank in range(self.size):
            groups.setdefault(str(Fingerprint.unpacked(headers[rank * LINE : (rank + 1) * LINE])), []).append(rank)
        said = "; ".join(f"{self.room.named(ranks)}: {call}" for call, ranks in groups.items())
        return f"ranks of group {self.room.name} call different things: {said}; make the same call on all of them"

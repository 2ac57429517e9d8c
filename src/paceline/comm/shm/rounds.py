"""Rounds: every rank shows the others something, and nobody goes on before all have.

::

    rank 0   write  post 1 .......... read | write  post 2 . read |
    rank 1   write ........... post 1 read | write ... post 2 read |
             stage of odd rounds            stage of even rounds

Who posts round n + 1 has read all of round n. So when all have posted n + 1, the stages of round n may be written
again: two of them are enough, and one counter a rank.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TypeAlias

import torch
from torch import Tensor

from paceline.comm.alarm import FENCED, fence
from paceline.comm.shm.calls import Call
from paceline.comm.shm.layout import LINE
from paceline.comm.shm.room import Room
from paceline.core.errors import CollectiveError

Steps: TypeAlias = Iterator[Callable[[], bool]]
"""A call in parts: between two of them it waits until what it has yielded is true."""

MOST_FRONTS = 1024
"""So many views are kept for the next call of the same size: making them takes as long as a small sum."""

_packed = lru_cache(maxsize=4096)(Call.packed)


class Rounds:
    """The rounds of one group, as one rank makes them."""

    def __init__(self, room: Room) -> None:
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

    def say(self, call: Call) -> None:
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

    def agree(self, call: Call) -> None:
        """Raise CollectiveError, on every rank alike, where ranks call different things."""
        headers = bytes(self._headers[self._number & 1])
        if headers != _packed(call) * self.size:
            raise CollectiveError(self._differ(headers))

    def _differ(self, headers: bytes) -> str:
        groups: dict[str, list[int]] = {}
        for rank in range(self.size):
            groups.setdefault(str(Call.unpacked(headers[rank * LINE : (rank + 1) * LINE])), []).append(rank)
        said = "; ".join(f"{self.room.named(ranks)}: {call}" for call, ranks in groups.items())
        return f"ranks of group {self.room.name} call different things: {said}; make the same call on all of them"

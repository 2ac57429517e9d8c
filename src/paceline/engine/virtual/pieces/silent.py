"""A shard that nobody answers: it computes what it would among the others, and waits for none of them."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import NamedTuple, final

import torch
from torch import Tensor

from paceline.core.types import Seconds
from paceline.replica.tensor.shards import Shards


class Call(NamedTuple):
    """A collective: what matters for the time that it takes."""

    kind: str
    elements: int
    """That one shard gives."""
    dtype: torch.dtype

    def make(self, shards: Shards) -> None:
        """One like it, among these."""
        mine, ranks = torch.ones(self.elements, dtype=self.dtype), range(shards.count)
        match self.kind:
            case "all_reduce":
                shards.all_reduce(mine, self.kind)
            case "all_gather":
                shards.all_gather(mine, [mine.shape for _ in ranks], self.kind)
            case "reduce_scatter":
                shards.reduce_scatter([mine for _ in ranks], self.kind)
            case "broadcast":
                shards.broadcast(mine, 0, self.kind)
            case "reduce":
                shards.reduce(mine, 0, self.kind)


@final
class Silent(Shards):
    """What the others would have given is made up; its shape is right, its numbers are not."""

    def __init__(self, rank: int, count: int) -> None:
        super().__init__(rank, count)
        self.calls: list[Call] = []
        """Since :meth:`begin`, in order."""
        self._pauses: list[tuple[Seconds, Seconds]] = []
        self._began = 0.0

    def begin(self) -> None:
        """Count from here."""
        self.calls, self._pauses, self._began = [], [], time.perf_counter()

    def between(self) -> list[Seconds]:
        """What was computed before, between and after the calls; what is made up takes no time."""
        starts = [start for start, _ in self._pauses]
        ends = [end for _, end in self._pauses]
        return [b - a for a, b in zip([self._began, *ends], [*starts, time.perf_counter()], strict=True)]

    def all_reduce(self, tensor: Tensor, what: str, *, largest: bool = False) -> Tensor:
        del what, largest
        with self._called("all_reduce", tensor):
            return tensor.clone()

    def all_gather(self, part: Tensor, shapes: Sequence[Sequence[int]], what: str) -> list[Tensor]:
        del what
        with self._called("all_gather", part, max(map(prod, shapes))):
            found = [part.new_ones(tuple(shape)) for shape in shapes]
            found[self.rank] = part.clone()
            return found

    def reduce_scatter(self, parts: Sequence[Tensor], what: str) -> Tensor:
        del what
        with self._called("reduce_scatter", parts[self.rank], max(part.numel() for part in parts)):
            return parts[self.rank].clone()

    def broadcast(self, tensor: Tensor, owner: int, what: str) -> Tensor:
        del owner, what
        with self._called("broadcast", tensor):
            return tensor.clone()

    def reduce(self, tensor: Tensor, owner: int, what: str) -> Tensor:
        del owner, what
        with self._called("reduce", tensor):
            return tensor.clone()

    @contextmanager
    def _called(self, kind: str, tensor: Tensor, elements: int | None = None) -> Iterator[None]:
        began = time.perf_counter()
        self.calls.append(Call(kind, tensor.numel() if elements is None else elements, tensor.dtype))
        yield
        self._pauses.append((began, time.perf_counter()))

"""The shards of one replica as threads of this process: collectives without a process, counted."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor

from paceline.replica.tensor.tp_group import TPCollectives

Made = TypeVar("Made")

TIMEOUT_S = 60.0


class Table:
    """Where all of them meet."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.brought: list[Any] = [None] * count
        self.barrier = threading.Barrier(count, timeout=TIMEOUT_S)
        self.calls: Counter[str] = Counter()
        """Of shard 0, by kind."""


class Threads(TPCollectives):
    """One of them."""

    def __init__(self, table: Table, rank: int) -> None:
        super().__init__(rank, table.count)
        self._table = table

    def all_reduce(self, tensor: Tensor, what: str, *, largest: bool = False) -> Tensor:
        each: list[Tensor] = self._meet("all_reduce", tensor, what)
        assert len({(t.shape, t.dtype) for t in each}) == 1, f"{what}: {[t.shape for t in each]}"
        return reduce(torch.maximum if largest else torch.add, each[1:], each[0].clone())

    def all_gather(self, part: Tensor, shapes: Sequence[Sequence[int]], what: str) -> list[Tensor]:
        each: list[Tensor] = self._meet("all_gather", part, what)
        assert [tuple(t.shape) for t in each] == [tuple(shape) for shape in shapes], what
        return each

    def reduce_scatter(self, parts: Sequence[Tensor], what: str) -> Tensor:
        each: list[list[Tensor]] = self._meet("reduce_scatter", [part.clone() for part in parts], what)
        return reduce(torch.add, [given[self.rank] for given in each])

    def broadcast(self, tensor: Tensor, owner: int, what: str) -> Tensor:
        each: list[Tensor] = self._meet("broadcast", tensor, what)
        assert len({(t.shape, t.dtype) for t in each}) == 1, f"{what}: {[t.shape for t in each]}"
        return each[owner]

    def reduce(self, tensor: Tensor, owner: int, what: str) -> Tensor:
        each: list[Tensor] = self._meet("reduce", tensor, what)
        assert len({(t.shape, t.dtype) for t in each}) == 1, f"{what}: {[t.shape for t in each]}"
        return sum(each[1:], each[0]) if self.rank == owner else torch.full_like(tensor, torch.nan)

    def _meet(self, kind: str, what_i_bring: Any, what: str) -> list[Any]:
        table = self._table
        table.brought[self.rank] = kind, what, what_i_bring
        table.barrier.wait()
        brought = list(table.brought)
        assert len({(k, w) for k, w, _ in brought}) == 1, [(k, w) for k, w, _ in brought]
        if self.rank == 0:
            table.calls[kind] += 1
        made = [_cloned(each) for _, _, each in brought]
        table.barrier.wait()
        return made


def _cloned(brought: Any) -> Any:
    return brought.detach().clone() if isinstance(brought, Tensor) else [part.detach().clone() for part in brought]


def together(count: int, work: Callable[[TPCollectives], Made]) -> tuple[list[Made], Counter[str]]:
    """What each of so many shards makes, and the collectives that it took."""
    table = Table(count)

    def one(rank: int) -> Made:
        try:
            return work(Threads(table, rank))
        except BaseException:
            table.barrier.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(one, rank) for rank in range(count)]
        failures = [future.exception() for future in futures]
        broken = [f for f in failures if f is not None and not isinstance(f, threading.BrokenBarrierError)]
        if broken:
            raise broken[0]
        return [future.result() for future in futures], table.calls

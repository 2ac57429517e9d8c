"""Measure collectives and messages between processes of this host; fake collectives for ranks that nobody answers.

What collectives and messages take between processes of this host, through shared memory.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import NamedTuple, final

import torch
from torch import Tensor

from paceline.core.mesh import Coordinate, Mesh
from paceline.core.types import Seconds
from paceline.engine.spmd.p2p import ProcessGroupP2P, Routes
from paceline.engine.spmd.rank_context import RankContext
from paceline.engine.spmd.tensor_parallel_rank import GroupShards
from paceline.replica.tensor.tp_group import TPCollectives


class Call(NamedTuple):
    """A collective: what matters for the time that it takes."""

    kind: str
    elements: int
    """That one shard gives."""
    dtype: torch.dtype

    def make(self, shards: TPCollectives) -> None:
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
class FakeShards(TPCollectives):
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


REPEATS = 9
IN_A_ROW = 5
"""Calls that are timed as one: those who have just met are not yet in step."""


class Message(NamedTuple):
    """What a value takes on its way from one stage to the next."""

    send: Seconds = 0.0
    """For which its maker is busy."""
    take: Seconds = 0.0
    """For which its consumer is busy."""
    way: Seconds = 0.0
    """Between the two."""


def collectives(context: RankContext, calls: Iterable[Call]) -> Mapping[Call, Seconds]:
    """Of each kind and size; all ranks measure the same ones together."""
    assert context.communicator is not None, "there are two at least"
    shards = GroupShards(context.communicator, context.world.rank)
    return {call: _in_a_row(context, lambda call=call: call.make(shards)) for call in dict.fromkeys(calls)}  # type: ignore[misc]


def message(context: RankContext, nbytes: int) -> Message:
    """Of so many bytes, from the first rank to the second and back; the others look on."""
    assert context.communicator is not None, "there are two at least"
    if context.world.rank > 1:
        return _medians([_nothing(context) for _ in range(REPEATS)])
    rank = context.world.rank
    wire = ProcessGroupP2P(context.communicator, Routes(Mesh(1, (1,) * context.world.size), Coordinate(0, rank)))
    return _medians([_there_and_back(context, wire, nbytes) for _ in range(REPEATS)])


def meet(context: RankContext) -> None:
    """Wait for all others."""
    context.gather(None, "the others, to begin together")


def _nothing(context: RankContext) -> Message:
    for _ in range(3):
        meet(context)
    return Message()


def _there_and_back(context: RankContext, wire: ProcessGroupP2P, nbytes: int) -> Message:
    rank, value = context.world.rank, torch.ones(max(1, nbytes // 4))
    meet(context)
    began = time.perf_counter()
    if rank == 0:
        wire.isend(value, 1, "a value")
        send = time.perf_counter() - began
        wire.irecv(value.shape, value.dtype, 1, "a value").wait()
        both = time.perf_counter() - began
    else:
        arrived = wire.irecv(value.shape, value.dtype, 0, "a value").wait()
        wire.isend(arrived, 0, "a value")
        send = both = 0.0
    wire.wait_sends()
    meet(context)
    if rank == 1:
        wire.isend(value, 0, "a value")
    meet(context)  # it lies there
    began = time.perf_counter()
    if rank == 0:
        wire.irecv(value.shape, value.dtype, 1, "a value").wait()
    take = time.perf_counter() - began
    wire.wait_sends()
    return Message(send, take, max(0.0, both / 2 - send - take))


def _medians(found: Sequence[Message]) -> Message:
    return Message(*(statistics.median(each) for each in zip(*found, strict=True)))


def _in_a_row(context: RankContext, work: Callable[[], None]) -> Seconds:
    found = []
    for _ in range(REPEATS):
        meet(context)
        began = time.perf_counter()
        for _ in range(IN_A_ROW):
            work()
        found.append((time.perf_counter() - began) / IN_A_ROW)
    return statistics.median(found)

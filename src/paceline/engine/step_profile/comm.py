"""Measure collectives and messages between processes of this host; fake collectives for a rank that runs alone."""

import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import NamedTuple, final

import torch
from torch import Tensor

from paceline.core.mesh import Coordinate, Mesh
from paceline.core.types import Seconds
from paceline.engine.spmd.p2p import ProcessGroupP2P, Routes
from paceline.engine.spmd.rank_context import RankContext
from paceline.engine.spmd.tensor_parallel_rank import ProcessGroupTP
from paceline.replica.tensor.tp_group import TPCollectives


class CollectiveCall(NamedTuple):
    """A collective, by what its time depends on."""

    kind: str
    elements: int
    """Elements that one shard contributes."""
    dtype: torch.dtype

    def execute(self, shards: TPCollectives) -> None:
        """Execute a collective like it."""
        local, ranks = torch.ones(self.elements, dtype=self.dtype), range(shards.count)
        match self.kind:
            case "all_reduce":
                shards.all_reduce(local, self.kind)
            case "all_gather":
                shards.all_gather(local, [local.shape for _ in ranks], self.kind)
            case "reduce_scatter":
                shards.reduce_scatter([local for _ in ranks], self.kind)
            case "broadcast":
                shards.broadcast(local, 0, self.kind)
            case "reduce":
                shards.reduce(local, 0, self.kind)


@final
class FakeShards(TPCollectives):
    """Collectives of a rank without peers: results have the right shapes, but made-up numbers, and take no time.

    ::

        rank   |- compute -| all_reduce |- compute -| all_gather |- compute -|
        segments     s0     (not timed)      s1      (not timed)      s2
    """

    def __init__(self, rank: int, count: int) -> None:
        super().__init__(rank, count)
        self.calls: list[CollectiveCall] = []
        """Collectives since :meth:`begin`, in order."""
        self._pauses: list[tuple[Seconds, Seconds]] = []
        self._began = 0.0

    def begin(self) -> None:
        """Start a new measurement."""
        self.calls, self._pauses, self._began = [], [], time.perf_counter()

    def segments(self) -> list[Seconds]:
        """Return the time computed before, between and after the collectives."""
        starts = [start for start, _ in self._pauses]
        ends = [end for _, end in self._pauses]
        return [b - a for a, b in zip([self._began, *ends], [*starts, time.perf_counter()], strict=True)]

    def all_reduce(self, tensor: Tensor, what: str, *, largest: bool = False) -> Tensor:
        del what, largest
        with self._paused("all_reduce", tensor):
            return tensor.clone()

    def all_gather(self, part: Tensor, shapes: Sequence[Sequence[int]], what: str) -> list[Tensor]:
        del what
        with self._paused("all_gather", part, max(map(prod, shapes))):
            gathered = [part.new_ones(tuple(shape)) for shape in shapes]
            gathered[self.rank] = part.clone()
            return gathered

    def reduce_scatter(self, parts: Sequence[Tensor], what: str) -> Tensor:
        del what
        with self._paused("reduce_scatter", parts[self.rank], max(part.numel() for part in parts)):
            return parts[self.rank].clone()

    def broadcast(self, tensor: Tensor, owner: int, what: str) -> Tensor:
        del owner, what
        with self._paused("broadcast", tensor):
            return tensor.clone()

    def reduce(self, tensor: Tensor, owner: int, what: str) -> Tensor:
        del owner, what
        with self._paused("reduce", tensor):
            return tensor.clone()

    @contextmanager
    def _paused(self, kind: str, tensor: Tensor, elements: int | None = None) -> Iterator[None]:
        began = time.perf_counter()
        self.calls.append(CollectiveCall(kind, tensor.numel() if elements is None else elements, tensor.dtype))
        yield
        self._pauses.append((began, time.perf_counter()))


REPEATS = 9
IN_A_ROW = 5
"""Calls that are timed as one: ranks that have just left a barrier are not yet in step."""


class MessageTime(NamedTuple):
    """Time of a value on its way from one stage to the next.

    ::

        sender    |- send -|
        receiver             ... transit ...  |- receive -|
    """

    send: Seconds = 0.0
    """Time for which the sender is busy."""
    receive: Seconds = 0.0
    """Time for which the receiver is busy."""
    transit: Seconds = 0.0
    """Time between the two."""


def time_collectives(context: RankContext, calls: Iterable[CollectiveCall]) -> Mapping[CollectiveCall, Seconds]:
    """Measure each kind and size of collective; all ranks measure the same ones together."""
    assert context.communicator is not None, "there are at least two ranks"
    shards, times = ProcessGroupTP(context.communicator, context.world.rank), dict[CollectiveCall, Seconds]()
    for call in dict.fromkeys(calls):
        samples: list[Seconds] = []
        for _ in range(REPEATS):
            barrier(context)
            began = time.perf_counter()
            for _ in range(IN_A_ROW):
                call.execute(shards)
            samples.append((time.perf_counter() - began) / IN_A_ROW)
        times[call] = statistics.median(samples)
    return times


def time_message(context: RankContext, nbytes: int) -> MessageTime:
    """Measure a message of so many bytes from the first rank to the second and back; the other ranks wait."""
    assert context.communicator is not None, "there are at least two ranks"
    rank, samples = context.world.rank, list[MessageTime]()
    p2p = None
    if rank <= 1:
        p2p = ProcessGroupP2P(context.communicator, Routes(Mesh(1, (1,) * context.world.size), Coordinate(0, rank)))
    for _ in range(REPEATS):
        if p2p is not None:
            samples.append(_round_trip(context, p2p, nbytes))
        else:
            for _ in range(3):  # the barriers of a round trip
                barrier(context)
            samples.append(MessageTime())
    return MessageTime(*(statistics.median(each) for each in zip(*samples, strict=True)))


def barrier(context: RankContext) -> None:
    """Wait for all other ranks."""
    context.gather(None, "the others, to begin together")


def _round_trip(context: RankContext, p2p: ProcessGroupP2P, nbytes: int) -> MessageTime:
    rank, value = context.world.rank, torch.ones(max(1, nbytes // 4))
    barrier(context)
    began = time.perf_counter()
    if rank == 0:
        p2p.isend(value, 1, "a value")
        send = time.perf_counter() - began
        p2p.irecv(value.shape, value.dtype, 1, "a value")()
        both = time.perf_counter() - began
    else:
        arrived = p2p.irecv(value.shape, value.dtype, 0, "a value")()
        p2p.isend(arrived, 0, "a value")
        send = both = 0.0
    p2p.wait_sends()
    barrier(context)
    if rank == 1:
        p2p.isend(value, 0, "a value")
    barrier(context)  # the value has arrived, so that receiving it does not include waiting
    began = time.perf_counter()
    if rank == 0:
        p2p.irecv(value.shape, value.dtype, 1, "a value")()
    receive = time.perf_counter() - began
    p2p.wait_sends()
    return MessageTime(send, receive, max(0.0, both / 2 - send - receive))

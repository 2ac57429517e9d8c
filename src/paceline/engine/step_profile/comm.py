"""Measure collectives and messages between processes of this host; fake collectives for a rank that runs alone."""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, TypeVar, final

import torch
from torch import Tensor

from paceline.core.mesh import Coordinate, Mesh
from paceline.core.types import Seconds
from paceline.engine.spmd.p2p import ProcessGroupP2P, Routes
from paceline.engine.spmd.rank_context import RankContext
from paceline.engine.spmd.tensor_parallel_rank import ProcessGroupTP
from paceline.replica.tensor.tp_group import TPCollectives

T = TypeVar("T")


class CollectiveCall(NamedTuple):
    """A collective, by what its time depends on."""

    kind: str
    elements: int
    """Elements that one shard contributes."""
    dtype: torch.dtype

    def execute(self, shards: TPCollectives) -> None:
        """Execute a collective like it."""
        local, k = torch.ones(self.elements, dtype=self.dtype), shards.count
        arguments: dict[str, tuple[Any, ...]] = {
            "all_reduce": (local,),
            "all_gather": (local, [local.shape] * k),
            "reduce_scatter": ([local] * k,),
            "broadcast": (local, 0),
            "reduce": (local, 0),
        }
        getattr(shards, self.kind)(*arguments[self.kind], self.kind)


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
        self._times: list[Seconds] = []
        """Start and end of each segment in turn; that of the last one's end is still to come."""

    def begin(self) -> None:
        """Start a new measurement."""
        self.calls, self._times = [], [time.perf_counter()]

    def segments(self) -> list[Seconds]:
        """Return the time computed before, between and after the collectives."""
        times = [*self._times, time.perf_counter()]
        return [end - start for start, end in zip(times[::2], times[1::2], strict=True)]

    def all_reduce(self, tensor: Tensor, what: str, *, largest: bool = False) -> Tensor:
        del what, largest
        return self._stand_in("all_reduce", tensor, tensor.clone)

    def all_gather(self, part: Tensor, shapes: Sequence[Sequence[int]], what: str) -> list[Tensor]:
        del what

        def gathered() -> list[Tensor]:
            return [part.clone() if n == self.rank else part.new_ones(tuple(s)) for n, s in enumerate(shapes)]

        return self._stand_in("all_gather", part, gathered, max(map(prod, shapes)))

    def reduce_scatter(self, parts: Sequence[Tensor], what: str) -> Tensor:
        del what
        part = parts[self.rank]
        return self._stand_in("reduce_scatter", part, part.clone, max(part.numel() for part in parts))

    def broadcast(self, tensor: Tensor, owner: int, what: str) -> Tensor:
        del owner, what
        return self._stand_in("broadcast", tensor, tensor.clone)

    def reduce(self, tensor: Tensor, owner: int, what: str) -> Tensor:
        del owner, what
        return self._stand_in("reduce", tensor, tensor.clone)

    def _stand_in(self, kind: str, tensor: Tensor, result: Callable[[], T], elements: int | None = None) -> T:
        """Return a collective's result without counting the time to make it up."""
        self._times.append(time.perf_counter())
        self.calls.append(CollectiveCall(kind, tensor.numel() if elements is None else elements, tensor.dtype))
        made = result()
        self._times.append(time.perf_counter())
        return made


REPEATS = 9
# Calls that are timed as one: ranks that have just left a barrier are not yet in step.
IN_A_ROW = 5


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
            barrier(context)  # or the fastest rank would count the time that it waits for the others
            began = time.perf_counter()
            for _ in range(IN_A_ROW):
                call.execute(shards)
            samples.append((time.perf_counter() - began) / IN_A_ROW)
        times[call] = statistics.median(samples)
    return times


def time_message(context: RankContext, nbytes: int) -> MessageTime:
    """Measure a message of so many bytes from the first rank to the second and back; the other ranks wait."""
    assert context.communicator is not None, "there are at least two ranks"
    rank, p2p = context.world.rank, None
    if rank <= 1:
        p2p = ProcessGroupP2P(context.communicator, Routes(Mesh(1, (1,) * context.world.size), Coordinate(0, rank)))
    samples = [_round_trip(context, p2p, rank, torch.ones(max(1, nbytes // 4))) for _ in range(REPEATS)]
    return MessageTime(*(statistics.median(each) for each in zip(*samples, strict=True)))


def _round_trip(context: RankContext, p2p: ProcessGroupP2P | None, rank: int, value: Tensor) -> MessageTime:
    if p2p is None:
        for _ in range(3):  # the barriers of the two others
            barrier(context)
        return MessageTime()
    barrier(context)
    began = time.perf_counter()
    if rank == 0:
        p2p.isend(value, 1, "a value")
        send = time.perf_counter() - began
        p2p.irecv(value.shape, value.dtype, 1, "a value")()
        both = time.perf_counter() - began
    else:
        # The same tensor goes back, so that there are two messages of one size one after the other.
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


def barrier(context: RankContext) -> None:
    """Wait for all other ranks."""
    context.gather(None, "the others, to begin together")

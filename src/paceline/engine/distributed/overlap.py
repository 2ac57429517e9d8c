"""How Δ is cut into buckets, each of them summed as soon as its gradients are there.

A backward pass makes the gradients of the last layers first, so buckets are cut from the end::

    float32 vector   | conv.weight .......... | conv.bias | fc.weight ... | fc.bias | head.weight | head.bias |
                     '------- bucket 2 -------------------'--- bucket 1 --'-------- bucket 0 -----------------'

Buckets of Δ on their way while the backward pass still makes the next ones.

::

    rank 0   backward ... | bucket 0 full |  ...  | bucket 1 full | ... rest  | finite? | wait for all
    sums                   '-- bucket 0 ----------'-- bucket 1 ---------'-- buffers, rows --'

All ranks begin the same buckets in the same order: one that is full early waits for those before it, and what a rank
has nothing for is begun when ranks meet.
"""

import os
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor

from paceline.core.errors import PacelineError
from paceline.engine.base import Job
from paceline.engine.distributed.reduce_buffer import ReduceBuffer
from paceline.engine.run_context import threads
from paceline.engine.spmd.communicator import Communicator, ring_bytes
from paceline.engine.spmd.process_group import LaunchEnv
from paceline.engine.spmd.rank_context import RankContext
from paceline.replica.flat_state import DtypeBuffer, FlatLayout

BUCKET_BYTES = 4 << 20
"""What a bucket holds at least: its start costs a thirtieth of what moving it does. Gloo's all-reduce between two ranks
of one host took 0.10 ms for 4 KiB and 2.8 ms for 4 MiB (torch 2.13, the quickest of 60)."""

FIRST_BUCKET_BYTES = 1 << 20
"""What the first one holds: while it fills, nothing is under way. DDP's own figure (torch 2.13)."""


class Bucket(NamedTuple):
    """Neighbours in one vector."""

    vector: int
    """Which of the layout's."""
    start: int
    stop: int
    members: tuple[int, ...]
    """Parameters, by their place in the layout."""


def cut(
    layout: FlatLayout, least_bytes: int = BUCKET_BYTES, first_bytes: int = FIRST_BUCKET_BYTES
) -> tuple[Bucket, ...]:
    """The buckets of Δ, in the order in which all ranks begin them; one of each vector where all A is small.

    Vectors take turns by how far their buckets lie from the end, since layers may mix dtypes.

    Args:
        layout: of A.
        least_bytes: of a bucket, but for the first and the last ones of a vector.
        first_bytes: of the first ones.

    >>> import torch
    >>> from paceline.replica.flat_state import TensorEntry
    >>> sizes = [100, 10, 200, 20, 5]
    >>> entries = [TensorEntry(str(n), torch.Size([n]), stop - n, stop) for n, stop in zip(sizes, accumulate(sizes))]
    >>> layout = FlatLayout((DtypeBuffer(torch.float32, tuple(entries)),), ())
    >>> for bucket in cut(layout, least_bytes=400, first_bytes=80):
    ...     print(bucket)
    Bucket(vector=0, start=310, stop=335, members=(4, 3))
    Bucket(vector=0, start=110, stop=310, members=(2,))
    Bucket(vector=0, start=0, stop=110, members=(1, 0))
    >>> [bucket.members for bucket in cut(layout)]
    [(4, 3, 2, 1, 0)]
    """
    least, first = (least_bytes, first_bytes) if layout.parameter_bytes > least_bytes else (layout.parameter_bytes,) * 2
    starts = accumulate((len(block.entries) for block in layout.parameters), initial=0)
    found = [
        (1 - bucket.start / block.elements, bucket)
        for vector, (block, index) in enumerate(zip(layout.parameters, starts, strict=False))
        for bucket in _of_vector(block, vector, index, least, first)
    ]
    return tuple(bucket for _, bucket in sorted(found))


def _of_vector(block: DtypeBuffer, vector: int, index: int, least: int, first: int) -> Iterator[Bucket]:
    stop, members = block.elements, []
    for place, entry in reversed(list(enumerate(block.entries, start=index))):
        members.append(place)
        bound = first if stop == block.elements else least
        if place == index or (stop - entry.start) * block.dtype.itemsize >= bound:
            yield Bucket(vector, entry.start, stop, tuple(members))
            stop, members = entry.start, []


IN_BACKGROUND = {"gloo": "cpu", "nccl": "cuda"}
"""Backends that need nobody to wait for them (``shm`` and ``hierarchical`` do), and where their gradients have to be:
to fetch them from elsewhere would hold up the backward pass."""

SENDING_CORES = 1
"""What Gloo's threads want beside those that compute, for each rank of a single host.

Where they have none they take it from the backward pass. All of the following was measured beside other jobs, in
alternating pairs. On two cores that two ranks of one thread keep busy, a step of the MLP 784-2048-2048-10 took 1.13
times as long with overlap (batch 32; the median of 11 pairs of 40 steps). Over a wire it pays all the same: with the
loopback device limited to 4 Gbit/s, a step of an MLP of ten layers, 1024 wide, took 0.77 times as long (batch 128,
7 pairs of 10); at 10 Gbit/s, that of the first one 0.995 (9 of 15).
"""


class Overlap:
    """One rank's buckets.

    Args:
        cuts: the buckets, in the order in which all ranks begin them.
        freight: what ranks bring; its parameters are summed here, and its tails by others.
        communicator: sums them.
    """

    def __init__(self, cuts: tuple[Bucket, ...], freight: ReduceBuffer, communicator: Communicator) -> None:
        self._cuts, self._communicator, self._vectors = cuts, communicator, freight.state.parameters
        self._lanes = [communicator.there(vector) for vector in self._vectors]
        """Where the backend sums: the vectors themselves, unless that is another device."""
        self._views = [
            v for b, lane in zip(freight.state.layout.parameters, self._lanes, strict=True) for v in b.views(lane)
        ]
        self._home = {member: number for number, bucket in enumerate(cuts) for member in bucket.members}
        # Counted as if no vector were cut: each piece would be rounded down to a byte.
        whole, tails = (
            sum(ring_bytes(v.nbytes, communicator.ranks) for v in vs) for vs in (freight.vectors, freight.tails)
        )
        self._bytes = whole - tails
        self._forget()

    @property
    def buckets(self) -> int:
        """How many there are."""
        return len(self._cuts)

    def bring(self, index: int, gradient: Tensor, weight: float) -> None:
        """A gradient of this rank's Δ is there; begin what can be begun.

        Args:
            index: of the parameter, in the layout's order.
            gradient: copied.
            weight: of the whole Δ.
        """
        if index not in self._awaited:
            raise PacelineError(
                "a Δ that has been handed over in part was begun anew; let what worker.step() raises end the loop"
            )
        self._awaited.remove(index)
        self._views[index].copy_(gradient)
        self._missing[self._home[index]] -= 1
        while len(self._works) < len(self._cuts) and not self._missing[len(self._works)]:
            self._begin(self._cuts[len(self._works)], weight)

    def settle(self) -> None:
        """Begin what has not been begun; a rank without a Δ brings zeros."""
        if 0 < len(self._awaited) < len(self._home):
            raise PacelineError(
                "a Δ that has been handed over in part was left; let what worker.step() raises end the loop"
            )
        for bucket in self._cuts[len(self._works) :]:
            self._begin(bucket, 0.0)

    def wait(self, what: str) -> None:
        """Wait for all buckets; the freight then holds their sums."""
        for work in self._works:
            self._communicator.wait(work, what)
        for vector, lane in zip(self._vectors, self._lanes, strict=True):
            if lane is not vector:
                vector.copy_(lane)
        self._communicator.sent_bytes += self._bytes
        self._forget()

    def _begin(self, bucket: Bucket, weight: float) -> None:
        part = self._lanes[bucket.vector][bucket.start : bucket.stop]
        if weight == 0.0:
            part.zero_()
        elif weight != 1.0:
            part.mul_(weight)
        self._works.append(self._communicator.begin(part))

    def _forget(self) -> None:
        self._works: list[Any] = []
        self._awaited = set(self._home)
        self._missing = [len(bucket.members) for bucket in self._cuts]


def overlapped(job: Job, context: RankContext, backend: str, freight: ReduceBuffer) -> Overlap | None:
    """What sends Δ during the backward pass; None where the backend can't, or where it would not pay."""
    layout = freight.state.layout
    cuts = cut(layout, BUCKET_BYTES, FIRST_BUCKET_BYTES)
    able = IN_BACKGROUND.get(backend) == job.strategy.device
    if context.communicator is None or not able or len(cuts) == len(layout.parameters):
        return None
    agreed = all(context.gather(pays(job, context.world, backend), "the others' cores"))
    return Overlap(cuts, freight, context.communicator) if agreed else None


def pays(job: Job, world: LaunchEnv, backend: str) -> bool:
    """Whether, as far as this rank sees, it is the wire that takes the time, or cores are left for those who send."""
    if backend == "nccl" or world.local_size < world.size:
        return True
    return len(os.sched_getaffinity(0)) >= world.size * (threads(job, world.size) + SENDING_CORES)

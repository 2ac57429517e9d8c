"""Buckets of Δ that are summed while the backward pass still computes the rest of it.

A backward pass computes the gradients of the last layers first, so buckets are cut from the end::

    float32 vector   | conv.weight .......... | conv.bias | fc.weight ... | fc.bias | head.weight | head.bias |
                     '------- bucket 2 -------------------'--- bucket 1 --'-------- bucket 0 -----------------'

    rank 0   backward ... | bucket 0 full |  ...  | bucket 1 full | ... rest  | finite? | wait for all
    sums                   '-- bucket 0 ----------'-- bucket 1 ---------'-- buffers, statuses --'

All ranks begin the same buckets in the same order: one that is full early waits for those before it, and buckets that
a rank has no gradients for are begun in the exchange.

Backend shm moves nothing while a rank computes. There buckets are begun at the end of the backward pass, and a large
gradient, a bucket of its own, is summed from where autograd has left it instead of a copy in the vector.
"""

import os
from typing import Any, NamedTuple

from torch import Tensor

from paceline.comm.shm.process_group import NAME as SHM
from paceline.core.errors import PacelineError
from paceline.device import CPU
from paceline.engine.base import Job
from paceline.engine.distributed.reduce_buffer import ReduceBuffer
from paceline.engine.run_context import threads
from paceline.engine.spmd.communicator import Communicator, ring_bytes
from paceline.engine.spmd.launch_env import OURS, LaunchEnv, kind_of
from paceline.engine.spmd.rank_context import RankContext
from paceline.replica.flat_state import FlatLayout
from paceline.replica.late_figures import zero_nonfinite

# Least bytes of a bucket: its start costs a thirtieth of its transfer. Gloo's all-reduce between two ranks of one host
# took 0.10 ms for 4 KiB and 2.8 ms for 4 MiB (torch 2.13, the fastest of 60).
BUCKET_BYTES = 4 << 20

# Least bytes of the first bucket: nothing is sent while it fills. DDP's own figure (torch 2.13).
FIRST_BUCKET_BYTES = 1 << 20

# Bytes of a parameter from which backend shm sums its gradient by itself: a copy of 4 MiB takes 0.4 ms on 2 cores of an
# AMD EPYC, two collectives more, for what comes before it and after it, about 0.1.
APART_BYTES = 4 << 20

# Cores per rank that Gloo needs besides those that compute, on a single host.
#
# Without them it takes them from the backward pass. All of the following was measured on a shared machine, in
# alternating pairs. On two cores that two ranks of one thread keep busy, a step of the MLP 784-2048-2048-10 took 1.13
# times as long with overlap (batch 32; the median of 11 pairs of 40 steps). Over a network it pays all the same: with
# the loopback device limited to 4 Gbit/s, a step of an MLP of ten layers, 1024 wide, took 0.77 times as long (batch
# 128, 7 pairs of 10); at 10 Gbit/s, that of the first one 0.995 (9 of 15).
SENDING_CORES = 1


class Bucket(NamedTuple):
    """Neighbouring parameters in one vector.

    Args:
        vector: index in the layout.
        members: indices of the parameters in the layout.
    """

    vector: int
    start: int
    stop: int
    members: tuple[int, ...]


def cut(
    layout: FlatLayout, least_bytes: int = BUCKET_BYTES, first_bytes: int = FIRST_BUCKET_BYTES
) -> tuple[Bucket, ...]:
    """Cut Δ into buckets, in the order in which all ranks begin them; one for each vector where all of A is small.

    Vectors alternate by how far their buckets are from the end, since layers may mix dtypes.

    Args:
        layout: of A.
        least_bytes: of a bucket, but for the first and the last ones of a vector.
        first_bytes: of the first ones.

    >>> import torch
    >>> from itertools import accumulate
    >>> from paceline.replica.flat_state import DtypeBuffer, TensorEntry
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
    if layout.parameter_bytes <= least_bytes:
        least_bytes = first_bytes = layout.parameter_bytes
    buckets: list[tuple[float, Bucket]] = []
    first = 0
    for vector, block in enumerate(layout.parameters):
        stop, members = block.elements, list[int]()
        for index, entry in reversed(list(enumerate(block.entries, start=first))):
            members.append(index)
            least = first_bytes if stop == block.elements else least_bytes
            if index == first or (stop - entry.start) * block.dtype.itemsize >= least:
                bucket = Bucket(vector, entry.start, stop, tuple(members))
                buckets.append((1 - entry.start / block.elements, bucket))
                stop, members = entry.start, []
        first += len(block.entries)
    return tuple(bucket for _, bucket in sorted(buckets))


def cut_apart(layout: FlatLayout, least_bytes: int = APART_BYTES) -> tuple[Bucket, ...]:
    """Cut Δ into a bucket for each large parameter, and one for those between two of them, from the end of each vector.

    Args:
        layout: of A.
        least_bytes: of a large one.
    """
    buckets, first = list[Bucket](), 0
    for vector, block in enumerate(layout.parameters):
        stop, members = block.elements, list[int]()
        for index, entry in reversed(list(enumerate(block.entries, start=first))):
            large = (entry.stop - entry.start) * block.dtype.itemsize >= least_bytes
            if large and members:
                buckets.append(Bucket(vector, entry.stop, stop, tuple(members)))
                stop, members = entry.stop, []
            members.append(index)
            if large or index == first:
                buckets.append(Bucket(vector, entry.start, stop, tuple(members)))
                stop, members = entry.start, []
        first += len(block.entries)
    return tuple(buckets)


class Overlap:
    """Sums the buckets of one rank's Δ as they fill.

    Args:
        buckets: in the order in which all ranks begin them.
        buffer: this rank's; its parameters are summed here, and its tails in the exchange.
        communicator: of all ranks.
        late: whether nobody has asked if Δ is finite: what is not is summed as 0, and only the device waits for sums.
        early: whether gradients are to come as soon as they are final; else, once all are, those that are a bucket of
            their own are summed from where they are.
    """

    def __init__(
        self,
        buckets: tuple[Bucket, ...],
        buffer: ReduceBuffer,
        communicator: Communicator,
        *,
        late: bool = False,
        early: bool = True,
    ) -> None:
        self._late, self.early = late, early
        self.buckets, self._communicator, self._vectors = buckets, communicator, buffer.state.parameters
        self._sends = [communicator.to_device(vector) for vector in self._vectors]
        """The vectors as the backend sums them: themselves, or copies on another device."""
        pairs = zip(buffer.state.layout.parameters, self._sends, strict=True)
        self._views = [view for block, vector in pairs for view in block.views(vector)]
        self._bucket_of = {member: number for number, bucket in enumerate(buckets) for member in bucket.members}
        # Bytes as if no vector were cut: a ring's bytes of each bucket would be rounded down.
        ranks = communicator.ranks
        full, tails = (sum(ring_bytes(v.nbytes, ranks) for v in vs) for vs in (buffer.vectors, buffer.tails()))
        self._bytes = full - tails
        self._reset()

    def add(self, index: int, gradient: Tensor, weight: float) -> None:
        """Take a gradient of this rank's Δ, and begin the buckets that are full.

        Args:
            index: of the parameter, in the layout's order.
            gradient: copied, or summed from where it is: it stays as it is until the exchange is over.
            weight: of the whole Δ.
        """
        if index not in self._missing:
            raise PacelineError(
                "a Δ that has been handed over in part was begun anew; let what worker.step() raises end the loop"
            )
        self._missing.remove(index)
        number, view = self._bucket_of[index], self._views[index]
        alone = not self.early and len(self.buckets[number].members) == 1
        if alone and weight == 1.0 and gradient.is_contiguous() and gradient.dtype == view.dtype:
            self._given[number] = gradient.detach().view(-1)
        else:
            view.copy_(gradient)
        self._left[number] -= 1
        while len(self._works) < len(self.buckets) and not self._left[len(self._works)]:
            self._begin(len(self._works), weight)

    def flush(self) -> None:
        """Begin the remaining buckets; a rank without a Δ contributes zeros, in the same order."""
        if 0 < len(self._missing) < len(self._bucket_of):
            raise PacelineError(
                "a Δ that has been handed over in part was left; let what worker.step() raises end the loop"
            )
        for number in range(len(self._works), len(self.buckets)):
            self._begin(number, 0.0)

    def wait(self, description: str) -> None:
        """Wait for all buckets; the buffer then holds their sums."""
        for work in self._works:
            if self._late:
                work.wait()  # the device does, before what it is given from now on
            else:
                self._communicator.wait(work, description)
        for vector, sent in zip(self._vectors, self._sends, strict=True):
            if sent is not vector:
                vector.copy_(sent)
        self._communicator.traffic.sent_bytes += self._bytes
        self._reset()

    def _begin(self, number: int, weight: float) -> None:
        bucket, given = self.buckets[number], self._given.pop(number, None)
        part = self._sends[bucket.vector][bucket.start : bucket.stop]
        if given is not None:
            self._works.append(self._communicator.start_all_reduce(given, part))
            return
        if self._late:
            zero_nonfinite([part])
        if weight == 0.0:
            part.zero_()
        elif weight != 1.0:
            part.mul_(weight)
        self._works.append(self._communicator.start_all_reduce(part))

    def _reset(self) -> None:
        self._works: list[Any] = []
        self._given: dict[int, Tensor] = {}
        """Gradients that are a bucket of their own, which has not begun."""
        self._missing = set(self._bucket_of)
        self._left = [len(bucket.members) for bucket in self.buckets]


def build_overlap(
    job: Job, context: RankContext, backend: str, buffer: ReduceBuffer, *, late: bool = False
) -> Overlap | None:
    """Build the overlap of a run; None where the backend can't, or where it would not pay on some rank."""
    layout = buffer.state.layout
    if context.communicator is not None and backend == SHM and job.strategy.device == CPU.type:
        apart = cut_apart(layout, APART_BYTES)
        large = [b for b in apart if len(b.members) == 1 and _bytes(layout, b) >= APART_BYTES]
        pays_apart = 2 * sum(_bytes(layout, bucket) for bucket in large) >= layout.parameter_bytes
        return Overlap(apart, buffer, context.communicator, early=False) if pays_apart else None
    buckets = cut(layout, BUCKET_BYTES, FIRST_BUCKET_BYTES)
    # Collectives of Paceline's own backends do not progress without a waiting caller.
    able = backend not in OURS and kind_of(backend) == job.strategy.device
    if context.communicator is None or not able or len(buckets) == len(layout.parameters):
        return None
    agreed = all(context.gather(pays(job, context.world, backend), "the others' cores"))
    return Overlap(buckets, buffer, context.communicator, late=late) if agreed else None


def _bytes(layout: FlatLayout, bucket: Bucket) -> int:
    return (bucket.stop - bucket.start) * layout.parameters[bucket.vector].dtype.itemsize


def pays(job: Job, world: LaunchEnv, backend: str) -> bool:
    """Return True if overlap should pay on this rank: accelerators, several hosts, or a core to spare for Gloo."""
    if kind_of(backend) != CPU.type or world.local_size < world.size:
        return True
    return len(os.sched_getaffinity(0)) >= world.size * (threads(job.strategy, world.size) + SENDING_CORES)

"""Buckets of Δ that are summed while the backward pass still computes the rest of it.

::

    rank 0   backward ... | bucket 0 full |  ...  | bucket 1 full | ... rest  | finite? | wait for all
    sums                   '-- bucket 0 ----------'-- bucket 1 ---------'-- buffers, statuses --'

Backend shm moves nothing while a rank computes. There buckets are begun at the end of the backward pass, and a large
gradient, a bucket of its own, is summed from where autograd has left it instead of a copy in the vector.
"""

import os
from typing import Any, final

from torch import Tensor

from paceline.comm.shm.process_group import NAME as SHM
from paceline.device import CPU
from paceline.engine.base import Job
from paceline.engine.distributed.gradient_buckets import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    Bucket,
    GradientBuckets,
    apart_pays,
    cut,
    cut_apart,
)
from paceline.engine.distributed.reduce_buffer import ReduceBuffer
from paceline.engine.run_context import threads
from paceline.engine.spmd.communicator import Communicator, ring_bytes
from paceline.engine.spmd.launch_env import OURS, LaunchEnv, kind_of
from paceline.engine.spmd.rank_context import RankContext
from paceline.replica.late_figures import zero_nonfinite

# Cores per rank that Gloo needs besides those that compute, on a single host.
#
# Without them it takes them from the backward pass. All of the following was measured on a shared machine, in
# alternating pairs. On two cores that two ranks of one thread keep busy, a step of the MLP 784-2048-2048-10 took 1.13
# times as long with overlap (batch 32; the median of 11 pairs of 40 steps). Over a network it pays all the same: with
# the loopback device limited to 4 Gbit/s, a step of an MLP of ten layers, 1024 wide, took 0.77 times as long (batch
# 128, 7 pairs of 10); at 10 Gbit/s, that of the first one 0.995 (9 of 15).
SENDING_CORES = 1


@final
class Overlap(GradientBuckets):
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
        self._late, self._communicator, self._deltas = late, communicator, buffer.state.parameters
        self._works = list[Any]()
        # The vectors as the backend sums them: themselves, or copies on another device.
        sends = [communicator.to_device(vector) for vector in self._deltas]
        super().__init__(buckets, buffer.state.layout, sends, early=early)
        # Bytes as if no vector were cut: a ring's bytes of each bucket would be rounded down.
        ranks = communicator.ranks
        full, tails = (sum(ring_bytes(v.nbytes, ranks) for v in vs) for vs in (buffer.vectors, buffer.tails()))
        self._bytes = full - tails

    def wait(self, description: str) -> None:
        """Wait for all buckets; the buffer then holds their sums."""
        for work in self._works:
            if self._late:
                work.wait()  # the device does, before what it is given from now on
            else:
                self._communicator.wait(work, description)
        for vector, sent in zip(self._deltas, self._vectors, strict=True):
            if sent is not vector:
                vector.copy_(sent)
        self._communicator.traffic.sent_bytes += self._bytes
        self._works.clear()
        self._reset()

    def _start(self, part: Tensor, given: Tensor | None) -> None:
        if self._late:
            zero_nonfinite([part])
        out = None if given is None else part
        self._works.append(self._communicator.start_all_reduce(part if given is None else given, out))


def build_overlap(
    job: Job, context: RankContext, backend: str, buffer: ReduceBuffer, *, late: bool = False
) -> Overlap | None:
    """Build the overlap of a run; None where the backend can't, or where it would not pay on some rank."""
    layout = buffer.state.layout
    if context.communicator is not None and backend == SHM and job.strategy.device == CPU.type:
        return Overlap(cut_apart(layout), buffer, context.communicator, early=False) if apart_pays(layout) else None
    buckets = cut(layout, BUCKET_BYTES, FIRST_BUCKET_BYTES)
    # Collectives of Paceline's own backends do not progress without a waiting caller.
    able = backend not in OURS and kind_of(backend) == job.strategy.device
    if context.communicator is None or not able or len(buckets) == len(layout.parameters):
        return None
    agreed = all(context.gather(pays(job, context.world, backend), "the others' cores"))
    return Overlap(buckets, buffer, context.communicator, late=late) if agreed else None


def pays(job: Job, world: LaunchEnv, backend: str) -> bool:
    """Return True if overlap should pay on this rank: accelerators, several hosts, or a core to spare for Gloo."""
    if kind_of(backend) != CPU.type or world.local_size < world.size:
        return True
    return len(os.sched_getaffinity(0)) >= world.size * (threads(job.strategy, world.size) + SENDING_CORES)

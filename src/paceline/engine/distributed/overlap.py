"""Buckets of Δ on their way while the backward pass still makes the next ones.

::

    rank 0   backward ... | bucket 0 full |  ...  | bucket 1 full | ... rest  | finite? | wait for all
    sums                   '-- bucket 0 ----------'-- bucket 1 ---------'-- buffers, rows --'

All ranks begin the same buckets in the same order: one that is full early waits for those before it, and what a rank
has nothing for is begun when ranks meet.
"""

import os
from typing import Any

from torch import Tensor

from paceline.core.errors import PacelineError
from paceline.engine.base import Job
from paceline.engine.distributed import buckets
from paceline.engine.distributed.buckets import Bucket
from paceline.engine.distributed.freight import Freight
from paceline.engine.setup import threads
from paceline.engine.team.team import Team
from paceline.engine.team.traffic import Traffic, ring_bytes
from paceline.engine.team.world import World

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
        traffic: sums them.
    """

    def __init__(self, cuts: tuple[Bucket, ...], freight: Freight, traffic: Traffic) -> None:
        self._cuts, self._traffic, self._vectors = cuts, traffic, freight.state.parameters
        self._lanes = [traffic.there(vector) for vector in self._vectors]
        """Where the backend sums: the vectors themselves, unless that is another device."""
        self._views = [
            v for b, lane in zip(freight.state.layout.parameters, self._lanes, strict=True) for v in b.views(lane)
        ]
        self._home = {member: number for number, bucket in enumerate(cuts) for member in bucket.members}
        # Counted as if no vector were cut: each piece would be rounded down to a byte.
        whole, tails = (sum(ring_bytes(v.nbytes, traffic.ranks) for v in vs) for vs in (freight.vectors, freight.tails))
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
            self._traffic.wait(work, what)
        for vector, lane in zip(self._vectors, self._lanes, strict=True):
            if lane is not vector:
                vector.copy_(lane)
        self._traffic.sent_bytes += self._bytes
        self._forget()

    def _begin(self, bucket: Bucket, weight: float) -> None:
        part = self._lanes[bucket.vector][bucket.start : bucket.stop]
        if weight == 0.0:
            part.zero_()
        elif weight != 1.0:
            part.mul_(weight)
        self._works.append(self._traffic.begin(part))

    def _forget(self) -> None:
        self._works: list[Any] = []
        self._awaited = set(self._home)
        self._missing = [len(bucket.members) for bucket in self._cuts]


def overlapped(job: Job, team: Team, backend: str, freight: Freight) -> Overlap | None:
    """What sends Δ during the backward pass; None where the backend can't, or where it would not pay."""
    layout = freight.state.layout
    cuts = buckets.cut(layout, buckets.BUCKET_BYTES, buckets.FIRST_BUCKET_BYTES)
    able = IN_BACKGROUND.get(backend) == job.strategy.device
    if team.traffic is None or not able or len(cuts) == len(layout.parameters):
        return None
    agreed = all(team.gather(pays(job, team.world, backend), "the others' cores"))
    return Overlap(cuts, freight, team.traffic) if agreed else None


def pays(job: Job, world: World, backend: str) -> bool:
    """Whether, as far as this rank sees, it is the wire that takes the time, or cores are left for those who send."""
    if backend == "nccl" or world.local_size < world.size:
        return True
    return len(os.sched_getaffinity(0)) >= world.size * (threads(job, world.size) + SENDING_CORES)

"""Every way to divide a step that Paceline has, as arrangements.

::

    frame     replicas × stages × shards (or copies of stages), and the batch cut into R · m micro-batches of b samples
    options   of a frame: schedule and chunks, what is computed again, what is divided among replicas

A frame is a row of numbers, so that a hundred thousand of them can be bounded at once (bounds.py); arrangements are
made of those alone that may be among the best.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.plan.base import Arrangement, Recomputed, Workload
from paceline.plan.cluster import Cluster
from paceline.plan.searching import carried
from paceline.plan.searching.asked import Asked

Whole = NDArray[np.int64]

MOST_TURNS, MOST_TURNING_STAGES = 8, 4
"""Workers of a replica in which several take turns at a stage, and stages of it: more are not looked at."""


class Frame(NamedTuple):
    """Sizes that leave the options open."""

    replicas: int
    stages: int
    shards: int
    micro_batch: int
    micro_batches: int
    copies: tuple[int, ...] = ()


@dataclass(frozen=True)
class Frames:
    """Those of one batch, column by column."""

    batch: int
    replicas: Whole
    stages: Whole
    shards: Whole
    micro_batch: Whole
    copies: Sequence[tuple[int, ...]] = ()
    """Of those at the end; the first of them have none."""

    def __len__(self) -> int:
        return len(self.replicas)

    @property
    def micro_batches(self) -> Whole:
        """m."""
        found: Whole = self.batch // (self.replicas * self.micro_batch)
        return found

    def at(self, row: int) -> Frame:
        """One of them."""
        plain = len(self) - len(self.copies)
        copies = self.copies[row - plain] if row >= plain else ()
        r, p, t, b = (int(each[row]) for each in (self.replicas, self.stages, self.shards, self.micro_batch))
        return Frame(r, p, t, b, self.batch // (r * b), copies)


def frames(workload: Workload, cluster: Cluster, asked: Asked, batch: int) -> Frames:
    """All of a batch: R · p · t at most as many as there are workers, b · m · R = batch."""
    limit = min(cluster.workers, asked.workers or cluster.workers)
    layers = len(workload.layers(Arrangement()))
    pairs = _batch_cuts(batch, limit, workload.global_batch if asked.fixed == "replica" else None)
    pairs = pairs if asked.replicas is None else pairs[pairs[:, 0] == asked.replicas]
    most = limit if can(cluster, asked, Arrangement(shards=2)) else 1
    shards = [t for t in range(1, most + 1) if _shards_fit(t, workload, cluster)]
    stages = np.arange(1, min(layers, limit) + 1)
    rows = [_meshes(pairs, stages, t, limit) for t in shards]
    turning = list(_turning(pairs, layers, limit))
    columns = np.concatenate([*rows, np.array([frame[:4] for frame in turning], dtype=np.int64).reshape(-1, 4)])
    r, p, t, b = columns.T.copy()
    return Frames(batch, r, p, t, b, [frame.copies for frame in turning])


def _batch_cuts(batch: int, limit: int, of_each: int | None) -> Whole:
    """(R, b): replicas that a batch can be divided among, and micro-batches of one."""
    many = [r for r in divisors(batch) if r <= limit and (of_each is None or batch == r * of_each)]
    return np.array([(r, b) for r in many for b in divisors(batch // r)], dtype=np.int64).reshape(-1, 2)


def _meshes(pairs: Whole, stages: Whole, shards: int, limit: int) -> Whole:
    """Rows R, p, t, b."""
    kept = [(pairs[:, 0] * p * shards <= limit) for p in stages]
    parts = [
        np.column_stack([pairs[k, 0], np.full(k.sum(), p), np.full(k.sum(), shards), pairs[k, 1]])
        for p, k in zip(stages, kept, strict=True)
        if k.any()
    ]
    return np.concatenate(parts) if parts else np.zeros((0, 4), dtype=np.int64)


def _shards_fit(shards: int, workload: Workload, cluster: Cluster) -> bool:
    """Whether the model can be cut so; of several hosts, either a host's devices are whole groups or the reverse."""
    each = cluster.devices_per_host
    straddles = cluster.hosts > 1 and each % shards and shards % each
    return not straddles and workload.refusal(Arrangement(shards=shards)) is None


def _turning(pairs: Whole, layers: int, limit: int) -> Iterator[Frame]:
    """Where several take turns at a stage, and not as many at each: (3, 1), (1, 2, 1), ..."""
    most = min(MOST_TURNS, limit)
    for p in range(2, min(MOST_TURNING_STAGES, layers) + 1):
        for copies in product(range(1, most), repeat=p):
            if sum(copies) <= most and len(set(copies)) > 1:
                yield from (Frame(int(r), p, 1, int(b), 0, copies) for r, b in pairs if r * sum(copies) <= limit)


@cache
def divisors(number: int) -> tuple[int, ...]:
    """All, ascending.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    low = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return tuple(sorted({*low, *(number // n for n in low)}))


class Option(NamedTuple):
    """What a frame leaves open."""

    schedule: str
    chunks: int
    recompute: Recomputed
    divided: int


def options(frame: Frame, cluster: Cluster, asked: Asked) -> Iterator[Option]:
    """All of a frame, the plainest first; :func:`arrangement` says which are carried."""
    divided = _divided(frame) if divides(cluster, asked) else (0,)
    for schedule, chunks in _schedules(frame, asked):
        for recompute, number in product(_recomputed(frame), divided):
            yield Option(schedule, chunks, recompute, number)


def arrangement(frame: Frame, option: Option, cluster: Cluster, asked: Asked) -> Arrangement | None:
    """The two as one; None where Paceline does not carry it."""
    made = Arrangement(
        *frame[:3], option.chunks, frame.micro_batch, frame.micro_batches, option.schedule, frame.copies,
        option.divided, option.recompute,
    )  # fmt: skip
    if carried.never(made) is not None:
        return None
    return made if can(cluster, asked, made) else None


def divides(cluster: Cluster, asked: Asked) -> bool:
    """Whether replicas may divide what they have among them."""
    return can(cluster, asked, Arrangement(2, 2, divided=1))


def can(cluster: Cluster, asked: Asked, arrangement: Arrangement) -> bool:
    """Whether such devices carry it, or what they don't carry yet is asked for."""
    return asked.unbuilt or carried.unbuilt(arrangement, cluster.device.kind, asked.engine) is None


def _schedules(frame: Frame, asked: Asked) -> Iterator[tuple[str, int]]:
    """With their chunks; of a single micro-batch there is one order."""
    yield "1f1b", 1
    if frame.stages == 1:
        return
    if frame.micro_batches > 1:
        yield "gpipe", 1
    if not frame.copies:
        yield "zero-bubble", 1
        if frame.micro_batches % frame.stages == 0:
            yield from (("interleaved", v) for v in range(2, asked.most_chunks + 1))


def _recomputed(frame: Frame) -> tuple[Recomputed, ...]:
    """Shards can't have it within a stage; of a whole model, a stage is all of it, and nothing is gained."""
    if frame.stages == 1:
        return ("none", "full")
    return ("none", "full", "stage")


def _divided(frame: Frame) -> tuple[int, ...]:
    """ZeRO's numbers."""
    if frame.replicas == 1:
        return (0,)
    return (0, 1, 3) if frame.stages == frame.shards == 1 else (0, 1)

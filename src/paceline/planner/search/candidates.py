"""Every way to divide a step that Paceline supports, as arrangements.

::

    frame     replicas × stages × shards (or replicas and shards of each stage), and the batch cut into R · m
              micro-batches of b samples
    options   of a frame: schedule and chunks, recomputation, ZeRO's stage, mini-batches

Frames are columns of numbers, so that a hundred thousand of them can be bounded at once (lower_bounds.py); arrangements
are made only of those that may be among the best.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.planner.base import Arrangement, Recomputed, Workload, divisors
from paceline.planner.cluster import Cluster
from paceline.planner.search import supported
from paceline.planner.search.objective import Objectives

Whole = NDArray[np.int64]

# Limits of replicas with uneven stages: workers of one whose stages differ in replicas or in shards, workers of one
# whose stages differ in both, and its stages. Larger ones are not searched.
MAX_UNEVEN_WORKERS, MAX_UNEVEN_BOTH, MAX_UNEVEN_STAGES = 8, 4, 4


class UnevenStages(NamedTuple):
    """Replicas and shards of each stage of a replica, where they differ."""

    copies: tuple[int, ...]
    shards: tuple[int, ...]

    @property
    def workers(self) -> int:
        """Workers of a replica."""
        return sum(n * t for n, t in zip(*self, strict=True))


class Frame(NamedTuple):
    """Sizes of an arrangement, without its options."""

    replicas: int
    stages: int
    shards: int
    micro_batch: int
    micro_batches: int
    copies: tuple[int, ...] = ()
    stage_shards: tuple[int, ...] = ()


@dataclass(frozen=True)
class Frames:
    """All frames of one batch, column by column: first those with even stages, then those with uneven ones."""

    batch: int
    replicas: Whole
    stages: Whole
    shards: Whole
    """Shards of the stage that has most."""
    micro_batch: Whole
    uneven: Sequence[UnevenStages] = ()
    uneven_index: Whole = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """For each of the last frames the index of its stages in :attr:`uneven`."""

    def __len__(self) -> int:
        return len(self.replicas)

    @property
    def even_count(self) -> int:
        """Number of frames with even stages."""
        return len(self) - len(self.uneven_index)

    @property
    def micro_batches(self) -> Whole:
        """m of each frame."""
        return np.asarray(self.batch // (self.replicas * self.micro_batch))

    def uneven_column(self, function: Callable[[UnevenStages], int]) -> Whole:
        """Return a number for each of the last frames, computed from its uneven stages."""
        return np.array([function(each) for each in self.uneven], dtype=np.int64)[self.uneven_index]

    def at(self, row: int) -> Frame:
        """Return one frame."""
        r, p, t, b = (int(each[row]) for each in (self.replicas, self.stages, self.shards, self.micro_batch))
        frame = Frame(r, p, t, b, self.batch // (r * b))
        if row < self.even_count:
            return frame
        copies, shards = self.uneven[self.uneven_index[row - self.even_count]]
        uneven_shards = shards if len(set(shards)) > 1 else ()
        return frame._replace(copies=copies if max(copies) > 1 else (), stage_shards=uneven_shards)


def frames(workload: Workload, cluster: Cluster, objectives: Objectives, batch: int) -> Frames:
    """Return all frames of a batch: R · p · t at most as many as there are workers, b · m · R = batch."""
    limit = objectives.max_workers(cluster)
    layers = len(workload.layers(Arrangement()))
    own_batch = workload.global_batch if objectives.fixed == "replica" else None
    replicas = [r for r in divisors(batch) if r <= limit and (own_batch is None or batch == r * own_batch)]
    cuts = [(r, b) for r in replicas for b in divisors(batch // r) if objectives.replicas in (None, r)]
    pairs = np.array(cuts, dtype=np.int64).reshape(-1, 2)
    max_shards = limit if is_supported(cluster, objectives, Arrangement(shards=2)) else 1
    # Of several hosts, each has whole groups of shards or is part of one: no group straddles two of them.
    each = cluster.devices_per_host
    unbroken = (t for t in range(1, max_shards + 1) if cluster.hosts == 1 or each % t == 0 or t % each == 0)
    shards = [t for t in unbroken if workload.refusal(Arrangement(shards=t)) is None]
    # Rows R, p, t, b: numbers in columns, as there are up to a million.
    meshes = [np.zeros((0, 4), dtype=np.int64)]
    for t, p in product(shards, range(1, min(layers, limit) + 1)):
        kept = pairs[pairs[:, 0] * p * t <= limit]
        if len(kept):
            sizes = np.full(len(kept), p), np.full(len(kept), t)
            meshes.append(np.column_stack([kept[:, 0], *sizes, kept[:, 1]]))
    uneven = _uneven_stages(min(MAX_UNEVEN_WORKERS, limit), min(MAX_UNEVEN_STAGES, layers), tuple(shards))
    index = np.zeros(0, dtype=np.int64)
    if uneven:
        workers = np.array([one.workers for one in uneven])
        sizes_of = np.array([(len(one.copies), max(one.shards)) for one in uneven])
        index, pair = np.nonzero(workers[:, None] * pairs[None, :, 0] <= limit)
        meshes.append(np.column_stack([pairs[pair, 0], sizes_of[index], pairs[pair, 1]]))
    r, p, t, b = np.concatenate(meshes).T.copy()
    return Frames(batch, r, p, t, b, uneven, index)


@cache
def _uneven_stages(workers: int, stages: int, shards: tuple[int, ...]) -> Sequence[UnevenStages]:
    """Return (3, 1) replicas of stages, (1, 2, 1) shards, ...

    Several times as many replicas of every stage are more replicas of the model, and are left out.
    """
    sizes = [(n, t) for t in shards for n in range(1, workers // t + 1)]

    def rows(stages: int, workers: int) -> Iterator[tuple[tuple[int, int], ...]]:
        if not stages:
            yield ()
            return
        for n, t in sizes:
            if n * t <= workers - stages + 1:
                yield from (((n, t), *rest) for rest in rows(stages - 1, workers - n * t))

    result = []
    for row in chain.from_iterable(rows(p, workers) for p in range(2, stages + 1)):
        one = UnevenStages(*zip(*row, strict=True))
        uneven_copies, uneven_shards = len(set(one.copies)) > 1, len(set(one.shards)) > 1
        # Stages that differ in both ways are searched up to a smaller size, as there are far more of them.
        largest = MAX_UNEVEN_BOTH if uneven_copies and uneven_shards else workers
        if one.workers <= largest and (uneven_copies or (uneven_shards and max(one.copies) == 1)):
            result.append(one)
    return result


class Option(NamedTuple):
    """Options of a frame."""

    schedule: str
    chunks: int
    recompute: Recomputed
    divided: int
    accumulated: int = 1


def options(frame: Frame, cluster: Cluster, objectives: Objectives) -> Iterator[Option]:
    """Yield all options of a frame, the plainest first; :func:`arrangement` says which are supported."""
    # Shards can't recompute within a stage; of a model on one worker a stage is all of it, and nothing is gained.
    recomputed: tuple[Recomputed, ...] = ("none", "full") if frame.stages == 1 else ("none", "full", "stage")
    divided: tuple[int, ...] = (0,)
    if (frame.replicas > 1 or frame.copies) and supports_zero(cluster, objectives):
        divided = (0, 1, 3) if frame.stages == frame.shards == 1 else (0, 1)
    for schedule, chunks, accumulated in _orders(frame, objectives):
        for recompute, number in product(recomputed, divided):
            yield Option(schedule, chunks, recompute, number, accumulated)


def _orders(frame: Frame, objectives: Objectives) -> Iterator[tuple[str, int, int]]:
    """Yield (schedule, chunks, mini-batches); for a single micro-batch all orders are one.

    First those of one mini-batch, then those of several, so that fewer micro-batches are in flight: 1F1B and
    zero-bubble never have more of them in flight than there are stages, whatever the mini-batch; interleaved stages do.
    GPipe has all of a mini-batch, and does not become better than 1F1B by that.
    """
    m, p, even = frame.micro_batches, frame.stages, not frame.copies
    chunks = range(2, objectives.most_chunks + 1)
    yield "1f1b", 1, 1
    if p == 1:
        return
    if m > 1:
        yield "gpipe", 1, 1
    if m > 1 and even:
        yield "sequential", 1, 1
    if even:
        yield "zero-bubble", 1, 1
        if m % p == 0:
            yield from (("interleaved", v, 1) for v in chunks)
        if objectives.statistical and frame.replicas == 1:
            yield ("pipedream" if m == 1 else "pipedream-2bw"), 1, 1
    for a in divisors(m)[1:]:
        if 1 < m // a < p:
            yield "1f1b", 1, a
        if m // a < p and even:
            yield "zero-bubble", 1, a
        if m // a == p and even:
            yield from (("interleaved", v, a) for v in chunks)


def arrangement(frame: Frame, option: Option, cluster: Cluster, objectives: Objectives) -> Arrangement | None:
    """Return frame and option as one; None where Paceline does not support it."""
    result = Arrangement(
        *frame[:3], option.chunks, frame.micro_batch, frame.micro_batches, option.schedule, frame.copies,
        option.divided, option.recompute, accumulated=option.accumulated, stage_shards=frame.stage_shards,
    )  # fmt: skip
    return result if supported.supports(result) and is_supported(cluster, objectives, result) else None


def is_supported(cluster: Cluster, objectives: Objectives, arrangement: Arrangement) -> bool:
    """Return True if such devices support it, or unsupported plans are requested."""
    return objectives.unbuilt or supported.supports(arrangement, cluster.device.kind, objectives.engine)


def supports_zero(cluster: Cluster, objectives: Objectives) -> bool:
    """Return True if replicas may divide the optimizer's state among them."""
    return is_supported(cluster, objectives, Arrangement(2, 2, divided=1))

"""Every way to divide a step that Paceline has, as arrangements.

::

    frame     replicas × stages × shards (or copies and shards of each stage), and the batch cut into R · m
              micro-batches of b samples
    options   of a frame: schedule and chunks, what is computed again, what is divided among replicas, mini-batches

A frame is a row of numbers, so that a hundred thousand of them can be bounded at once (bounds.py); arrangements are
made of those alone that may be among the best.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.planner.base import Arrangement, Recomputed, Workload
from paceline.planner.cluster import Cluster
from paceline.planner.search import carried
from paceline.planner.search.objective import Objectives

Whole = NDArray[np.int64]

MOST_WORKERS, MOST_OF_BOTH, MOST_UNLIKE_STAGES = 8, 4, 4
"""Of a replica whose stages have different numbers of columns or of shards, of one whose stages have both, and stages
of it: more are not looked at."""


class Unlike(NamedTuple):
    """How the stages of a replica differ."""

    copies: tuple[int, ...]
    """Columns that take turns at each."""
    shards: tuple[int, ...]
    """Of each."""

    @property
    def workers(self) -> int:
        """Of a replica."""
        return sum(n * t for n, t in zip(*self, strict=True))


class Frame(NamedTuple):
    """Sizes that leave the options open."""

    replicas: int
    stages: int
    shards: int
    micro_batch: int
    micro_batches: int
    copies: tuple[int, ...] = ()
    stage_shards: tuple[int, ...] = ()


@dataclass(frozen=True)
class Frames:
    """Those of one batch, column by column."""

    batch: int
    replicas: Whole
    stages: Whole
    shards: Whole
    """Of the stage that has most."""
    micro_batch: Whole
    unlike: Sequence[Unlike] = ()
    which: Whole = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Of these each of the last frames has; the stages of the first frames are alike."""

    def __len__(self) -> int:
        return len(self.replicas)

    @property
    def alike(self) -> int:
        """How many have stages that are."""
        return len(self) - len(self.which)

    @property
    def micro_batches(self) -> Whole:
        """m."""
        found: Whole = self.batch // (self.replicas * self.micro_batch)
        return found

    def at(self, row: int) -> Frame:
        """One of them."""
        r, p, t, b = (int(each[row]) for each in (self.replicas, self.stages, self.shards, self.micro_batch))
        frame = Frame(r, p, t, b, self.batch // (r * b))
        if row < self.alike:
            return frame
        copies, shards = self.unlike[self.which[row - self.alike]]
        return frame._replace(
            copies=copies if max(copies) > 1 else (), stage_shards=shards if len(set(shards)) > 1 else ()
        )


def frames(workload: Workload, cluster: Cluster, asked: Objectives, batch: int) -> Frames:
    """All of a batch: R · p · t at most as many as there are workers, b · m · R = batch."""
    limit = min(cluster.workers, asked.workers or cluster.workers)
    layers = len(workload.layers(Arrangement()))
    pairs = _batch_cuts(batch, limit, workload.global_batch if asked.fixed == "replica" else None)
    pairs = pairs if asked.replicas is None else pairs[pairs[:, 0] == asked.replicas]
    most = limit if can(cluster, asked, Arrangement(shards=2)) else 1
    shards = [t for t in range(1, most + 1) if _shards_fit(t, workload, cluster)]
    stages = np.arange(1, min(layers, limit) + 1)
    unlike = _unlike(min(MOST_WORKERS, limit), min(MOST_UNLIKE_STAGES, layers), tuple(shards))
    of_unlike, which = _unlike_meshes(pairs, unlike, limit)
    columns = np.concatenate([*(_meshes(pairs, stages, t, limit) for t in shards), of_unlike])
    r, p, t, b = columns.T.copy()
    return Frames(batch, r, p, t, b, unlike, which)


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


@cache
def _unlike(workers: int, stages: int, shards: tuple[int, ...]) -> Sequence[Unlike]:
    """(3, 1) take turns, (1, 2, 1) shards, ...; what is several times as many columns everywhere is more replicas."""
    each = [(n, t) for t in shards for n in range(1, workers // t + 1)]
    found = (Unlike(*zip(*row, strict=True)) for p in range(2, stages + 1) for row in _rows(each, p, workers))
    return [one for one in found if _looked_at(one)]


def _looked_at(one: Unlike) -> bool:
    turning, divided = len(set(one.copies)) > 1, len(set(one.shards)) > 1
    if turning and divided:
        return one.workers <= MOST_OF_BOTH
    return turning or (divided and max(one.copies) == 1)


def _rows(each: Sequence[tuple[int, int]], stages: int, workers: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Of so many stages with no more workers together."""
    if not stages:
        yield ()
        return
    for n, t in each:
        if n * t <= workers - stages + 1:
            yield from (((n, t), *rest) for rest in _rows(each, stages - 1, workers - n * t))


def _unlike_meshes(pairs: Whole, unlike: Sequence[Unlike], limit: int) -> tuple[Whole, Whole]:
    """Rows R, p, t, b, and which of these each has."""
    if not unlike:
        return np.zeros((0, 4), dtype=np.int64), np.zeros(0, dtype=np.int64)
    workers, sizes = (
        np.array([one.workers for one in unlike]),
        np.array([(len(one.copies), max(one.shards)) for one in unlike]),
    )
    which, pair = np.nonzero(workers[:, None] * pairs[None, :, 0] <= limit)
    return np.column_stack([pairs[pair, 0], sizes[which], pairs[pair, 1]]), which


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
    accumulated: int = 1


def options(frame: Frame, cluster: Cluster, asked: Objectives) -> Iterator[Option]:
    """All of a frame, the plainest first; :func:`arrangement` says which are carried."""
    divided = _divided(frame) if divides(cluster, asked) else (0,)
    for schedule, chunks in _schedules(frame, asked):
        for recompute, number in product(_recomputed(frame), divided):
            yield Option(schedule, chunks, recompute, number)
    for schedule, chunks, accumulated in _accumulated(frame, asked):
        for recompute, number in product(_recomputed(frame), divided):
            yield Option(schedule, chunks, recompute, number, accumulated)


def arrangement(frame: Frame, option: Option, cluster: Cluster, asked: Objectives) -> Arrangement | None:
    """The two as one; None where Paceline does not carry it."""
    made = Arrangement(
        *frame[:3], option.chunks, frame.micro_batch, frame.micro_batches, option.schedule, frame.copies,
        option.divided, option.recompute, accumulated=option.accumulated, stage_shards=frame.stage_shards,
    )  # fmt: skip
    if carried.never(made) is not None:
        return None
    return made if can(cluster, asked, made) else None


def divides(cluster: Cluster, asked: Objectives) -> bool:
    """Whether replicas may divide what they have among them."""
    return can(cluster, asked, Arrangement(2, 2, divided=1))


def streams(cluster: Cluster, asked: Objectives) -> bool:
    """Whether stages may move their weights without waiting for a flush.

    It is another algorithm, from weights that are some updates old: it competes where the objective counts that.
    """
    return asked.counts and can(cluster, asked, Arrangement(stages=2, schedule="pipedream"))


def can(cluster: Cluster, asked: Objectives, arrangement: Arrangement) -> bool:
    """Whether such devices carry it, or what they don't carry yet is asked for."""
    return asked.unbuilt or carried.unbuilt(arrangement, cluster.device.kind, asked.engine) is None


def _schedules(frame: Frame, asked: Objectives) -> Iterator[tuple[str, int]]:
    """With their chunks; of a single micro-batch there is one order."""
    yield "1f1b", 1
    if frame.stages == 1:
        return
    if frame.micro_batches > 1:
        yield "gpipe", 1
    if frame.copies:
        return
    if frame.micro_batches > 1:
        yield "sequential", 1
    yield "zero-bubble", 1
    if frame.micro_batches % frame.stages == 0:
        yield from (("interleaved", v) for v in range(2, asked.most_chunks + 1))
    if asked.counts and frame.replicas == 1:
        yield ("pipedream" if frame.micro_batches == 1 else "pipedream-2bw"), 1


def _accumulated(frame: Frame, asked: Objectives) -> Iterator[tuple[str, int, int]]:
    """With schedule and chunks, into how many mini-batches a step may be cut so that fewer micro-batches are under way.

    1F1B and zero-bubble never have more than there are stages, whatever the mini-batch; interleaved stages do. GPipe
    has all of a mini-batch, and does not become better than 1F1B by that.
    """
    m, p = frame.micro_batches, frame.stages
    if p == 1:
        return
    for a in divisors(m)[1:]:
        if 1 < m // a < p:
            yield "1f1b", 1, a
        if m // a < p and not frame.copies:
            yield "zero-bubble", 1, a
        if m // a == p and not frame.copies:
            yield from (("interleaved", v, a) for v in range(2, asked.most_chunks + 1))


def _recomputed(frame: Frame) -> tuple[Recomputed, ...]:
    """Shards can't have it within a stage; of a whole model, a stage is all of it, and nothing is gained."""
    if frame.stages == 1:
        return ("none", "full")
    return ("none", "full", "stage")


def _divided(frame: Frame) -> tuple[int, ...]:
    """ZeRO's numbers."""
    if frame.replicas == 1 and not frame.copies:
        return (0,)
    return (0, 1, 3) if frame.stages == frame.shards == 1 else (0, 1)

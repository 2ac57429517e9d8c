"""Simulate when a step of a pipeline ends: slot by slot where all workers alternate, by events elsewhere.

A step of a pipeline, as :mod:`paceline.schedule.simulate` has it, but only when it ends.

Where all workers keep a common rhythm it is gone through slot by slot (slots.py), otherwise event by event. Each worker
goes through its schedule's order; an action begins when the worker is free and what it needs is there::

    F of part j     needs F of part j - 1        a message later, if another worker made it
    B, I of part j  needs B or I of part j + 1   likewise, and its own F
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.core.mesh import StageReplicas
from paceline.core.types import Seconds
from paceline.planner.base import Arrangement, LayerCost, OverlapModel
from paceline.planner.cluster import Cluster
from paceline.planner.stage_division import calls_s, mini_batch, shards_of, with_shards
from paceline.schedule import Schedule, parse

Real: TypeAlias = NDArray[np.float64]
"""A row for each variant, a column for each worker or part."""

NEVER = -np.inf
"""When something was made that nobody waits for."""

STEADY = 1e-14
"""Of the time so far: times that differ by less are rounded sums of the same."""

CHECKED = 8
"""Every so many slots it is looked whether all were put off alike, where a rhythm is shorter."""


@dataclass(frozen=True, slots=True)
class Durations:
    """Of all parts for one micro-batch: variants of it that are gone through together."""

    forward: Real
    backward: Real
    transfer: Real
    """Of a message: one column."""

    @classmethod
    def of(cls, *variants: tuple[Sequence[Seconds], Sequence[Seconds], Seconds]) -> "Durations":
        """Of forward and backward of each part, and of a message."""
        forward, backward, transfer = zip(*variants, strict=True)
        return cls(np.array(forward, float), np.array(backward, float), np.array(transfer, float)[:, None])


def flushed_s(each: Durations, micro_batches: int) -> Real:
    """When GPipe ends: one worker after the other, each all micro-batches at once.

    A pipeline of two, three micro-batches: (m + p - 1) (F + B):

    >>> flushed_s(Durations.of(((1, 1), (2, 2), 0)), 3)
    array([12.])
    """
    workers = range(each.forward.shape[1])
    there, free = np.zeros((len(each.forward), micro_batches)), list[Real]()
    for w in workers:
        there = _in_turn(there + each.transfer * (w > 0), each.forward[:, w, None])
        free.append(there[:, -1:])
    there = np.repeat(free[-1], micro_batches, axis=1)
    for w in reversed(workers):
        arrived = there + each.transfer * (w < workers[-1])
        there = _in_turn(np.maximum(arrived, free[w]), each.backward[:, w, None])
    ends: Real = there[:, -1]
    return ends


def _in_turn(there: Real, takes_s: Real) -> Real:
    """When each of a row of micro-batches is done, which come as they do and take the same time.

    >>> _in_turn(np.array([[0.0, 1.0, 9.0]]), np.array([[2.0]]))
    array([[ 2.,  4., 11.]])
    """
    place = np.arange(there.shape[1])
    done: Real = np.maximum.accumulate(there - place * takes_s, axis=1) + (place + 1) * takes_s
    return done


def alternating_s(each: Durations, micro_batches: int, *, splits: bool) -> Real:
    """When 1F1B ends or, where backward is split in halves, zero-bubble.

    >>> alternating_s(Durations.of(((1, 1), (2, 2), 0)), 3, splits=False)
    array([12.])
    """
    variants, p = each.forward.shape
    m, hop = micro_batches, each.transfer
    backward = each.backward / 2 if splits else each.backward
    chain = np.cumsum(each.forward, axis=1) + hop * np.arange(p)
    lead = each.forward - chain
    free, came = np.zeros((variants, p)), np.full((variants, p + 1), NEVER)
    k, rhythm = 0, Rhythm(p, m, CHECKED)
    while k < m + p - 1:
        if k < m:
            free = np.maximum.accumulate(free + lead, axis=1) + chain
        first, last = max(0, p - 1 - k), min(p, p - 1 - k + m)
        free[:, first:last] = np.maximum(free[:, first:last], came[:, first + 1 : last + 1] + hop)
        free[:, first:last] += backward[:, first:last]
        came[:, first:last] = free[:, first:last]
        if splits and k >= p - 1:
            free += backward
        k += 1
        k += rhythm.skipped(k, free, came)
    ends: Real = free.max(axis=1)
    return ends


def interleaved_s(each: Durations, workers: int, micro_batches: int) -> Real:
    """When the interleaved schedule ends, of which each worker has v of the parts.

    Args:
        each: durations of p · v parts.
        workers: p, at least two.
        micro_batches: m, a multiple of p.

    Two workers with two parts each, four micro-batches: (m + (p - 1)/v) (F + B) of both parts:

    >>> interleaved_s(Durations.of(((1,) * 4, (2,) * 4, 0)), 2, 4)
    array([27.])
    """
    parts = each.forward.shape[1]
    count, later = parts // workers * micro_batches, parts - 1
    onward = Way(each.forward, each.transfer, workers, count)
    back = Way(each.backward[:, ::-1], each.transfer, workers, count)
    free = np.zeros((len(each.forward), workers))
    k, rhythm = 0, Rhythm(later + workers - 1, count, parts)
    while k < later + workers - 1 + count:
        onward.go(k, free)
        back.go(k - later, free[:, ::-1])
        k += 1
        k += rhythm.skipped(k, free, onward.made, back.made)
    ends: Real = free.max(axis=1)
    return ends


class Way:
    """Forward, or backward with workers and parts the other way round: in slot k worker w's number k - w."""

    def __init__(self, takes_s: Real, transfer: Real, workers: int, count: int) -> None:
        self._workers, self._count, self._transfer = workers, count, transfer
        rhythm = takes_s.shape[1]
        w = np.arange(workers)
        part = [w + (k - w) % rhythm // workers * workers for k in range(rhythm)]
        self._takes_s = [takes_s[:, each] for each in part]
        self.made = np.full((len(takes_s), workers + 1), NEVER)
        """By the worker before each; by the last one, for the first and for nobody."""

    def go(self, k: int, free: Real) -> None:
        """One slot, for workers that are free then; the first part of all needs nothing."""
        first, last = max(0, k - self._count + 1), min(self._workers, k + 1)
        if first >= last:
            return
        place = k % len(self._takes_s)
        there = self.made[:, first:last] + self._transfer
        if first == 0 and place < self._workers:
            there[:, 0] = NEVER
        free[:, first:last] = np.maximum(free[:, first:last], there) + self._takes_s[place][:, first:last]
        self.made[:, first + 1 : last + 1] = free[:, first:last]
        self.made[:, 0] = self.made[:, -1]


class Rhythm:
    """Whether slots have become alike."""

    def __init__(self, begins: int, ends: int, length: int) -> None:
        self._begins, self._ends, self._length = begins, ends, length
        self._before: Real | None = None

    def skipped(self, k: int, *times: Real) -> int:
        """How many slots, of those up to ``ends`` in which all workers are busy, are taken at once: added to times."""
        if not self._begins <= k < self._ends or (k - self._begins) % self._length:
            return 0
        now, before = np.concatenate(times, axis=1), self._before
        self._before = now
        if before is None:
            return 0
        with np.errstate(invalid="ignore"):
            later = np.where(now == NEVER, now[:, :1] - before[:, :1], now - before)
        if np.any(np.ptp(later, axis=1) > STEADY * now.max()):
            return 0
        many = (self._ends - k) // self._length
        for each in times:
            each += later[:, :1] * many
        return many * self._length


Step = tuple[bool, int, int]
"""Of an order: whether it goes forward, the part, the micro-batch; a weight's gradient has part -1 - j."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What each part takes for one micro-batch."""

    forward: tuple[Seconds, ...]
    backward: tuple[Seconds, ...]
    transfer: Seconds = 0.0
    """Of a message from part to part, as far as it is hidden from who sends it."""
    seen: Seconds = 0.0
    """What a message holds up who sends it, after either pass."""

    def quiet(self) -> "Parts":
        """Without messages."""
        return Parts(self.forward, self.backward)

    def held_up(self) -> "Parts":
        """With what is seen of messages as a part of the passes; the first part sends nothing back, the last no on."""
        last = len(self.forward) - 1
        forward = tuple(each + self.seen * (j < last) for j, each in enumerate(self.forward))
        backward = tuple(each + self.seen * (j > 0) for j, each in enumerate(self.backward))
        return Parts(forward, backward, self.transfer)


def parts(
    layers: Sequence[LayerCost], cuts: Sequence[int], arrangement: Arrangement, cluster: Cluster, habits: OverlapModel
) -> Parts:
    """Of layers that are cut so: collectives of shards count where they are, messages as part of who sends them."""
    ends = [0, *cuts, len(layers)]
    cut = [layers[start:end] for start, end in pairwise(ends)]
    each = [with_shards(arrangement, t) for t in shards_of(arrangement)]
    passes = {
        id(layer): _passes_s(layer, each[place % len(each)], cluster)
        for place, part in enumerate(cut)
        for layer in part
    }
    one = message_s([part[-1].output_bytes for part in cut[:-1]], arrangement, cluster)
    hidden = one * habits.send_overlap
    return Parts(
        tuple(sum(passes[id(layer)][0] for layer in part) for part in cut),
        tuple(sum(passes[id(layer)][1] for layer in part) for part in cut),
        hidden,
        one - hidden,
    )


def _passes_s(layer: LayerCost, arrangement: Arrangement, cluster: Cluster) -> tuple[Seconds, Seconds]:
    """Forward and backward, each with its part of what is seen of the collectives."""
    group = cluster.shards(arrangement)
    forward = sum(cluster.messages.of(call, group) for call in layer.forward_calls)
    both = forward + sum(cluster.messages.of(call, group) for call in layer.backward_calls)
    seen = calls_s(layer, cluster, arrangement) / both if both else 0.0
    return layer.forward_s + seen * forward, layer.backward_s + seen * (both - forward)


def message_s(sizes: Sequence[int], arrangement: Arrangement, cluster: Cluster) -> Seconds:
    """The longest between two stages."""
    if not sizes or arrangement.stages == 1:
        return 0.0
    group = cluster.neighbours(arrangement)
    return max(cluster.messages.seconds("send", size, group) for size in set(sizes))


def steps_s(arrangement: Arrangement, each: Sequence[Parts]) -> list[Seconds]:
    """From the first forward to the last backward of a step, one mini-batch after the other, for each of several times
    that parts may take.

    A pipeline of two with equal parts, three micro-batches: (m + p - 1) (F + B):

    >>> steps_s(Arrangement(stages=2, micro_batches=3), [Parts((1.0, 1.0), (2.0, 2.0))])
    [12.0]
    """
    held_up = [parts.held_up() for parts in each]
    if not _in_slots(arrangement):
        return [by_events_s(arrangement, parts) for parts in held_up]
    durations = Durations.of(*((parts.forward, parts.backward, parts.transfer) for parts in held_up))
    return [arrangement.accumulated * float(end_s) for end_s in _by_slots_s(arrangement, durations)]


def _in_slots(arrangement: Arrangement) -> bool:
    """Whether all workers keep a common rhythm: where some take turns they don't."""
    known = arrangement.chunks > 1 or arrangement.schedule in ("gpipe", "1f1b", "zero-bubble")
    return known and max(arrangement.copies, default=1) == 1


def _by_slots_s(arrangement: Arrangement, durations: Durations) -> Real:
    m = mini_batch(arrangement)
    if arrangement.chunks > 1:
        return interleaved_s(durations, arrangement.stages, m)
    if arrangement.schedule == "gpipe":
        return flushed_s(durations, m)
    return alternating_s(durations, m, splits=arrangement.schedule == "zero-bubble")


def by_events_s(arrangement: Arrangement, each: Parts) -> Seconds:
    """Of any schedule, with what is seen of messages in the times already."""
    copies = arrangement.copies or (1,) * arrangement.stages
    orders = _orders(_text(arrangement), copies, mini_batch(arrangement))
    return arrangement.accumulated * Run(orders, each, splits=arrangement.schedule == "zero-bubble").end_s()


def _text(arrangement: Arrangement) -> str:
    return f"interleaved:chunks={arrangement.chunks}" if arrangement.chunks > 1 else arrangement.schedule


@lru_cache(maxsize=64)
def _orders(schedule: str, copies: tuple[int, ...], micro_batches: int) -> tuple[tuple[Step, ...], ...]:
    return tuple(tuple(order) for order in _each(parse(schedule), StageReplicas(copies), micro_batches))


def _each(schedule: Schedule, columns: StageReplicas, micro_batches: int) -> Iterator[Iterator[Step]]:
    for column in columns:
        if len(columns) > len(columns.copies):
            actions = schedule.column(column, columns, micro_batches)
        else:
            actions = schedule.actions(column.stage, len(columns.copies), micro_batches)
        yield (
            (a.kind == "forward", -1 - a.stage if a.kind == "backward_weight" else a.stage, a.micro_batch)
            for a in actions
        )


class Run:
    """Workers go on in turn, each until it has to wait for another."""

    def __init__(self, orders: Sequence[Sequence[Step]], each: Parts, *, splits: bool) -> None:
        count = len(each.forward)
        self._orders, self._hop, self._last = orders, each.transfer, count - 1
        self._forward, self._backward = each.forward, [b / 2 for b in each.backward] if splits else each.backward
        self._went: list[dict[int, Seconds]] = [{} for _ in range(count)]
        self._came: list[dict[int, Seconds]] = [{} for _ in range(count)]
        self._free, self._place = [0.0] * len(orders), [0] * len(orders)

    def end_s(self) -> Seconds:
        """Of all."""
        waiting = list(range(len(self._orders)))
        while waiting:
            waiting = [worker for worker in waiting if self._stopped(worker)]
        return max(self._free)

    def _stopped(self, worker: int) -> bool:
        """Goes on as far as can be; whether there is more to do. One loop without calls: it is all that takes time."""
        went, came, hop, last = self._went, self._came, self._hop, self._last
        forward, backward = self._forward, self._backward
        order, place, now = self._orders[worker], self._place[worker], self._free[worker]
        for ahead, part, i in islice(order, place, None):
            if part < 0:
                now += backward[-1 - part]
            elif ahead:
                there = went[part - 1].get(i) if part else -hop
                if there is None:
                    break
                now = max(now, there + hop) + forward[part]
                went[part][i] = now
            else:
                there = came[part + 1].get(i) if part < last else -hop
                if there is None:
                    break
                now = max(now, there + hop) + backward[part]
                came[part][i] = now
            place += 1
        self._place[worker], self._free[worker] = place, now
        return place < len(order)

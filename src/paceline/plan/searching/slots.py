"""A step of a pipeline slot by slot: in each, all workers go on at once, by one forward and one backward.

What :mod:`paceline.plan.searching.simulated` finds action by action, for schedules of which all workers keep a common
rhythm. What worker w does in slot k, each counted in its order: F forwards, B backwards, W gradients of weights::

    1f1b, zero-bubble    F k, B k - (p - 1 - w), W k - (p - 1)    F needs worker w - 1's of this slot, B worker w + 1's
                                                                  of the one before
    interleaved          F k - w, B k - (v + 1) p + 2 + w         both need what the worker before made in the slot
                                                                  before, and the first of them what the last made

Times of a slot follow from those of the one before by maxima and sums alone. So once a whole rhythm has put off all of
them by the same time, each one to come does too, and they are taken at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.core.types import Seconds

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

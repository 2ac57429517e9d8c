"""The best so far, by closed forms, and by what plans are ranked."""

from collections.abc import Iterator, Sequence
from heapq import heappush, heapreplace
from itertools import count
from math import inf
from typing import TypeAlias, TypeVar

import numpy as np

from paceline.plan.base import Arrangement, Cost, Plan, Workload
from paceline.plan.searching import carried
from paceline.plan.searching.asked import Asked
from paceline.plan.searching.bounds import Real, Rows
from paceline.plan.searching.candidates import Frame, arrangement, divides, frames, options
from paceline.plan.searching.known import Known

Key: TypeAlias = tuple[float, float, int]
"""What the objective says, then bytes held, then how much is asked for beside the plainest: less is better."""

V = TypeVar("V", float, Real)

TIE = 1e-9
"""Relatively, objectives this close are equal: it is what sums of the same numbers in another order differ by."""


class Ranking:
    """The best so far, by closed forms."""

    def __init__(self, known: Known, asked: Asked) -> None:
        self._known, self._asked = known, asked
        self.frames = self.costed = self.left_out = 0
        self._room = min(asked.memory_bytes or inf, known.cluster.device.memory_bytes)
        self._heap: list[tuple[tuple[float, ...], int, Arrangement]] = []
        self._numbers = count()

    @property
    def last(self) -> float:
        """What the worst of those kept has for an objective; infinite as long as there is room for more."""
        return -self._heap[0][0][0] if len(self._heap) == self._asked.simulated else inf

    def take(self, batch: int) -> None:
        """All frames of a batch, those first that may be best."""
        found = frames(self._known.workload, self._known.cluster, self._asked, batch)
        self.frames += len(found)
        rows = Rows(self._known.bounds, found, self._asked.most_chunks, divides(self._known.cluster, self._asked))
        least = self._value(rows.step_s, rows.held_bytes, batch)
        fitting = np.nonzero(rows.held_bytes <= self._room)[0]
        for row in fitting[np.argsort(least[fitting], kind="stable")]:
            if least[row] > self.last * (1 + TIE):
                return
            self._frame(found.at(int(row)), batch)

    def _frame(self, frame: Frame, batch: int) -> None:
        """All options that may be best, and fit."""
        known = self._known
        for option in options(frame, known.cluster, self._asked):
            held, step_s = known.bounds.held_bytes(frame, option), known.bounds.step_s(frame, option)
            if held > self._room or self._value(step_s, held, batch) > self.last * (1 + TIE):
                self.left_out += held > self._room
                continue
            made = arrangement(frame, option, known.cluster, self._asked)
            if made is not None and known.workload.refusal(made) is None and known.divisions.fits(made):
                self._try(made)

    def _value(self, step_s: V, held: V, batch: int) -> V:
        """What the objective says."""
        if self._asked.objective == "memory":
            return held
        return step_s / (batch * self._asked.efficiency(batch, self._known.workload.global_batch))

    def _try(self, arrangement: Arrangement) -> None:
        found = self._known.cost(arrangement)
        self.costed += 1
        if found.most.total > self._room:
            self.left_out += 1
            return
        ranked = tuple(-each for each in key_of(arrangement, found, self._known.workload, self._asked))
        entry = (ranked, -next(self._numbers), arrangement)
        if len(self._heap) < self._asked.simulated:
            heappush(self._heap, entry)
        elif entry > self._heap[0]:
            heapreplace(self._heap, entry)

    def best(self) -> Iterator[Arrangement]:
        """Those kept, best first."""
        return (arrangement for _, _, arrangement in sorted(self._heap, reverse=True))


def key(plan: Plan, workload: Workload, asked: Asked) -> Key:
    """By which plans are ranked."""
    return key_of(plan.arrangement, plan.cost, workload, asked)


def key_of(arrangement: Arrangement, found: Cost, workload: Workload, asked: Asked) -> Key:
    """Seconds of a sample that counts, or bytes; then the other of the two; then what is asked for beside."""
    held, samples = found.most.total, arrangement.samples
    seconds = found.step_s / (samples * asked.efficiency(samples, workload.global_batch))
    first, second = (held, seconds) if asked.objective == "memory" else (seconds, held)
    return _rounded(first), _rounded(second), carried.plainness(arrangement)


def _rounded(number: float) -> float:
    """To ten digits, so that equals are equal."""
    return float(f"{number:.9e}")


def undominated(plans: Sequence[Plan]) -> list[Plan]:
    """Without those of the same sizes that another one beats or equals in time and in memory."""
    kept: list[Plan] = []
    for plan in plans:
        if not any(_sizes(other) == _sizes(plan) and other.cost.most.total <= plan.cost.most.total for other in kept):
            kept.append(plan)
    return kept


def _sizes(plan: Plan) -> tuple[object, ...]:
    a = plan.arrangement
    return a.replicas, a.stages, a.shards, a.copies, a.micro_batch, a.micro_batches

"""What a step takes and a worker holds at the least: of a hundred thousand frames at once (rows.py), then by options.

With C the time of all layers for a micro-batch of b samples on t shards, c the longest layer's, n layers of s alike, p
stages of v chunks::

    busiest stage   x  ≥  max(C / p, c, ⌈n / p⌉ s)     of Σ n_j workers, where some take turns, C / Σ n_j
    compute, bubble    ≥  m x + (C - x) / v            which grows with x; with turns m x + C - x max n_j
    zero-bubble        ≥  m x + max(0, max(F, B / 2) - x)
    sequential         ≥  m C
    stages             ≥  (2 (p - 1) + what is seen of 2 m v) · the shortest message; sequential 2 (p - 1) m of them
    accumulated        ≥  as many times what fills and empties the pipeline
    stages that differ ≥  m · each layer on that of their shards where it takes least, by all workers
    replicas           ≥  sums of a stage's parameters, less what may hide in all of backward
    held               ≥  a stage's states, divided as far as they are, and activations: with f_j micro-batches in
                          flight on stage j the most of all is no less than any mean of them, so than one by 1 / f_j

No step takes less by the closed forms of cost.py, so what is left out by these is no loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from math import ceil
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.plan.base import Arrangement, Recomputed, Workload
from paceline.plan.cluster import Cluster, Group
from paceline.plan.division import layers_of
from paceline.plan.habits import Habits
from paceline.plan.held import in_flight
from paceline.plan.searching.candidates import Frame, Option, Unlike
from paceline.plan.searching.sums import Sums, seconds, summed
from paceline.plan.sizes import copies_of
from paceline.plan.streams import STREAMS

Real: TypeAlias = NDArray[np.float64]


@dataclass
class Bounds:
    """For all frames of a workload on a cluster."""

    workload: Workload
    cluster: Cluster
    habits: Habits
    _sums: dict[tuple[int, int, Recomputed], Sums] = field(default_factory=dict[tuple[int, int, Recomputed], Sums])
    _least: dict[tuple[int, frozenset[int], Recomputed], float] = field(
        default_factory=dict[tuple[int, frozenset[int], Recomputed], float]
    )
    _spent: dict[tuple[object, ...], float] = field(default_factory=dict[tuple[object, ...], float])
    _messages: dict[tuple[int, ...], float] = field(default_factory=dict[tuple[int, ...], float])

    def sums(self, micro_batch: int, shards: int, recompute: Recomputed = "none") -> Sums:
        """Remembered."""
        key = micro_batch, shards, recompute
        if key not in self._sums:
            plain = Arrangement(shards=shards, micro_batch=micro_batch, recompute=recompute)
            self._sums[key] = summed(self.workload, self.cluster, plain)
        return self._sums[key]

    def step_s(self, frame: Frame, option: Option) -> float:
        """Of one arrangement, at the least."""
        sums, m, p = self.sums(frame.micro_batch, frame.shards, option.recompute), frame.micro_batches, frame.stages
        habits, again = self.habits, m if option.schedule == "sequential" else option.accumulated
        if frame.stage_shards:
            least = self.least_s(frame.micro_batch, frozenset(frame.stage_shards), option.recompute)
            return m * least / Unlike(frame.copies or (1,) * p, frame.stage_shards).workers + habits.step_s
        if frame.copies:
            busiest = sums.seconds / sum(frame.copies)
            rest = sums.seconds - max(frame.copies) * busiest
        else:
            busiest = max(sums.seconds / p, sums.longest, ceil(sums.alike.many / p) * sums.alike.seconds)
            filled = option.schedule == "zero-bubble"
            rest = max(0.0, (sums.gaps if filled else sums.seconds) - busiest) / option.chunks
        always = habits.step_s + habits.micro_batch_s * m + self.update_s(frame, option)
        if option.schedule in STREAMS:
            return m * busiest + always
        hops = 2.0 * (p - 1) * again
        if p > 1 and option.schedule != "sequential":
            hops += 2 * m * option.chunks * (1 - habits.send_overlap)
        messages = hops * self.message_s(frame.micro_batch, frame.shards, p) if hops else 0.0
        return m * busiest + again * rest + messages + self.exposed_s(frame, option) + always

    def update_s(self, frame: Frame, option: Option) -> float:
        """Of the stage that has most, at the least: its states, and Δ of each micro-batch that is added to others."""
        numerics, copies = self.workload.numerics, max(frame.copies, default=1)
        among, further = frame.replicas * copies, max(0, frame.micro_batches // copies - 1)
        added = self.habits.added_moves * numerics.gradient * further
        moved = 2 * numerics.total / (among if option.divided else 1) + added / (among if option.divided == 3 else 1)
        size = self.sums(frame.micro_batch, frame.shards).parameters / frame.stages
        return moved * size / self.cluster.device.memory_bytes_per_s

    def least_s(self, micro_batch: int, shards: frozenset[int], recompute: Recomputed = "none") -> float:
        """Of all layers for a micro-batch, each with that of these numbers of shards with which it takes least."""
        key = micro_batch, shards, recompute
        if key not in self._least:
            each = [self._seconds(Arrangement(shards=t, micro_batch=micro_batch, recompute=recompute)) for t in shards]
            self._least[key] = float(np.min(each, axis=0).sum())
        return self._least[key]

    def _seconds(self, plain: Arrangement) -> Sequence[float]:
        layers = layers_of(self.workload, plain)
        each = seconds(layers, self.cluster, plain)
        return [each[id(layer)] for layer in layers]

    def message_s(self, micro_batch: int, shards: int, stages: int) -> float:
        """The shortest between two stages; remembered."""
        key = micro_batch, shards, stages
        if key not in self._messages:
            group = self.cluster.neighbours(Arrangement(stages=stages, shards=shards))
            size = self.sums(micro_batch, shards).message_bytes
            self._messages[key] = self.cluster.messages.seconds("send", size, group)
        return self._messages[key]

    def exposed_s(self, frame: Frame, option: Option) -> float:
        """Of what replicas say to each other; nothing of divided parameters, which may hide in both passes."""
        if frame.replicas == 1 or option.divided == 3:
            return 0.0
        key = frame.replicas, frame.stages, frame.shards, frame.copies, option.divided > 0
        if key not in self._spent:
            self._spent[key] = self._spent_s(Arrangement(*key[:3], copies=frame.copies), divided=option.divided > 0)
        hides = self.sums(frame.micro_batch, frame.shards, option.recompute).backward
        return max(0.0, self._spent[key] - self.habits.overlap * hides)

    def _spent_s(self, sizes: Arrangement, *, divided: bool) -> float:
        """Of the stage that has most parameters, whichever of them that is: more columns may have more links."""
        numerics, found = self.workload.numerics, self.cluster.messages.seconds
        parameters = self.sums(1, sizes.shards).parameters / sizes.stages

        def spent(group: Group) -> float:
            if not divided:
                return found("all_reduce", parameters * numerics.gradient, group)
            gathered = found("all_gather", parameters * numerics.parameter, group)
            return found("reduce_scatter", parameters * numerics.gradient, group) + gathered

        return min(spent(self.cluster.replicas(sizes, copies)) for copies in set(copies_of(sizes)))

    def held_bytes(self, frame: Frame, option: Option) -> float:
        """By the worker that holds most, at the least.

        Where stages have different shards over all of these together: no shard of t has less than 1/t of its stage's.
        """
        numerics, among = self.workload.numerics, frame.replicas * max(frame.copies, default=1)
        parted = [among if option.divided >= level else 1 for level in (1, 2, 3)]
        states = numerics.optimizer / parted[0] + numerics.gradient / parted[1] + numerics.parameter / parted[2]
        sums = self.sums(frame.micro_batch, 1 if frame.stage_shards else frame.shards, option.recompute)
        mini_batch = frame.micro_batches // option.accumulated
        flying = flights(option.schedule, option.chunks, frame.stages, frame.copies, mini_batch)
        if frame.stage_shards:
            saved = sums.saved if option.recompute == "stage" else flying.least * sums.saved
            held = sums.parameters * states + saved / option.chunks * self.habits.fragmentation
            return held / sum(frame.stage_shards) + self.habits.context_bytes
        kept = _kept_within(sums, option.chunks, flying) if option.recompute == "stage" else _kept(sums, flying)
        held = max(part.parameters * states + part.saved * self.habits.fragmentation for part in kept)
        return held + self.habits.context_bytes


class Part(NamedTuple):
    """What some worker has at the least."""

    parameters: float
    saved: float


class Flights(NamedTuple):
    """Micro-batches in flight on each stage, f_j, whole ones of all of its chunks."""

    stages: int
    least: float
    most: float
    others: float
    """Σ f_j but for the most."""
    shares: float
    """Σ 1 / f_j."""


@cache
def flights(schedule: str, chunks: int, stages: int, copies: tuple[int, ...], micro_batches: int) -> Flights:
    """Of one arrangement.

    >>> flights("1f1b", 1, 4, (), 3)
    Flights(stages=4, least=1.0, most=3.0, others=6.0, shares=2.1666666666666665)
    """
    if copies or schedule not in ("1f1b", "gpipe", "zero-bubble", "interleaved"):
        made = Arrangement(stages=stages, schedule=schedule, copies=copies, micro_batches=micro_batches)
        each = np.array([in_flight(made, j) for j in range(stages)], dtype=np.float64)
    else:
        each = np.minimum(_unlimited(schedule, chunks, stages, micro_batches), micro_batches).astype(np.float64)
    most = float(each.max())
    return Flights(stages, float(each.min()), most, float(each.sum()) - most, float((1 / each).sum()))


def _unlimited(schedule: str, chunks: int, stages: int, micro_batches: int) -> NDArray[np.generic]:
    """Where there are as many micro-batches as one likes; from the last stage to the first."""
    place = np.arange(1, stages + 1)
    if chunks > 1:
        return ((chunks - 1) * stages + 2 * place - 1) / chunks
    return place if schedule == "1f1b" else np.full(stages, micro_batches if schedule == "gpipe" else stages)


def _kept(sums: Sums, flying: Flights) -> tuple[Part, ...]:
    """Means over stages, all alike and by 1 / f_j, and the stage that has most layers that are the same."""
    many = ceil(sums.alike.many / flying.stages)
    own = many * sums.alike.saved_bytes * flying.least + sums.alike.working_bytes
    return (
        Part(sums.parameters / flying.stages, sums.saved * flying.least / flying.stages),
        Part(sums.parameters / flying.most / flying.shares, sums.saved / flying.shares),
        Part(many * sums.alike.parameters, own),
    )


def _kept_within(sums: Sums, chunks: int, flying: Flights) -> tuple[Part, ...]:
    """Where a stage keeps what comes into its parts, and for a while all of the largest of them."""
    many, received = ceil(sums.alike.many / flying.stages), sums.message_bytes * chunks
    own = ceil(many / chunks) * sums.alike.saved_bytes + sums.alike.working_bytes
    return (
        Part(sums.parameters / flying.stages, (sums.saved / chunks + flying.others * received) / flying.stages),
        Part(many * sums.alike.parameters, own + flying.least * (received - sums.message_bytes)),
    )

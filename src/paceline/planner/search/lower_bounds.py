"""Lower bounds of what a step takes and a worker holds: of whole batches of frames at once, then by options.

What a step takes and a worker holds at the least: of a hundred thousand frames at once (rows.py), then by options.

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

Bounds of all frames of a batch at once, whatever their options: by these they are looked at.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import ceil
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.core.types import Seconds
from paceline.planner.base import Arrangement, LayerCost, OverlapModel, Recomputed, Workload
from paceline.planner.cluster import Cluster, DeviceGroup
from paceline.planner.cost import in_flight
from paceline.planner.search.candidates import Frame, Frames, Option, Unlike, Whole
from paceline.planner.stage_division import STREAMS, copies_of, layer_s, layers_of, own_parameters


@dataclass(frozen=True, slots=True)
class Alike:
    """Layers that are the same, n of them: of p stages one has ⌈n / p⌉ of them or more."""

    many: int
    seconds: Seconds
    """Of each."""
    parameters: int
    """Of each; 0 where they share them."""
    saved_bytes: int
    working_bytes: int


@dataclass(frozen=True, slots=True)
class Sums:
    """Of all layers on one worker of t shards, for b samples."""

    seconds: Seconds
    longest: Seconds
    gaps: Seconds
    """max(F, B / 2): what zero-bubble can't fill."""
    backward: Seconds
    parameters: float
    saved: float
    """Bytes kept from forward to backward."""
    message_bytes: float
    """The least that goes on from a layer."""
    alike: Alike
    """Of those that are the same, the ones that take most time together."""


def summed(workload: Workload, cluster: Cluster, plain: Arrangement) -> Sums:
    """Of an arrangement's b, shards and recomputation."""
    layers = layers_of(workload, plain)
    each = seconds(layers, cluster, plain)
    forward, backward = sum(x.forward_s for x in layers), sum(x.backward_s for x in layers)
    return Sums(
        sum(each[id(layer)] for layer in layers),
        max(each.values()),
        max(forward, backward / 2),
        backward,
        own_parameters([(layer, 1) for layer in layers]),
        sum(layer.saved_bytes for layer in layers),
        min((layer.output_bytes for layer in layers[:-1]), default=0),
        _alike(layers, each),
    )


def seconds(layers: Sequence[LayerCost], cluster: Cluster, arrangement: Arrangement) -> dict[int, Seconds]:
    """Of each layer, by its id: those that are one object are asked for once."""
    return {same: layer_s(layer, cluster, arrangement) for same, layer in {id(each): each for each in layers}.items()}


def _alike(layers: Sequence[LayerCost], each: dict[int, Seconds]) -> Alike:
    many = Counter(map(id, layers))
    layer = max(layers, key=lambda layer: many[id(layer)] * each[id(layer)])
    own = 0 if layer.tied else layer.parameters
    return Alike(many[id(layer)], each[id(layer)], own, layer.saved_bytes, layer.working_bytes)


Real: TypeAlias = NDArray[np.float64]


@dataclass
class Bounds:
    """For all frames of a workload on a cluster."""

    workload: Workload
    cluster: Cluster
    habits: OverlapModel
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

        def spent(group: DeviceGroup) -> float:
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


class BoundedPart(NamedTuple):
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


def _kept(sums: Sums, flying: Flights) -> tuple[BoundedPart, ...]:
    """Means over stages, all alike and by 1 / f_j, and the stage that has most layers that are the same."""
    many = ceil(sums.alike.many / flying.stages)
    own = many * sums.alike.saved_bytes * flying.least + sums.alike.working_bytes
    return (
        BoundedPart(sums.parameters / flying.stages, sums.saved * flying.least / flying.stages),
        BoundedPart(sums.parameters / flying.most / flying.shares, sums.saved / flying.shares),
        BoundedPart(many * sums.alike.parameters, own),
    )


def _kept_within(sums: Sums, chunks: int, flying: Flights) -> tuple[BoundedPart, ...]:
    """Where a stage keeps what comes into its parts, and for a while all of the largest of them."""
    many, received = ceil(sums.alike.many / flying.stages), sums.message_bytes * chunks
    own = ceil(many / chunks) * sums.alike.saved_bytes + sums.alike.working_bytes
    return (
        BoundedPart(sums.parameters / flying.stages, (sums.saved / chunks + flying.others * received) / flying.stages),
        BoundedPart(many * sums.alike.parameters, own + flying.least * (received - sums.message_bytes)),
    )


@dataclass(frozen=True)
class Rows:
    """Bounds of all frames of one batch, whatever their options."""

    bounds: Bounds
    frames: Frames
    most_chunks: int
    divides: bool
    """Whether replicas may divide what they have among them."""
    streams: bool
    """Whether the pipeline of one replica may go on from step to step."""

    @cached_property
    def workers(self) -> Whole:
        """Of each."""
        own = self.frames.shards * self.frames.stages
        own[self.frames.alike :] = self._of_unlike(lambda one: one.workers)
        found: Whole = self.frames.replicas * own
        return found

    def _of_unlike(self, of: Callable[[Unlike], int]) -> Whole:
        """Of the last frames, whose stages differ."""
        found: Whole = np.array([of(one) for one in self.frames.unlike], dtype=np.int64)[self.frames.which]
        return found

    @cached_property
    def by_step(self) -> Whole:
        """Places, the quickest first."""
        found: Whole = np.argsort(self.step_s, kind="stable")
        return found

    @cached_property
    def by_held(self) -> Whole:
        """Places, the smallest first."""
        found: Whole = np.argsort(self.held_bytes, kind="stable")
        return found

    @cached_property
    def _pairs(self) -> tuple[NDArray[np.int64], Sequence[tuple[int, int]]]:
        """Which pair of b and t each frame has, and the pairs."""
        most = int(self.frames.shards.max(initial=0)) + 1
        different, which = np.unique(self.frames.micro_batch * most + self.frames.shards, return_inverse=True)
        return which, [divmod(int(each), most) for each in different]

    def _each(self, of: Callable[[Sums], float]) -> Real:
        which, pairs = self._pairs
        found: Real = np.array([float(of(self.bounds.sums(b, t))) for b, t in pairs])[which]
        return found

    @cached_property
    def _most_alike(self) -> Real:
        """Layers that are the same, of which some stage has so many at least."""
        found: Real = np.ceil(self._each(lambda sums: sums.alike.many) / self.frames.stages)
        return found

    @cached_property
    def step_s(self) -> Real:
        """At the least."""
        m, p, habits = self.frames.micro_batches, self.frames.stages, self.bounds.habits
        all_s = self._each(lambda sums: sums.seconds)
        busiest = np.maximum(all_s / p, self._each(lambda sums: sums.longest))
        busiest = np.maximum(busiest, self._most_alike * self._each(lambda sums: sums.alike.seconds))
        rest: Real = np.maximum(0.0, all_s - busiest) / self.most_chunks
        gaps: Real = np.maximum(0.0, self._each(lambda sums: sums.gaps) - busiest)
        bubble: Real = np.minimum(rest, np.where(self.frames.shards == 1, gaps, rest))
        found: Real = m * busiest + bubble + self._messages_s()
        if self.streams:
            found = np.where((self.frames.replicas == 1) & (self.frames.shards == 1), m * busiest, found)
        found += self._update_s() + habits.micro_batch_s * m
        if len(self.frames.which):
            found[self.frames.alike :] = self._unlike_s(all_s)
        return found + habits.step_s

    def _update_s(self) -> Real:
        """Divided among replicas as far as it may be; Δs of micro-batches that are added only where they may be."""
        frames, numerics = self.frames, self.bounds.workload.numerics
        among = frames.replicas if self.divides else np.ones_like(frames.stages)
        added = self.bounds.habits.added_moves * numerics.gradient * (frames.micro_batches - 1)
        added = added / np.where((frames.stages == 1) & (frames.shards == 1), among, 1)
        moved = (2 * numerics.total / among + added) * self._each(lambda sums: sums.parameters) / frames.stages
        found: Real = moved / self.bounds.cluster.device.memory_bytes_per_s
        return found

    def _unlike_s(self, all_s: Real) -> Real:
        """Where some take turns, all columns count rather than the stages; where shards differ all workers, each layer
        with that of their numbers with which it takes least."""
        frames, first = self.frames, self.frames.alike
        m, size = frames.micro_batches[first:], frames.micro_batch[first:]
        columns, most = self._of_unlike(lambda one: sum(one.copies)), self._of_unlike(lambda one: max(one.copies))
        turning = all_s[first:] * (1 + (m - most) / columns) + self._messages_s()[first:]
        sets = list(dict.fromkeys(frozenset(one.shards) for one in frames.unlike))
        of_set = self._of_unlike(lambda one: sets.index(frozenset(one.shards)))
        sizes, of_size = np.unique(size, return_inverse=True)
        least = np.array([[self.bounds.least_s(int(b), each) for each in sets] for b in sizes])
        divided = m * least[of_size.reshape(-1), of_set] / self._of_unlike(lambda one: one.workers)
        found: Real = np.where(self._of_unlike(lambda one: len(set(one.shards))) == 1, turning, divided)
        return found

    def _messages_s(self) -> Real:
        which, pairs = self._pairs
        p, seen = self.frames.stages, 2 * self.frames.micro_batches * (1 - self.bounds.habits.send_overlap)
        each = self.bounds.cluster.devices_per_host
        inside = np.array([self.bounds.message_s(b, t, max(1, each // t)) for b, t in pairs])[which]
        between = np.array([self.bounds.message_s(b, t, each // t + 1) for b, t in pairs])[which]
        one = np.where(p * self.frames.shards <= each, np.minimum(inside, between), between)
        hops = np.minimum(2 * (p - 1) + seen, 2 * (p - 1) * self.frames.micro_batches)
        found: Real = np.where(p > 1, hops * one, 0.0)
        return found

    @cached_property
    def held_bytes(self) -> Real:
        """At the least, by the worker that holds most: states, divided as far as can be."""
        numerics, p = self.bounds.workload.numerics, self.frames.stages
        replicas = self._among() if self.divides else np.ones_like(p)
        whole = (p == 1) & (self.frames.shards == 1)
        states = numerics.parameter + numerics.gradient + numerics.optimizer / replicas
        states = np.where(whole, numerics.total / replicas, states)
        alike = self._most_alike * self._each(lambda sums: sums.alike.parameters)
        own = np.maximum(self._each(lambda sums: sums.parameters) / p, alike)
        shards = self._of_unlike(lambda one: sum(one.shards))
        own[self.frames.alike :] = np.maximum(own[self.frames.alike :], self.bounds.sums(1, 1).parameters / shards)
        found: Real = own * states + self.bounds.habits.context_bytes
        return found

    def _among(self) -> Whole:
        """Workers that may have the same part of A, at the most."""
        found: Whole = self.frames.replicas.copy()
        found[self.frames.alike :] *= self._of_unlike(lambda one: max(one.copies))
        return found

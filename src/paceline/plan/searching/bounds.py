"""What a step takes and a worker holds at the least: of a hundred thousand frames at once, then option by option.

With C the time of all layers for a micro-batch of b samples on t shards, c the longest layer's, p stages of v chunks::

    busiest stage   x  ≥  max(C / p, c)            of Σ n_j workers, where some take turns, C / Σ n_j
    compute, bubble    ≥  m x + (C - x) / v        which grows with x; with turns m x
    zero-bubble        ≥  m x + max(0, max(F, B / 2) - x)
    stages             ≥  (2 (p - 1) + what is seen of 2 m v) · the shortest message
    replicas           ≥  sums of 1/p of all parameters, less what may hide in all of backward
    held               ≥  states of 1/p of all parameters, divided as far as they are

No step takes less by the closed forms of cost.py, so what is left out by these is no loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from paceline.plan.base import Arrangement, Recomputed, Workload
from paceline.plan.cluster import Cluster
from paceline.plan.division import layer_s, layers_of, own_parameters
from paceline.plan.habits import Habits
from paceline.plan.searching.candidates import Frame, Frames, Option

Real = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sums:
    """Of all layers, for one micro-batch on one worker of t shards."""

    seconds: float
    longest: float
    gaps: float
    """max(F, B / 2): what zero-bubble can't fill."""
    backward: float
    parameters: float
    saved: float
    """Bytes kept from forward to backward."""
    message_bytes: float
    """The least that goes on from a layer."""


@dataclass
class Bounds:
    """For all frames of a workload on a cluster."""

    workload: Workload
    cluster: Cluster
    habits: Habits
    _sums: dict[tuple[int, int, Recomputed], Sums] = field(default_factory=dict[tuple[int, int, Recomputed], Sums])
    _exposed: dict[tuple[int, ...], float] = field(default_factory=dict[tuple[int, ...], float])
    _messages: dict[tuple[int, ...], float] = field(default_factory=dict[tuple[int, ...], float])

    def sums(self, micro_batch: int, shards: int, recompute: Recomputed = "none") -> Sums:
        """Remembered."""
        key = micro_batch, shards, recompute
        if key not in self._sums:
            self._sums[key] = self._summed(Arrangement(shards=shards, micro_batch=micro_batch, recompute=recompute))
        return self._sums[key]

    def _summed(self, plain: Arrangement) -> Sums:
        layers = layers_of(self.workload, plain)
        each = {id(layer): layer_s(layer, self.cluster, plain) for layer in layers}
        forward, backward = sum(x.forward_s for x in layers), sum(x.backward_s for x in layers)
        return Sums(
            sum(each[id(layer)] for layer in layers),
            max(each.values()),
            max(forward, backward / 2),
            backward,
            own_parameters([(layer, 1) for layer in layers]),
            sum(layer.saved_bytes for layer in layers),
            min((layer.output_bytes for layer in layers[:-1]), default=0),
        )

    def step_s(self, frame: Frame, option: Option) -> float:
        """Of one arrangement, at the least."""
        sums, m, p = self.sums(frame.micro_batch, frame.shards, option.recompute), frame.micro_batches, frame.stages
        busiest = sums.seconds / sum(frame.copies) if frame.copies else max(sums.seconds / p, sums.longest)
        if frame.copies:
            rest = 0.0
        elif option.schedule == "zero-bubble":
            rest = max(0.0, sums.gaps - busiest)
        else:
            rest = max(0.0, sums.seconds - busiest) / option.chunks
        hops = 2 * (p - 1) + 2 * m * option.chunks * (1 - self.habits.send_overlap) if p > 1 else 0.0
        messages = hops * self.message_s(frame.micro_batch, frame.shards, p) if hops else 0.0
        return m * busiest + rest + messages + self.exposed_s(frame, option) + self.habits.step_s

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
        key = frame.replicas, frame.stages, frame.shards, int(option.divided > 0)
        if key not in self._exposed:
            self._exposed[key] = self._spent_s(*key)
        hides = self.sums(frame.micro_batch, frame.shards, option.recompute).backward
        return max(0.0, self._exposed[key] - self.habits.overlap * hides)

    def _spent_s(self, replicas: int, stages: int, shards: int, divided: int) -> float:
        group = self.cluster.replicas(Arrangement(replicas, stages, shards))
        numerics, found = self.workload.numerics, self.cluster.messages.seconds
        size = self.sums(1, shards).parameters / stages
        if not divided:
            return found("all_reduce", size * numerics.gradient, group)
        gathered = found("all_gather", size * numerics.parameter, group)
        return found("reduce_scatter", size * numerics.gradient, group) + gathered

    def held_bytes(self, frame: Frame, option: Option) -> float:
        """By the worker that holds most, at the least: the mean over stages, each with as few micro-batches as any."""
        numerics, among = self.workload.numerics, frame.replicas
        parted = [among if option.divided >= level else 1 for level in (1, 2, 3)]
        states = numerics.optimizer / parted[0] + numerics.gradient / parted[1] + numerics.parameter / parted[2]
        sums = self.sums(frame.micro_batch, frame.shards, option.recompute)
        if option.recompute == "stage":
            activations = sums.saved / option.chunks
        else:
            activations = least_in_flight(frame, option) * sums.saved
        held = sums.parameters * states + activations * self.habits.fragmentation
        return held / frame.stages + self.habits.context_bytes


def least_in_flight(frame: Frame, option: Option) -> float:
    """Micro-batches that every stage keeps at least, in whole ones of all of its chunks.

    >>> least_in_flight(Frame(1, 4, 1, 1, 8), Option("interleaved", 2, "none", 0))
    2.5
    """
    p, m, v = frame.stages, frame.micro_batches, option.chunks
    if frame.copies:
        return 1.0
    if v > 1:
        return min(m, ((v - 1) * p + 1) / v)
    return {"gpipe": m, "zero-bubble": min(p, m)}.get(option.schedule, 1)


@dataclass(frozen=True)
class Rows:
    """Bounds of all frames of one batch, whatever their options."""

    bounds: Bounds
    frames: Frames
    most_chunks: int
    divides: bool
    """Whether replicas may divide what they have among them."""

    @cached_property
    def _pairs(self) -> tuple[NDArray[np.int64], Sequence[tuple[int, int]]]:
        """Which pair of b and t each frame has, and the pairs."""
        pairs = np.column_stack([self.frames.micro_batch, self.frames.shards])
        different, which = np.unique(pairs, axis=0, return_inverse=True)
        return which.reshape(-1), [(int(b), int(t)) for b, t in different]

    def _each(self, name: str) -> Real:
        which, pairs = self._pairs
        found: Real = np.array([getattr(self.bounds.sums(b, t), name) for b, t in pairs], dtype=np.float64)[which]
        return found

    @cached_property
    def step_s(self) -> Real:
        """At the least."""
        m, p, all_s = self.frames.micro_batches, self.frames.stages, self._each("seconds")
        busiest = np.maximum(all_s / p, self._each("longest"))
        rest = np.maximum(0.0, all_s - busiest) / self.most_chunks
        gaps = np.where(self.frames.shards == 1, np.maximum(0.0, self._each("gaps") - busiest), rest)
        found: Real = m * busiest + np.minimum(rest, gaps) + self._messages_s() + self.bounds.habits.step_s
        return self._with_turns(found, m * all_s)

    def _messages_s(self) -> Real:
        which, pairs = self._pairs
        p, seen = self.frames.stages, 2 * self.frames.micro_batches * (1 - self.bounds.habits.send_overlap)
        each = self.bounds.cluster.devices_per_host
        inside = np.array([self.bounds.message_s(b, t, max(1, each // t)) for b, t in pairs])[which]
        between = np.array([self.bounds.message_s(b, t, each // t + 1) for b, t in pairs])[which]
        one = np.where(p * self.frames.shards <= each, np.minimum(inside, between), between)
        found: Real = np.where(p > 1, (2 * (p - 1) + seen) * one, 0.0)
        return found

    def _with_turns(self, found: Real, all_s: Real) -> Real:
        """Where some take turns, their sum counts rather than the stages."""
        turning = len(self.frames.copies)
        if turning:
            found[-turning:] = all_s[-turning:] / [sum(copies) for copies in self.frames.copies]
        return found

    @cached_property
    def held_bytes(self) -> Real:
        """At the least, by the worker that holds most: states, divided as far as can be."""
        numerics, p = self.bounds.workload.numerics, self.frames.stages
        replicas = self.frames.replicas if self.divides else np.ones_like(p)
        whole = (p == 1) & (self.frames.shards == 1)
        states = numerics.parameter + numerics.gradient + numerics.optimizer / replicas
        states = np.where(whole, numerics.total / replicas, states)
        found: Real = self._each("parameters") / p * states + self.bounds.habits.context_bytes
        return found

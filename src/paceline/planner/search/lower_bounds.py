"""Lower bounds of a step's time and a worker's memory: of all frames of a batch at once, then of each of their options.

With C the time of all layers for a micro-batch of b samples on t shards, c the longest layer's, n equal layers of s, p
stages of v chunks::

    busiest stage   x  ≥  max(C / p, c, ⌈n / p⌉ s)     of Σ n_j workers, with n_j replicas of a stage, C / Σ n_j
    compute, bubble    ≥  m x + (C - x) / v            which grows with x; with stage replicas m x + C - x max n_j
    zero-bubble        ≥  m x + max(0, max(F, B / 2) - x)
    sequential         ≥  m C
    stages             ≥  (2 (p - 1) + the exposed part of 2 m v) · the shortest message; sequential 2 (p - 1) m of them
    accumulated        ≥  as many times the filling and emptying of the pipeline
    uneven shards      ≥  m · each layer on those shards where it takes least, divided by all workers
    replicas           ≥  sums of a stage's parameters, less all of backward that may overlap
    memory             ≥  a stage's states, divided as far as they are, and activations: with f_j micro-batches in
                          flight on stage j the most of all is no less than any mean of them, so than one by 1 / f_j

No step takes less by the closed forms of cost.py, so candidates that these exclude are no loss.
"""

from collections import Counter
from functools import cache, cached_property
from math import ceil
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.core.types import Seconds
from paceline.planner.base import Arrangement, OverlapModel, Recomputed, Workload
from paceline.planner.cluster import Cluster
from paceline.planner.cost import in_flight, replica_sum_s
from paceline.planner.search.candidates import Frame, Frames, Option, UnevenStages, Whole
from paceline.planner.stage_division import ASYNC_SCHEDULES, layer_seconds, layers_of, own_parameters

Real: TypeAlias = NDArray[np.float64]


class LayerTotals(NamedTuple):
    """Sums over all layers on one worker of t shards, for b samples."""

    seconds: Seconds
    longest: Seconds
    gaps: Seconds
    """max(F, B / 2): time that zero-bubble can't fill."""
    backward: Seconds
    parameters: float
    saved: float
    """Bytes of activations kept from forward to backward."""
    message_bytes: float
    """The smallest output of a layer."""
    repeats: int
    """Number of equal layers, of the kind that takes most time together: of p stages one has ⌈n / p⌉ or more."""
    repeated_s: Seconds
    """Seconds of each of these."""
    repeated_parameters: int
    """Parameters of each; 0 where they share them."""
    repeated_saved: int
    repeated_working: int


class InFlight(NamedTuple):
    """Micro-batches in flight on each stage, f_j, whole ones of all of its chunks."""

    least: float
    most: float
    others: float
    """Σ f_j but for the most."""
    shares: float
    """Σ 1 / f_j."""


@cache
def flights(schedule: str, chunks: int, stages: int, copies: tuple[int, ...], mini_batch: int) -> InFlight:
    """Summarise :func:`~paceline.planner.cost.in_flight`; thousands of options have the same.

    >>> flights("1f1b", 1, 4, (), 3)
    InFlight(least=1.0, most=3.0, others=6.0, shares=2.1666666666666665)
    """
    sizes = Arrangement(stages=stages, chunks=chunks, schedule=schedule, copies=copies, micro_batches=mini_batch)
    each = np.array(in_flight(sizes), dtype=np.float64)
    most = float(each.max())
    return InFlight(float(each.min()), most, float(each.sum()) - most, float((1 / each).sum()))


class OptionBounds:
    """Lower bounds of single arrangements of a workload on a cluster; their parts are cached, as many share them."""

    def __init__(self, workload: Workload, cluster: Cluster, overlap_model: OverlapModel) -> None:
        self.workload, self.cluster, self.overlap_model = workload, cluster, overlap_model
        self.totals = cache(self._totals)
        self.least_s = cache(self._least_s)
        self.message_s = cache(self._message_s)
        self._cached_sum_s = cache(self._sum_s)

    def step_s(self, frame: Frame, option: Option) -> Seconds:
        """Return a lower bound of a step's time."""
        b, t, m, p, overlap = frame.micro_batch, frame.shards, frame.micro_batches, frame.stages, self.overlap_model
        if frame.stage_shards:
            least = self.least_s(b, frozenset(frame.stage_shards), option.recompute)
            return m * least / UnevenStages(frame.copies or (1,) * p, frame.stage_shards).workers + overlap.step_s
        totals = self.totals(b, t, option.recompute)
        if frame.copies:
            busiest = totals.seconds / sum(frame.copies)
            rest = totals.seconds - max(frame.copies) * busiest
        else:
            # A stage has the mean, the longest layer, or ⌈n / p⌉ of the equal ones, whichever takes most.
            busiest = max(totals.seconds / p, totals.longest, ceil(totals.repeats / p) * totals.repeated_s)
            filled = option.schedule == "zero-bubble"
            rest = max(0.0, (totals.gaps if filled else totals.seconds) - busiest) / option.chunks
        # Terms that every schedule has.
        always = overlap.step_s + overlap.micro_batch_s * m + self._update_s(frame, option)
        if option.schedule in ASYNC_SCHEDULES:
            return m * busiest + always
        # Fillings of the pipeline: sequential fills it anew for each micro-batch.
        fills = m if option.schedule == "sequential" else option.accumulated
        hops = 2.0 * (p - 1) * fills
        if p > 1 and option.schedule != "sequential":
            hops += 2 * m * option.chunks * (1 - overlap.send_overlap)
        messages = hops * self.message_s(b, t, p) if hops else 0.0
        exposed = 0.0
        if frame.replicas > 1 and option.divided < 3:  # divided parameters may overlap with both passes
            spent = self._cached_sum_s(frame.replicas, p, t, frame.copies, option.divided > 0)
            exposed = max(0.0, spent - overlap.overlap * totals.backward)
        return m * busiest + fills * rest + messages + exposed + always

    def _update_s(self, frame: Frame, option: Option) -> Seconds:
        """Bound the update of the stage that has most parameters, with each Δ that is accumulated."""
        numerics, copies = self.workload.numerics, max(frame.copies, default=1)
        # The first replica of a stage has ⌈m / n⌉ micro-batches; ⌊m / n⌋ bounds it.
        among, further = frame.replicas * copies, max(0, frame.micro_batches // copies - 1)
        added = self.overlap_model.added_moves * numerics.gradient * further
        moved = 2 * numerics.total / (among if option.divided else 1) + added / (among if option.divided == 3 else 1)
        size = self.totals(frame.micro_batch, frame.shards, "none").parameters / frame.stages
        return moved * size / self.cluster.device.memory_bytes_per_s

    def _sum_s(self, replicas: int, stages: int, shards: int, copies: tuple[int, ...], divided: bool) -> Seconds:
        """Bound the sum over replicas of the stage that has most parameters, whichever of them that is.

        More replicas of a stage may have more links.
        """
        sizes, parameters = (
            Arrangement(replicas, stages, shards, copies=copies),
            self.totals(1, shards, "none").parameters,
        )
        # Which stage has most parameters is not known yet, so the fastest group counts.
        groups = {self.cluster.replicas(sizes, each) for each in sizes.stage_replicas}
        collectives, numerics = (1, 1) if divided else None, self.workload.numerics
        shares = self.cluster.shares_memory and stages == shards == 1
        return min(
            replica_sum_s(parameters / stages, numerics, self.cluster, each, collectives, shares=shares)
            for each in groups
        )

    def memory_bytes(self, frame: Frame, option: Option) -> float:
        """Return a lower bound of the peak memory of the worker that needs most.

        Where stages have different shards it is the mean over all of these: no shard of t has less than 1/t of its
        stage's.
        """
        numerics, among, p = self.workload.numerics, frame.replicas * max(frame.copies, default=1), frame.stages
        zero_1, zero_2, zero_3 = (among if option.divided >= level else 1 for level in (1, 2, 3))
        if self.cluster.shares_memory and option.divided == 1 and p == frame.shards == 1:
            zero_3 = among
        # Bytes of each parameter of the stage.
        states = numerics.optimizer / zero_1 + numerics.gradient / zero_2 + numerics.parameter / zero_3
        totals = self.totals(frame.micro_batch, 1 if frame.stage_shards else frame.shards, option.recompute)
        mini_batch = frame.micro_batches // option.accumulated
        flying = flights(option.schedule, option.chunks, p, frame.copies, mini_batch)
        overlap, chunks = self.overlap_model, option.chunks
        fragmentation, context = overlap.fragmentation, overlap.context_bytes
        if frame.stage_shards:
            saved = totals.saved if option.recompute == "stage" else flying.least * totals.saved
            return (totals.parameters * states + saved / chunks * fragmentation) / sum(frame.stage_shards) + context
        repeats = ceil(totals.repeats / p)
        repeated = repeats * totals.repeated_parameters
        parts: tuple[tuple[float, float], ...]
        if option.recompute == "stage":  # a stage keeps its inputs, and for a while all of its largest chunk
            received = totals.message_bytes * chunks
            own = ceil(repeats / chunks) * totals.repeated_saved + totals.repeated_working
            parts = (
                (totals.parameters / p, (totals.saved / chunks + flying.others * received) / p),
                (repeated, own + flying.least * (received - totals.message_bytes)),
            )
        else:  # means over stages, all alike and by 1 / f_j, and the stage that has most of the equal layers
            parts = (
                (totals.parameters / p, totals.saved * flying.least / p),
                (totals.parameters / flying.most / flying.shares, totals.saved / flying.shares),
                (repeated, repeats * totals.repeated_saved * flying.least + totals.repeated_working),
            )
        return max(parameters * states + saved * fragmentation for parameters, saved in parts) + context

    def _totals(self, micro_batch: int, shards: int, recompute: Recomputed) -> LayerTotals:
        plain = Arrangement(shards=shards, micro_batch=micro_batch, recompute=recompute)
        layers = layers_of(self.workload, plain)
        seconds, many = layer_seconds(layers, self.cluster, plain), Counter(map(id, layers))
        forward, backward = sum(x.forward_s for x in layers), sum(x.backward_s for x in layers)
        parameters = own_parameters([(layer, 1) for layer in layers])
        total_s, saved = sum(seconds[id(layer)] for layer in layers), sum(layer.saved_bytes for layer in layers)
        message = min((layer.output_bytes for layer in layers[:-1]), default=0)
        # Equal layers are one object: their number bounds the busiest stage from below.
        repeated = max(layers, key=lambda layer: many[id(layer)] * seconds[id(layer)])
        repeated_parameters = 0 if repeated.tied else repeated.parameters
        totals = total_s, max(seconds.values()), max(forward, backward / 2), backward, parameters, saved, message
        equal = many[id(repeated)], seconds[id(repeated)], repeated_parameters
        return LayerTotals(*totals, *equal, repeated.saved_bytes, repeated.working_bytes)

    def _least_s(self, micro_batch: int, shards: frozenset[int], recompute: Recomputed) -> Seconds:
        """Sum all layers for a micro-batch, each with that of these numbers of shards with which it takes least."""
        rows = []
        for t in shards:
            plain = Arrangement(shards=t, micro_batch=micro_batch, recompute=recompute)
            layers = layers_of(self.workload, plain)
            seconds = layer_seconds(layers, self.cluster, plain)
            rows.append([seconds[id(layer)] for layer in layers])
        return float(np.min(rows, axis=0).sum())

    def _message_s(self, micro_batch: int, shards: int, stages: int) -> Seconds:
        """Bound a message between two stages by the smallest output."""
        group = self.cluster.neighbours(Arrangement(stages=stages, shards=shards))
        return self.cluster.messages.seconds("send", self.totals(micro_batch, shards, "none").message_bytes, group)


class FrameBounds:
    """Lower bounds of all frames of one batch, whatever their options: arrays with one number a frame.

    Args:
        bounds: of single arrangements.
        frames: of the batch.
        most_chunks: v at the most.
        zero: whether replicas may divide the optimizer's state.
        async_pipelines: whether the pipeline of one replica may be asynchronous.
    """

    def __init__(
        self, bounds: OptionBounds, frames: Frames, most_chunks: int, zero: bool, async_pipelines: bool
    ) -> None:
        self.frames, self._bounds, self._most_chunks = frames, bounds, most_chunks
        self._zero, self._async_pipelines = zero, async_pipelines
        workers = frames.shards * frames.stages
        workers[frames.even_count :] = frames.uneven_column(lambda one: one.workers)
        self.workers: Whole = frames.replicas * workers
        # Totals depend on b and t alone: of each pair they are summed once.
        base = int(frames.shards.max(initial=0)) + 1
        pairs, self._pair = np.unique(frames.micro_batch * base + frames.shards, return_inverse=True)
        self._pairs = [divmod(int(each), base) for each in pairs]

    @cached_property
    def by_step(self) -> Whole:
        """Indices of the frames, the fastest first."""
        return np.argsort(self.step_s, kind="stable")

    @cached_property
    def by_memory(self) -> Whole:
        """Indices of the frames, the smallest first."""
        return np.argsort(self.memory_bytes, kind="stable")

    def _column(self, name: str) -> Real:
        """Return a number of each frame's totals."""
        numbers = [float(getattr(self._bounds.totals(b, t, "none"), name)) for b, t in self._pairs]
        return np.array(numbers, dtype=np.float64)[self._pair]

    @cached_property
    def step_s(self) -> Real:
        """Lower bounds of a step's time."""
        frames, overlap = self.frames, self._bounds.overlap_model
        r, p, t, m = frames.replicas, frames.stages, frames.shards, frames.micro_batches
        all_s = self._column("seconds")
        busiest = np.maximum(all_s / p, self._column("longest"))
        repeats = np.ceil(self._column("repeats") / p)
        busiest = np.maximum(busiest, repeats * self._column("repeated_s"))
        # The bubble is smallest with most chunks, or with zero-bubble.
        rest: Real = np.maximum(0.0, all_s - busiest) / self._most_chunks
        gaps: Real = np.maximum(0.0, self._column("gaps") - busiest)
        bubble: Real = np.minimum(rest, np.where(t == 1, gaps, rest))  # shards have no zero-bubble
        messages = self._messages_s()
        result: Real = m * busiest + bubble + messages
        if self._async_pipelines:
            result = np.where((r == 1) & (t == 1), m * busiest, result)
        result += self._update_s() + overlap.micro_batch_s * m
        if len(frames.uneven_index):
            result[frames.even_count :] = self._uneven_step_s(all_s, messages)
        return result + overlap.step_s

    def _messages_s(self) -> Real:
        """Bound messages between stages, which are on one host or not, and of which ``sequential`` has m at a time."""
        p, m, each = self.frames.stages, self.frames.micro_batches, self._bounds.cluster.devices_per_host
        message_s = self._bounds.message_s
        inside = np.array([message_s(b, t, max(1, each // t)) for b, t in self._pairs])[self._pair]
        between = np.array([message_s(b, t, each // t + 1) for b, t in self._pairs])[self._pair]
        one = np.where(p * self.frames.shards <= each, np.minimum(inside, between), between)
        # The option with fewest exposed messages counts.
        exposed = 2 * m * (1 - self._bounds.overlap_model.send_overlap)
        return np.where(p > 1, np.minimum(2 * (p - 1) + exposed, 2 * (p - 1) * m) * one, 0.0)

    def _update_s(self) -> Real:
        """Bound the update: divided among replicas as far as it may be, accumulated Δ only where it may be."""
        frames, bounds, numerics = self.frames, self._bounds, self._bounds.workload.numerics
        among = frames.replicas if self._zero else np.ones_like(frames.stages)
        added = bounds.overlap_model.added_moves * numerics.gradient * (frames.micro_batches - 1)
        added = added / np.where((frames.stages == 1) & (frames.shards == 1), among, 1)
        moved = (2 * numerics.total / among + added) * self._column("parameters") / frames.stages
        return np.asarray(moved / bounds.cluster.device.memory_bytes_per_s)

    def _uneven_step_s(self, all_s: Real, messages_s: Real) -> Real:
        """Bound steps of uneven stages.

        With stage replicas all of these count rather than the stages; with different shards all workers, each layer
        with that of their numbers with which it takes least.
        """
        frames, first, column = self.frames, self.frames.even_count, self.frames.uneven_column
        m, size = frames.micro_batches[first:], frames.micro_batch[first:]
        copies, most = column(lambda one: sum(one.copies)), column(lambda one: max(one.copies))
        # m x + C - x max n_j with x = C / Σ n_j, the mean of all stage replicas.
        replicated = all_s[first:] * (1 + (m - most) / copies) + messages_s[first:]
        sets = list(dict.fromkeys(frozenset(one.shards) for one in frames.uneven))
        of_set = column(lambda one: sets.index(frozenset(one.shards)))
        sizes, of_size = np.unique(size, return_inverse=True)
        least = np.array([[self._bounds.least_s(int(b), each, "none") for each in sets] for b in sizes])
        sharded = m * least[of_size.reshape(-1), of_set] / column(lambda one: one.workers)
        return np.where(column(lambda one: len(set(one.shards))) == 1, replicated, sharded)

    @cached_property
    def memory_bytes(self) -> Real:
        """Lower bounds of the memory of the worker that needs most: states, divided as far as can be."""
        frames, numerics, p = self.frames, self._bounds.workload.numerics, self.frames.stages
        first, column = frames.even_count, frames.uneven_column
        among: Whole = np.ones_like(p)
        if self._zero:
            among = frames.replicas.copy()
            among[first:] *= column(lambda one: max(one.copies))
        states = numerics.parameter + numerics.gradient + numerics.optimizer / among
        # A whole model on each worker may divide all of its states (ZeRO-3).
        states = np.where((p == 1) & (frames.shards == 1), numerics.total / among, states)
        repeats = np.ceil(self._column("repeats") / p)
        repeated = repeats * self._column("repeated_parameters")
        own = np.maximum(self._column("parameters") / p, repeated)
        whole = self._bounds.totals(1, 1, "none").parameters / column(lambda one: sum(one.shards))
        own[first:] = np.maximum(own[first:], whole)
        return np.asarray(own * states + self._bounds.overlap_model.context_bytes)

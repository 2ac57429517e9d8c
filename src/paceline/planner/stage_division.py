"""Division of layers into pipeline stages, the work of a stage for one micro-batch, and asynchronous pipelines.

::

    layers     | l0  l1 | l2 | l3  l4  l5 |      cut so that the busiest stage is as fast as possible (partitioning.py)
    stages     |    0   | 1  |     2      |      with v chunks stage j has every p-th part from the j-th on

Asynchronous pipelines are never empty: under ``pipedream`` (Narayanan et al. 2019, 1806.03377) each micro-batch is an
update, under ``pipedream-2bw`` (2006.09503) every m of them are one. Their step is that of the steady state::

    stage j     ... F_i  B_{i-a}  F_{i+1}  B_{i+1-a} ...          a = p - 1 - j forwards ahead of backward
    round trip  F_i of stages j ... k, back by B of k ... j, and then F_{i+k-j+1} of stage j
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from paceline.core.partitioning import balanced, balanced_unlike
from paceline.core.types import Seconds
from paceline.planner.base import Arrangement, LayerCost, Workload
from paceline.planner.cluster import Cluster


@dataclass(frozen=True, slots=True)
class Stage:
    """Work of a stage's worker for one micro-batch, and its part of the model."""

    forward_s: Seconds
    backward_s: Seconds
    calls_s: Seconds
    """Exposed time of the collectives of its shards."""
    parameters: int
    saved_bytes: int
    working_bytes: int
    sent_bytes: int
    """Bytes sent to the next stage, by all chunks together."""

    @property
    def seconds(self) -> Seconds:
        """Seconds of both passes and the collectives."""
        return self.forward_s + self.backward_s + self.calls_s


@dataclass(frozen=True, slots=True)
class StageDivision:
    """Layers of each stage: depends on b, shards, recomputation, stages, chunks and copies alone."""

    layers: Sequence[LayerCost]
    cuts: tuple[int, ...]
    stages: Sequence[Stage]


# ----------------------------------------------------------------------------------------------- layers and their times


def layers_of(workload: Workload, arrangement: Arrangement) -> Sequence[LayerCost]:
    """Return the workload's layers; where a stage keeps only its input, with another forward before backward."""
    if arrangement.recompute != "stage":
        return workload.layers(arrangement)
    plain = workload.layers(replace(arrangement, recompute="none"))
    recomputed = dict[int, LayerCost]()
    for layer in plain:
        calls = (*layer.forward_calls, *layer.backward_calls)
        both_s = layer.forward_s + layer.backward_s
        recomputed[id(layer)] = replace(layer, backward_s=both_s, backward_calls=calls)
    return [recomputed[id(layer)] for layer in plain]  # equal layers stay one object


def calls_s(layer: LayerCost, cluster: Cluster, arrangement: Arrangement) -> Seconds:
    """Return the time of a layer's collectives, forward and backward, beyond what its device is idle anyway."""
    group = cluster.group(arrangement.shards, 1)
    total_s = sum(cluster.messages.seconds(*call, group) for call in (*layer.forward_calls, *layer.backward_calls))
    return max(0.0, total_s - layer.idle_s)


def layer_seconds(layers: Sequence[LayerCost], cluster: Cluster, arrangement: Arrangement) -> dict[int, Seconds]:
    """Return the time of both passes and the collectives for one micro-batch, by the layer's id.

    Layers that are one object (thousands, of a few kinds) are computed once.
    """
    return {
        key: layer.forward_s + layer.backward_s + calls_s(layer, cluster, arrangement)
        for key, layer in {id(each): each for each in layers}.items()
    }


def own_parameters(counted: Iterable[tuple[LayerCost, int]]) -> int:
    """Return the parameters of layers that occur so many times; parameters that they share count once."""
    shared: dict[str, int] = {}
    alone = 0
    for layer, times in counted:
        if layer.tied:
            # One of them may have more, as an embedding with positions: the larger is what all share.
            shared[layer.tied] = max(layer.parameters, shared.get(layer.tied, 0))
        else:
            alone += times * layer.parameters
    return alone + sum(shared.values())


# --------------------------------------------------------------------------------------------------- layers into stages


class Divisions:
    """Cache of the layers, their times and the stage divisions of one workload on one cluster."""

    def __init__(self, workload: Workload, cluster: Cluster) -> None:
        self._workload, self._cluster = workload, cluster
        self._layers: dict[Hashable, tuple[Sequence[LayerCost], Sequence[Seconds]]] = {}
        self._divisions: dict[Hashable, StageDivision] = {}

    def layers(self, arrangement: Arrangement) -> tuple[Sequence[LayerCost], Sequence[Seconds]]:
        """Return layers and seconds of each, for the arrangement's b, shards and recomputation."""
        key = _sizes(arrangement)
        if key not in self._layers:
            layers = layers_of(self._workload, arrangement)
            seconds = layer_seconds(layers, self._cluster, arrangement)
            self._layers[key] = layers, [seconds[id(layer)] for layer in layers]
        return self._layers[key]

    def of(self, arrangement: Arrangement) -> StageDivision:
        """Return the division of the arrangement's layers: the busiest stage is as fast as possible."""
        a, p = arrangement, arrangement.stages
        key = (*_sizes(a), p, a.chunks, a.copies, a.stage_shards)
        if key not in self._divisions:
            layers: Sequence[LayerCost]
            if a.stage_shards:
                rows, times = zip(*(self.layers(a.with_shards(t)) for t in a.stage_shards), strict=True)
                parts = range(p * a.chunks)
                # A layer's time depends on the shards of the stage that it falls to.
                cuts = balanced_unlike([times[part % p] for part in parts], a.copies)
                ends = zip(parts, pairwise([0, *cuts, len(rows[0])]), strict=True)
                layers = [layer for part, (start, end) in ends for layer in rows[part % p][start:end]]
            else:
                layers, seconds = self.layers(a)
                cuts = balanced(seconds, p * a.chunks, a.copies)
            self._divisions[key] = StageDivision(layers, cuts, stages_of(layers, cuts, a, self._cluster))
        return self._divisions[key]

    def fits(self, arrangement: Arrangement) -> bool:
        """Return True if there are as many layers as parts, and tied layers are on stages that can share them."""
        if arrangement.stages * arrangement.chunks > len(self.layers(arrangement)[0]):
            return False
        may_split = arrangement.stage_shards or arrangement.schedule in ASYNC_SCHEDULES
        return not may_split or not splits_tied_layers(self.of(arrangement), arrangement)


def _sizes(arrangement: Arrangement) -> tuple[object, ...]:
    return arrangement.micro_batch, arrangement.shards, arrangement.recompute, arrangement.sequence_divided


def splits_tied_layers(division: StageDivision, arrangement: Arrangement) -> bool:
    """Return True if tied layers are on stages that can't keep their parameters equal.

    Stages with different numbers of shards have different parts of them; stages of an asynchronous pipeline update them
    at different times.
    """
    synchronous = arrangement.schedule not in ASYNC_SCHEDULES
    shards, owners = arrangement.shards_by_stage, dict[str, set[int]]()
    for place, layer in enumerate(division.layers):
        if layer.tied:
            stage = bisect_right(division.cuts, place) % arrangement.stages
            owners.setdefault(layer.tied, set()).add(shards[stage] if synchronous else stage)
    return any(len(each) > 1 for each in owners.values())


def stages_of(
    layers: Sequence[LayerCost], cuts: Sequence[int], arrangement: Arrangement, cluster: Cluster
) -> list[Stage]:
    """Return the stages between the cuts; with v chunks stage j has every p-th part.

    Layers that are equal are one object, and so are then stages that have equal layers.
    """
    parts = [layers[start:end] for start, end in pairwise([0, *cuts, len(layers)])]
    # The first part receives samples, which are not counted.
    received = [0, *(layers[cut - 1].output_bytes for cut in cuts)]
    p, built, result = arrangement.stages, dict[Hashable, Stage](), list[Stage]()
    for j, shards in enumerate(arrangement.shards_by_stage):
        key = tuple(tuple(map(id, part)) for part in parts[j::p]), tuple(received[j::p])
        if key not in built:
            built[key] = stage_of(parts[j::p], received[j::p], arrangement.with_shards(shards), cluster)
        result.append(built[key])
    return result


def stage_of(
    parts: Sequence[Sequence[LayerCost]], received: Sequence[int], arrangement: Arrangement, cluster: Cluster
) -> Stage:
    """Return a stage of these chunks, which receive so many bytes each; shared parameters count once."""
    layers = [layer for part in parts for layer in part]
    many = Counter(map(id, layers))
    counted = [(layer, many[key]) for key, layer in {id(layer): layer for layer in layers}.items()]
    saved = sum(times * layer.saved_bytes for layer, times in counted)
    working = max((layer.working_bytes for layer, _ in counted), default=0)
    working = max(working, *(excess_bytes(part) for part in parts))
    if arrangement.recompute == "stage":  # inputs alone are kept, and one chunk's activations while it is recomputed
        working += max(sum(layer.saved_bytes for layer in part) for part in parts)
        saved = sum(received)
    forward_s = sum(times * layer.forward_s for layer, times in counted)
    backward_s = sum(times * layer.backward_s for layer, times in counted)
    exposed_s = sum(times * calls_s(layer, cluster, arrangement) for layer, times in counted)
    sent = sum(part[-1].output_bytes for part in parts if part)
    return Stage(forward_s, backward_s, exposed_s, own_parameters(counted), saved, working, sent)


def excess_bytes(layers: Sequence[LayerCost]) -> int:
    """Return by how much memory in a backward pass through these layers exceeds the sum of their activations."""
    excess = free = 0
    for layer in reversed(layers):
        excess = max(excess, layer.backward_bytes - free)
        free += layer.saved_bytes
    return excess


def busiest(stages: Sequence[Stage], arrangement: Arrangement) -> int:
    """Return the stage with the most ⌈m / n_j⌉ · c_j."""
    return max(range(len(stages)), key=lambda j: arrangement.own_micro_batches(j) * stages[j].seconds)


def distinct_stages(stages: Sequence[Stage], arrangement: Arrangement) -> Sequence[int]:
    """Return one index of each group of equal stages."""
    if not arrangement.copies:
        return list({id(stage): j for j, stage in enumerate(stages)}.values())
    return range(len(stages))


# ----------------------------------------------------------------------------------------------- asynchronous pipelines

ASYNC_SCHEDULES = ("pipedream", "pipedream-2bw")


def steady_micro_batch_s(busy_s: Sequence[Seconds], hop_s: Seconds) -> Seconds:
    """Return the steady time of a micro-batch: max over j ≤ k of (Σ_{j..k} w + 2 (k - j) h) / (k - j + 1); exact.

    Every simple cycle of dependencies is one of these round trips (the maximum cycle mean of a max-plus system); with
    k = j it is a stage that is always busy.

    Args:
        busy_s: w, both passes of each stage for a micro-batch.
        hop_s: h, the hidden time of a message.

    >>> steady_micro_batch_s([1.0, 2.0, 1.0], 0.0), steady_micro_batch_s([1.0, 1.0], 0.5)
    (2.0, 1.5)
    """
    if not hop_s:
        return max(busy_s)
    # All round trips of n stages at once, from prefix sums.
    sums = np.cumsum([0.0, *busy_s])
    length = np.arange(1, len(busy_s) + 1)
    trips = [(sums[n:] - sums[:-n]).max() + 2 * (n - 1) * hop_s for n in length]
    return float(np.max(np.array(trips) / length))


def weight_versions(schedule: str, stages: int, j: int) -> int:
    """Return how many versions of its weights stage j keeps, the newest among them."""
    if schedule not in ASYNC_SCHEDULES:
        return 1
    return stages - j if schedule == "pipedream" else 2


def staleness(schedule: str, parameters: Sequence[int]) -> float:
    """Return the updates between reading weights and applying their gradient, mean over the elements of all stages.

    Stage j is :func:`weight_versions` less one updates late.

    >>> staleness("pipedream", [10, 10, 10]), staleness("pipedream-2bw", [10, 20]), staleness("1f1b", [10, 20])
    (1.0, 1.0, 0.0)
    """
    if schedule not in ASYNC_SCHEDULES:
        return 0.0
    stages, elements = len(parameters), sum(parameters)
    ages = [weight_versions(schedule, stages, j) - 1 for j in range(stages)]
    return sum(age * size for age, size in zip(ages, parameters, strict=True)) / elements if elements else 0.0

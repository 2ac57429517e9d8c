"""How layers fall to pipeline stages, and what one worker then computes in a micro-batch.

Pipelines that never run empty: how long a micro-batch takes of them, how many weights they keep, and how old.

Under ``pipedream`` (Narayanan et al. 2019, 1806.03377) each micro-batch is an update, under ``pipedream-2bw``
(2006.09503) every m of them are one. Both go on from step to step; a step takes what it does once they are under way::

    stage j     ... F_i  B_{i-a}  F_{i+1}  B_{i+1-a} ...          a = p - 1 - j forwards ahead of backward
    round trip  F_i of stages j ... k, back by B of k ... j, and then F_{i+k-j+1} of stage j

How layers fall to stages, and what one worker then does with a micro-batch.

::

    layers     | l0  l1 | l2 | l3  l4  l5 |      cut where the busiest stage is as quick as can be (partition.py)
    stages     |    0   | 1  |     2      |      with v chunks every p-th part
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil

import numpy as np

from paceline.core.partitioning import balanced, balanced_unlike
from paceline.core.types import Seconds
from paceline.planner.base import Arrangement, LayerCost, Workload
from paceline.planner.cluster import Cluster


def turns(arrangement: Arrangement, j: int) -> int:
    """How many micro-batches of a step the one has who begins, of those who take turns at a stage."""
    return arrangement.accumulated * own_turns(arrangement, j)


def own_turns(arrangement: Arrangement, j: int) -> int:
    """⌈m / n_j⌉: the same of one mini-batch."""
    return ceil(mini_batch(arrangement) / copies_of(arrangement)[j])


def mini_batch(arrangement: Arrangement) -> int:
    """Micro-batches from one time that the pipeline is empty to the next."""
    return arrangement.micro_batches // arrangement.accumulated


def copies_of(arrangement: Arrangement) -> Sequence[int]:
    """How many take turns at each stage."""
    return arrangement.copies or (1,) * arrangement.stages


def shards_of(arrangement: Arrangement) -> Sequence[int]:
    """How many each stage has."""
    return arrangement.stage_shards or (arrangement.shards,) * arrangement.stages


def with_shards(arrangement: Arrangement, shards: int) -> Arrangement:
    """The same with so many at each stage: what layers of a stage that has them go by."""
    if arrangement.shards == shards and not arrangement.stage_shards:
        return arrangement
    return replace(arrangement, shards=shards, stage_shards=())


def holders(arrangement: Arrangement, j: int) -> int:
    """Workers that have the same part of A: of each replica as many as take turns at stage j."""
    return arrangement.replicas * arrangement.context * copies_of(arrangement)[j]


def exchanges(arrangement: Arrangement) -> tuple[int, int]:
    """How often a step of replicas that divide what they have sums Δ and gathers A: (reduce_scatters, all_gathers)."""
    if arrangement.divided < 3:
        return 1, 1
    return arrangement.micro_batches if arrangement.stages == 1 else 1, 2 * arrangement.micro_batches


STREAMS = ("pipedream", "pipedream-2bw")


def micro_batch_s(busy_s: Sequence[Seconds], hop_s: Seconds) -> Seconds:
    """From one micro-batch to the next: max over j ≤ k of (Σ_{j..k} w + 2 (k - j) h) / (k - j + 1); exact.

    Every simple cycle of what waits for what is one of these round trips; with k = j it is a stage that is always busy.

    Args:
        busy_s: w, what each stage is busy for with a micro-batch, both passes.
        hop_s: h, what a message takes beside.

    >>> micro_batch_s([1.0, 2.0, 1.0], 0.0), micro_batch_s([1.0, 1.0], 0.5)
    (2.0, 1.5)
    """
    if not hop_s:
        return max(busy_s)
    sums = np.cumsum([0.0, *busy_s])
    length = np.arange(1, len(busy_s) + 1)
    trips = [(sums[n:] - sums[:-n]).max() + 2 * (n - 1) * hop_s for n in length]
    return float(np.max(np.array(trips) / length))


def versions(schedule: str, stages: int, j: int) -> int:
    """Of its weights that stage j keeps: those of all micro-batches that it has begun, the newest among them."""
    if schedule not in STREAMS:
        return 1
    return stages - j if schedule == "pipedream" else 2


def stage_staleness(schedule: str, stages: int, j: int) -> int:
    """Updates of stage j between reading its weights for a micro-batch and applying the gradient."""
    return versions(schedule, stages, j) - 1


def staleness(schedule: str, parameters: Sequence[int]) -> float:
    """Mean over all elements, of stages that have so many each.

    >>> staleness("pipedream", [10, 10, 10]), staleness("pipedream-2bw", [10, 20]), staleness("1f1b", [10, 20])
    (1.0, 1.0, 0.0)
    """
    if schedule not in STREAMS:
        return 0.0
    stages, elements = len(parameters), sum(parameters)
    ages = [stage_staleness(schedule, stages, j) for j in range(stages)]
    return sum(age * size for age, size in zip(ages, parameters, strict=True)) / elements if elements else 0.0


@dataclass(frozen=True, slots=True)
class Stage:
    """What a worker of it does with one micro-batch, and has of the model."""

    forward_s: Seconds
    backward_s: Seconds
    calls_s: Seconds
    """Of the collectives of its shards."""
    parameters: int
    saved_bytes: int
    working_bytes: int
    sent_bytes: int
    """What goes on to the next stage, by all of its chunks."""

    @property
    def seconds(self) -> Seconds:
        """All of it."""
        return self.forward_s + self.backward_s + self.calls_s


@dataclass(frozen=True, slots=True)
class StageDivision:
    """How layers fall to stages: depends on b, shards, recomputation, stages, chunks and copies alone."""

    layers: Sequence[LayerCost]
    cuts: tuple[int, ...]
    row: Sequence[Stage]


def divide(
    layers: Sequence[LayerCost], seconds: Sequence[Seconds], cluster: Cluster, arrangement: Arrangement
) -> StageDivision:
    """Where the stages begin so that the busiest is as quick as can be, and what each of them then has.

    Args:
        layers: of the workload, for this b and these shards.
        seconds: of each, as of :func:`layer_s`.
        cluster: what shards talk over.
        arrangement: says stages, chunks and copies.
    """
    cuts = balanced(seconds, arrangement.stages * arrangement.chunks, arrangement.copies)
    return StageDivision(layers, cuts, stages(layers, cuts, arrangement, cluster))


def divide_unlike(
    layers: Sequence[Sequence[LayerCost]],
    seconds: Sequence[Sequence[Seconds]],
    cluster: Cluster,
    arrangement: Arrangement,
) -> StageDivision:
    """The same where stages have different numbers of shards: layers, and what they take, are told for each stage."""
    p, parts = arrangement.stages, range(arrangement.stages * arrangement.chunks)
    cuts = balanced_unlike([seconds[part % p] for part in parts], arrangement.copies)
    ends = pairwise([0, *cuts, len(layers[0])])
    chosen = [layer for part, (start, end) in zip(parts, ends, strict=True) for layer in layers[part % p][start:end]]
    return StageDivision(chosen, cuts, stages(chosen, cuts, arrangement, cluster))


def division_of(workload: Workload, cluster: Cluster, arrangement: Arrangement) -> StageDivision:
    """Of a workload's own layers."""
    each = {t: layers_of(workload, at) for t in set(shards_of(arrangement)) for at in [with_shards(arrangement, t)]}
    seconds = {
        t: [layer_s(layer, cluster, with_shards(arrangement, t)) for layer in layers] for t, layers in each.items()
    }
    if not arrangement.stage_shards:
        return divide(each[arrangement.shards], seconds[arrangement.shards], cluster, arrangement)
    own = arrangement.stage_shards
    return divide_unlike([each[t] for t in own], [seconds[t] for t in own], cluster, arrangement)


def may_tear(arrangement: Arrangement) -> bool:
    """Whether :func:`torn` has to be looked at."""
    return bool(arrangement.stage_shards) or arrangement.schedule in STREAMS


def torn(division: StageDivision, arrangement: Arrangement) -> bool:
    """Whether layers share parameters across stages that can't be kept alike.

    Those of different numbers of shards have different parts of them, and those that move their weights by themselves
    move them at different times.
    """
    kept = arrangement.schedule not in STREAMS
    shards, where = shards_of(arrangement), dict[str, set[int]]()
    for place, layer in enumerate(division.layers):
        if layer.tied:
            stage = bisect_right(division.cuts, place) % arrangement.stages
            where.setdefault(layer.tied, set()).add(shards[stage] if kept else stage)
    return any(len(found) > 1 for found in where.values())


def layer_s(layer: LayerCost, cluster: Cluster, arrangement: Arrangement) -> Seconds:
    """All of one layer for one micro-batch."""
    return layer.forward_s + layer.backward_s + calls_s(layer, cluster, arrangement)


def layers_of(workload: Workload, arrangement: Arrangement) -> Sequence[LayerCost]:
    """Those of the workload; where a stage keeps only what came into it, with forward once more before backward."""
    if arrangement.recompute != "stage":
        return workload.layers(arrangement)
    plain = workload.layers(replace(arrangement, recompute="none"))
    twice = {id(layer): _twice(layer) for layer in plain}
    return [twice[id(layer)] for layer in plain]


def _twice(layer: LayerCost) -> LayerCost:
    calls = (*layer.forward_calls, *layer.backward_calls)
    return replace(layer, backward_s=layer.forward_s + layer.backward_s, backward_calls=calls)


def stages(layers: Sequence[LayerCost], cuts: Sequence[int], arrangement: Arrangement, cluster: Cluster) -> list[Stage]:
    """What each stage has of the layers between the cuts; with v chunks every p-th part.

    Layers that are alike are one object, and so are then stages that have as many of them.
    """
    ends = [0, *cuts, len(layers)]
    parts = [layers[start:end] for start, end in pairwise(ends)]
    received = [0, *(layers[cut - 1].output_bytes for cut in cuts)]
    p, made, row = arrangement.stages, dict[Hashable, Stage](), list[Stage]()
    for j, shards in enumerate(shards_of(arrangement)):
        own = tuple(tuple(map(id, part)) for part in parts[j::p]), tuple(received[j::p])
        if own not in made:
            made[own] = stage(parts[j::p], received[j::p], with_shards(arrangement, shards), cluster)
        row.append(made[own])
    return row


def stage(
    parts: Sequence[Sequence[LayerCost]], received: Sequence[int], arrangement: Arrangement, cluster: Cluster
) -> Stage:
    """Of its chunks, which get so many bytes each; parameters that several of its layers share count once."""
    layers = [layer for part in parts for layer in part]
    many = Counter(map(id, layers))
    counted = [(layer, many[same]) for same, layer in {id(layer): layer for layer in layers}.items()]
    saved = sum(times * layer.saved_bytes for layer, times in counted)
    working = max((layer.working_bytes for layer, _ in counted), default=0)
    if arrangement.recompute == "stage":
        working += max(sum(layer.saved_bytes for layer in part) for part in parts)
        saved = sum(received)
    return Stage(
        sum(times * layer.forward_s for layer, times in counted),
        sum(times * layer.backward_s for layer, times in counted),
        sum(times * calls_s(layer, cluster, arrangement) for layer, times in counted),
        own_parameters(counted),
        saved,
        working,
        sum(part[-1].output_bytes for part in parts if part),
    )


def own_parameters(counted: Iterable[tuple[LayerCost, int]]) -> int:
    """Of layers that are there so many times; what they share is there once."""
    shared: dict[str, int] = {}
    alone = 0
    for layer, times in counted:
        if layer.tied:
            shared[layer.tied] = max(layer.parameters, shared.get(layer.tied, 0))
        else:
            alone += times * layer.parameters
    return alone + sum(shared.values())


def calls_s(layer: LayerCost, cluster: Cluster, arrangement: Arrangement) -> Seconds:
    """Of the collectives of one layer's shards, forward and backward, beyond what its device is idle anyway."""
    group = cluster.shards(arrangement)
    found = sum(cluster.messages.of(call, group) for call in (*layer.forward_calls, *layer.backward_calls))
    return max(0.0, found - layer.idle_s)


def busiest(row: Sequence[Stage], arrangement: Arrangement) -> int:
    """The stage with the most ⌈m / n_j⌉ · c_j."""
    return max(range(len(row)), key=lambda j: turns(arrangement, j) * row[j].seconds)


def kinds_of(row: Sequence[Stage], arrangement: Arrangement) -> Sequence[int]:
    """Of stages that are alike one."""
    if not arrangement.copies:
        return list({id(stage): j for j, stage in enumerate(row)}.values())
    return range(len(row))

"""How layers fall to stages, and what one worker then does with a micro-batch.

::

    layers     | l0  l1 | l2 | l3  l4  l5 |      cut where the busiest stage is as quick as can be (partition.py)
    stages     |    0   | 1  |     2      |      with v chunks every p-th part
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from paceline.core.types import Seconds
from paceline.plan.base import Arrangement, LayerCost, Workload
from paceline.plan.cluster import Cluster
from paceline.plan.partition import balanced
from paceline.plan.partition_unlike import balanced_unlike
from paceline.plan.sizes import shards_of, turns, with_shards
from paceline.plan.streams import STREAMS


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
class Division:
    """How layers fall to stages: depends on b, shards, recomputation, stages, chunks and copies alone."""

    layers: Sequence[LayerCost]
    cuts: tuple[int, ...]
    row: Sequence[Stage]


def divide(
    layers: Sequence[LayerCost], seconds: Sequence[Seconds], cluster: Cluster, arrangement: Arrangement
) -> Division:
    """Where the stages begin so that the busiest is as quick as can be, and what each of them then has.

    Args:
        layers: of the workload, for this b and these shards.
        seconds: of each, as of :func:`layer_s`.
        cluster: what shards talk over.
        arrangement: says stages, chunks and copies.
    """
    cuts = balanced(seconds, arrangement.stages * arrangement.chunks, arrangement.copies)
    return Division(layers, cuts, stages(layers, cuts, arrangement, cluster))


def divide_unlike(
    layers: Sequence[Sequence[LayerCost]],
    seconds: Sequence[Sequence[Seconds]],
    cluster: Cluster,
    arrangement: Arrangement,
) -> Division:
    """The same where stages have different numbers of shards: layers, and what they take, are told for each stage."""
    p, parts = arrangement.stages, range(arrangement.stages * arrangement.chunks)
    cuts = balanced_unlike([seconds[part % p] for part in parts], arrangement.copies)
    ends = pairwise([0, *cuts, len(layers[0])])
    chosen = [layer for part, (start, end) in zip(parts, ends, strict=True) for layer in layers[part % p][start:end]]
    return Division(chosen, cuts, stages(chosen, cuts, arrangement, cluster))


def division_of(workload: Workload, cluster: Cluster, arrangement: Arrangement) -> Division:
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


def torn(division: Division, arrangement: Arrangement) -> bool:
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

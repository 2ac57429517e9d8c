"""What workers send in a step, in bytes."""

from itertools import pairwise

from paceline.plan.base import Arrangement, Workload
from paceline.plan.division import Division, Stage, kinds_of
from paceline.plan.sizes import exchanges, holders, shards_of


def sent_bytes(division: Division, workload: Workload, arrangement: Arrangement) -> dict[str, float]:
    """By the worker that sends most, in a step; to shards by the mean one."""
    m, row = arrangement.micro_batches, division.row
    return {
        "shards": m * _to_shards(division, arrangement) / len(row),
        "stages": 2.0 * m * max((stage.sent_bytes for stage in row[:-1]), default=0),
        "replicas": max(_to_replicas(row[j], workload, arrangement, j) for j in kinds_of(row, arrangement)),
    }


_BY_RING = {"all_reduce": 2}
"""How often a collective sends what it is given, among many."""


def _to_shards(division: Division, arrangement: Arrangement) -> float:
    """Of all stages, for one micro-batch."""
    shards, ends = shards_of(arrangement), [0, *division.cuts, len(division.layers)]
    found = 0.0
    if arrangement.shards == 1:
        return found
    for part, (start, end) in enumerate(pairwise(ends)):
        t = shards[part % arrangement.stages]
        calls = (call for layer in division.layers[start:end] for call in (*layer.forward_calls, *layer.backward_calls))
        found += sum(call.size_bytes * _BY_RING.get(call.collective, 1) for call in calls) * (t - 1) / t
    return found


def _to_replicas(stage: Stage, workload: Workload, arrangement: Arrangement, j: int) -> float:
    """Δ once or twice, and A as often as it is gathered."""
    numerics, among = workload.numerics, holders(arrangement, j)
    sums, gathers = exchanges(arrangement)
    each = sums * numerics.gradient + gathers * numerics.parameter if arrangement.divided else 2 * numerics.gradient
    return stage.parameters * each * (among - 1) / among

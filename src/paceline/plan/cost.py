"""What a step takes, one function an equation; what workers hold is in held.py.

::

    one micro-batch on stage j      c_j = Σ layers (forward + backward + collectives of its shards)
    compute + shards                max ⌈m / n_j⌉ · c_j                     n_j columns take turns at it
    bubble                          (Σ c_j - c of the busiest) / v          with equal stages (p - 1)/v · c
    stages                          what messages between stages hold up: (p - 1) of them each way, and what is not
                                    overlapped of the others
    replicas                        what is not overlapped of summing Δ, and of gathering parameters that are divided
    optimizer                       bytes of A, Δ and the optimizer's state, read and written once

Sources: the bubble of GPipe (1811.06965) and of interleaved schedules (2104.04473), collectives of ZeRO (1910.02054).
"""

from bisect import bisect_right
from collections.abc import Sequence

from paceline.core.types import Seconds
from paceline.plan.base import Arrangement, Cost, LayerCost, Workload
from paceline.plan.cluster import Cluster, Group
from paceline.plan.division import Division, Stage, busiest, distinct, divide, layer_s, layers_of, turns
from paceline.plan.habits import Habits
from paceline.plan.held import held_by_all


def cost(
    workload: Workload,
    cluster: Cluster,
    arrangement: Arrangement,
    habits: Habits | None = None,
    division: Division | None = None,
) -> Cost:
    """Of one step, by closed forms.

    Args:
        workload: does not refuse the arrangement.
        cluster: has room for its workers.
        arrangement: every size of it.
        habits: of who carries it out; None: nothing overlaps and nothing is held beside.
        division: of the layers, where it is known already.
    """
    habits = habits or Habits()
    if division is None:
        layers = layers_of(workload, arrangement)
        division = divide(layers, [layer_s(layer, cluster, arrangement) for layer in layers], cluster, arrangement)
    layers, row = division.layers, division.row
    most = busiest(row, arrangement)
    kinds = distinct(row)
    own = turns(arrangement, most)
    terms = {
        "compute": own * (row[most].forward_s + row[most].backward_s),
        "shards": own * row[most].calls_s,
        "bubble": bubble_s(row, arrangement),
        "stages": messages_s(row, arrangement, cluster, habits),
        "replicas": max(replicas_s(stage, workload, arrangement, cluster, habits) for stage in kinds)
        + tied_s(division, workload, arrangement, cluster),
        "optimizer": max(optimizer_s(stage, workload, arrangement, cluster) for stage in kinds),
        "waiting": habits.step_s + habits.micro_batch_s * arrangement.micro_batches,
    }
    held = held_by_all(row, workload, arrangement, habits)
    return Cost(terms, held, sent_bytes(row, layers, workload, arrangement), division.cuts)


def bubble_s(row: Sequence[Stage], arrangement: Arrangement) -> Seconds:
    """(Σ c_j - c) / v: what the busiest stage, c, waits for the first micro-batch to come and the last to go.

    ``sequential`` has each micro-batch wait for the one before it: then it is m times as much. Under ``zero-bubble``
    gradients of weights, half of backward, fill the gaps, as far as there are any to put off.
    """
    if arrangement.schedule == "zero-bubble":
        return _zero_bubble_s(row, arrangement.micro_batches)
    waits = sum(each.seconds for each in row) - row[busiest(row, arrangement)].seconds
    return waits * arrangement.micro_batches if arrangement.schedule == "sequential" else waits / arrangement.chunks


def _zero_bubble_s(row: Sequence[Stage], micro_batches: int) -> Seconds:
    """(p - 1) max(F, I) and, where m < p, (p - m) min(F, I): Qi et al., 2401.10241, for W = I; the second part is ours.

    Of unequal stages the sum of max(F, I) but for the largest, and the mean of min(F, I).
    """
    longer = [max(stage.forward_s, stage.backward_s / 2) for stage in row]
    shorter = [min(stage.forward_s, stage.backward_s / 2) for stage in row]
    missing = max(0, len(row) - micro_batches)
    return sum(longer) - max(longer) + missing * sum(shorter) / len(row)


def messages_s(row: Sequence[Stage], arrangement: Arrangement, cluster: Cluster, habits: Habits) -> Seconds:
    """2 (p - 1) messages in a row while the pipeline fills and empties; of the others 2 m v what is not overlapped."""
    if arrangement.stages == 1:
        return 0.0
    group, chunks = cluster.neighbours(arrangement), arrangement.chunks
    one = max(cluster.messages.seconds("send", each.sent_bytes / chunks, group) for each in row[:-1])
    seen = 2 * arrangement.micro_batches * chunks * (1 - habits.send_overlap)
    return one * (2 * (arrangement.stages - 1) + seen)


def replicas_s(stage: Stage, workload: Workload, arrangement: Arrangement, cluster: Cluster, habits: Habits) -> Seconds:
    """What is not overlapped of summing Δ over the replicas, and of bringing divided parameters together.

    ZeRO 1 and 2: a reduce_scatter of Δ and an all_gather of A. 3: each pass of each micro-batch gathers A as well.
    """
    group, numerics = cluster.replicas(arrangement), workload.numerics
    if group.size == 1:
        return 0.0
    found = cluster.messages.seconds
    if not arrangement.divided:
        spent = found("all_reduce", stage.parameters * numerics.gradient, group)
    else:
        gathers = 2 * arrangement.micro_batches if arrangement.divided == 3 else 1
        spent = found("reduce_scatter", stage.parameters * numerics.gradient, group)
        spent += gathers * found("all_gather", stage.parameters * numerics.parameter, group)
    passes = arrangement.micro_batches if arrangement.divided == 3 else 1
    hides = stage.backward_s + (stage.forward_s if arrangement.divided == 3 else 0.0)
    return max(0.0, spent - habits.overlap * hides * passes)


def tied_s(division: Division, workload: Workload, arrangement: Arrangement, cluster: Cluster) -> Seconds:
    """What stages that share parameters take to sum Δ of them; 0 where all that share them are on one stage."""
    at: dict[str, tuple[int, set[int]]] = {}
    for place, layer in enumerate(division.layers):
        if layer.tied:
            size, where = at.get(layer.tied, (0, set()))
            where.add(bisect_right(division.cuts, place) % arrangement.stages)
            at[layer.tied] = max(size, layer.parameters), where
    near = cluster.neighbours(arrangement).on_host
    shared = [(size * workload.numerics.gradient, len(where)) for size, where in at.values() if len(where) > 1]
    return sum(cluster.messages.seconds("all_reduce", size, Group(many, min(many, near))) for size, many in shared)


def optimizer_s(stage: Stage, workload: Workload, arrangement: Arrangement, cluster: Cluster) -> Seconds:
    """A, Δ and what is remembered, read and written once each: bound by memory's bandwidth."""
    divided = arrangement.replicas * arrangement.context if arrangement.divided else 1
    return 2 * workload.numerics.total * stage.parameters / divided / cluster.device.memory_bytes_per_s


def sent_bytes(
    row: Sequence[Stage], layers: Sequence[LayerCost], workload: Workload, arrangement: Arrangement
) -> dict[str, float]:
    """By the worker that sends most, in a step."""
    m, group, numerics = arrangement.micro_batches, arrangement.shards, workload.numerics
    each = [call for layer in layers for call in (*layer.forward_calls, *layer.backward_calls)]
    among = arrangement.replicas * arrangement.context
    whole = max(stage.parameters for stage in row) * (2 * numerics.gradient if not arrangement.divided else 0)
    if arrangement.divided:
        gathers = 2 * m if arrangement.divided == 3 else 1
        whole = max(each.parameters for each in row) * (numerics.gradient + gathers * numerics.parameter)
    by_ring = {"all_reduce": 2}
    inside = sum(call.size_bytes * by_ring.get(call.collective, 1) for call in each) / len(row)
    return {
        "shards": m * inside * (group - 1) / group,
        "stages": 2.0 * m * max((stage.sent_bytes for stage in row[:-1]), default=0),
        "replicas": whole * (among - 1) / among,
    }

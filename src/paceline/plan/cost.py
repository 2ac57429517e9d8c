"""What a step takes, one function an equation; what workers hold is in held.py.

::

    one micro-batch on stage j      c_j = Σ layers (forward + backward + collectives of its shards)
    compute + shards                max a ⌈m / (a n_j)⌉ · c_j               n_j columns take turns at it
    bubble                          a (Σ c_j - c of the busiest) / v        with equal stages a (p - 1)/v · c
    stages                          what messages between stages hold up: a (p - 1) of them each way, and what is not
                                    overlapped of the others
    replicas                        what is not overlapped of summing Δ, and of gathering parameters that are divided
    optimizer                       bytes of A, Δ and the optimizer's state, read and written once, and of Δ thrice for
                                    each micro-batch that is added to those before it

a mini-batches of m / a micro-batches each are a step: a pipeline is empty between them. One that never runs empty has
no bubble (streams.py), and its step is what it takes once it is under way.

Sources: the bubble of GPipe (1811.06965) and of interleaved schedules (2104.04473), collectives of ZeRO (1910.02054).
"""

from bisect import bisect_right
from collections.abc import Sequence

from paceline.core.types import Seconds
from paceline.plan.base import Arrangement, Cost, Workload
from paceline.plan.cluster import Cluster, Group
from paceline.plan.division import Division, Stage, busiest, division_of, kinds_of
from paceline.plan.habits import Habits
from paceline.plan.held import held_by_all
from paceline.plan.sent import sent_bytes
from paceline.plan.sizes import copies_of, exchanges, holders, mini_batch, turns
from paceline.plan.streams import STREAMS, micro_batch_s, staleness

EXACT = (*STREAMS, "sequential")
"""Schedules whose closed forms are what a simulation comes to."""


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
    division = division or division_of(workload, cluster, arrangement)
    row = division.row
    most = busiest(row, arrangement)
    own, kinds = turns(arrangement, most), kinds_of(row, arrangement)
    terms = {
        "compute": own * (row[most].forward_s + row[most].backward_s),
        "shards": own * row[most].calls_s,
        "bubble": bubble_s(row, arrangement),
        "stages": messages_s(row, arrangement, cluster, habits),
        "replicas": max(replicas_s(row[j], workload, arrangement, cluster, habits, j) for j in kinds)
        + tied_s(division, workload, arrangement, cluster),
        "optimizer": max(optimizer_s(row[j], workload, arrangement, cluster, habits, j) for j in kinds),
        "waiting": habits.step_s + habits.micro_batch_s * arrangement.micro_batches,
    }
    held, sent = held_by_all(row, workload, arrangement, habits), sent_bytes(division, workload, arrangement)
    return Cost(terms, held, sent, division.cuts, staleness(arrangement.schedule, [each.parameters for each in row]))


def bubble_s(row: Sequence[Stage], arrangement: Arrangement) -> Seconds:
    """(Σ c_j - c) / v: what the busiest stage, c, waits for the first micro-batch to come and the last to go.

    ``sequential`` has each micro-batch wait for the one before it: then it is m times as much. Under ``zero-bubble``
    gradients of weights, half of backward, fill the gaps, as far as there are any to put off. Streams have none.
    """
    if arrangement.schedule in STREAMS:
        return 0.0
    if arrangement.schedule == "zero-bubble":
        return arrangement.accumulated * _zero_bubble_s(row, mini_batch(arrangement))
    waits = sum(each.seconds for each in row) - row[busiest(row, arrangement)].seconds
    if arrangement.schedule == "sequential":
        return waits * arrangement.micro_batches
    return waits * arrangement.accumulated / arrangement.chunks


def _zero_bubble_s(row: Sequence[Stage], micro_batches: int) -> Seconds:
    """(p - 1) max(F, I) and, where m < p, (p - m) min(F, I): Qi et al., 2401.10241, for W = I; the second part is ours.

    Of unequal stages the sum of max(F, I) but for the largest, and the mean of min(F, I).
    """
    longer = [max(stage.forward_s, stage.backward_s / 2) for stage in row]
    shorter = [min(stage.forward_s, stage.backward_s / 2) for stage in row]
    missing = max(0, len(row) - micro_batches)
    return sum(longer) - max(longer) + missing * sum(shorter) / len(row)


def messages_s(row: Sequence[Stage], arrangement: Arrangement, cluster: Cluster, habits: Habits) -> Seconds:
    """2 (p - 1) messages in a row while the pipeline fills and empties; of the others 2 m v what is not overlapped.

    Of a stream what its micro-batches come later for them; where one is in the pipeline at a time, all of them.
    """
    if arrangement.stages == 1:
        return 0.0
    group, chunks, seen = cluster.neighbours(arrangement), arrangement.chunks, 1 - habits.send_overlap
    one = max(cluster.messages.seconds("send", each.sent_bytes / chunks, group) for each in row[:-1])
    if arrangement.schedule in STREAMS:
        return arrangement.micro_batches * _stream_s(row, one * seen, one * (1 - seen))
    if arrangement.schedule == "sequential":
        return 2 * (arrangement.stages - 1) * arrangement.micro_batches * one
    filling = 2 * (arrangement.stages - 1) * arrangement.accumulated
    return one * (filling + 2 * arrangement.micro_batches * chunks * seen)


def _stream_s(row: Sequence[Stage], seen_s: Seconds, hidden_s: Seconds) -> Seconds:
    """By how much messages delay each micro-batch: the first stage sends nothing back, the last nothing on."""
    last = len(row) - 1
    busy = [stage.seconds + seen_s * ((j > 0) + (j < last)) for j, stage in enumerate(row)]
    return micro_batch_s(busy, hidden_s) - max(stage.seconds for stage in row)


def replicas_s(
    stage: Stage, workload: Workload, arrangement: Arrangement, cluster: Cluster, habits: Habits, j: int = 0
) -> Seconds:
    """What is not overlapped of summing Δ over all that have stage j, and of bringing divided parameters together.

    ZeRO 1 and 2: a reduce_scatter of Δ and an all_gather of A. 3: A is gathered for either pass of each micro-batch,
    and Δ summed after each; in a pipeline, which keeps its own Δ, after the last.
    """
    group, numerics = cluster.replicas(arrangement, copies_of(arrangement)[j]), workload.numerics
    if group.size == 1:
        return 0.0
    found = cluster.messages.seconds
    if not arrangement.divided:
        spent = found("all_reduce", stage.parameters * numerics.gradient, group)
    else:
        sums, gathers = exchanges(arrangement)
        spent = sums * found("reduce_scatter", stage.parameters * numerics.gradient, group)
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


def optimizer_s(
    stage: Stage, workload: Workload, arrangement: Arrangement, cluster: Cluster, habits: Habits, j: int = 0
) -> Seconds:
    """A, Δ and what is remembered, read and written once, and each further Δ added: bound by memory's bandwidth."""
    numerics, among = workload.numerics, holders(arrangement, j)
    update = 2 * numerics.total * stage.parameters / (among if arrangement.divided else 1)
    own = stage.parameters / (among if arrangement.divided == 3 else 1)
    added = habits.added_moves * numerics.gradient * own * (turns(arrangement, j) - 1)
    return (update + added) / cluster.device.memory_bytes_per_s

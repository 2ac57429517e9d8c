"""What a step takes, sends and holds, one function an equation.

What workers send in a step, in bytes.

What a step takes, one function an equation; what workers hold is in held.py.

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
from functools import cache
from itertools import pairwise
from math import ceil

from paceline import schedule as schedules
from paceline.core.types import Seconds
from paceline.planner.base import Arrangement, Cost, Held, OverlapModel, Workload
from paceline.planner.cluster import Cluster, DeviceGroup
from paceline.planner.stage_division import (
    STREAMS,
    Stage,
    StageDivision,
    busiest,
    copies_of,
    division_of,
    exchanges,
    holders,
    kinds_of,
    micro_batch_s,
    mini_batch,
    own_turns,
    shards_of,
    staleness,
    turns,
    versions,
)


def held_by_all(
    row: Sequence[Stage], workload: Workload, arrangement: Arrangement, habits: OverlapModel
) -> tuple[Held, ...]:
    """By a worker of each stage; what is alike for several is counted once."""
    made, found = dict[tuple[int, int, int, bool], Held](), list[Held]()
    flying, copies, last = all_in_flight(arrangement), copies_of(arrangement), len(row) - 1
    for j, stage in enumerate(row):
        alike = id(stage), versions(arrangement.schedule, len(row), j), copies[j], j == last
        if alike not in made:
            made[alike] = held_by(stage, j, workload, arrangement, habits, last=j == last)
        one, kept = made[alike], flying[j] * stage.saved_bytes * habits.fragmentation
        found.append(Held(one.parameters, one.gradients, one.optimizer, kept, one.buffers, one.context))
    return tuple(found)


def held_by(
    stage: Stage, j: int, workload: Workload, arrangement: Arrangement, habits: OverlapModel, *, last: bool
) -> Held:
    """What a worker of stage j holds at the most."""
    numerics, size, among = workload.numerics, stage.parameters, holders(arrangement, j)
    kept = versions(arrangement.schedule, arrangement.stages, j)
    parted = [among if arrangement.divided >= level else 1 for level in (1, 2, 3)]
    flying = in_flight(arrangement, j)
    buffers = stage.working_bytes + (0 if last else 2 * stage.sent_bytes)
    return Held(
        kept * numerics.parameter * size / parted[2],
        numerics.gradient * size / parted[1],
        numerics.optimizer * size / parted[0],
        flying * stage.saved_bytes * habits.fragmentation,
        buffers * habits.fragmentation,
        habits.context_bytes,
    )


def all_in_flight(arrangement: Arrangement) -> Sequence[float]:
    """:func:`in_flight` of each stage."""
    p = arrangement.stages
    if arrangement.schedule == "1f1b" and arrangement.chunks == 1 and not arrangement.copies:
        m = mini_batch(arrangement)
        return [min(p - j, m) for j in range(p)]
    return [in_flight(arrangement, j) for j in range(p)]


def in_flight(arrangement: Arrangement, j: int) -> float:
    """How many micro-batches a worker of stage j keeps activations of, whole ones of all its chunks.

    1F1B min(p - j, m), and where n_j take turns h_j = 1 + ⌈h_{j+1} · n_{j+1} / n_j⌉ of the ⌈m / n_j⌉ that are its own;
    zero-bubble min(p, m), as W is put off; interleaved (p - 1) / v more for the first stage, which falls to 2 less for
    each later one of its p · v chunks; p - j where the pipeline goes on from step to step; all others as the schedule
    says. m is of a mini-batch: the next one begins when the pipeline is empty.
    """
    p, v, m = arrangement.stages, arrangement.chunks, mini_batch(arrangement)
    copies, own = copies_of(arrangement), own_turns(arrangement, j)
    if arrangement.schedule in STREAMS:
        return p - j
    if arrangement.schedule == "sequential":
        return 1
    if v > 1:
        return min(m, ((v - 1) * p + 2 * (p - 1 - j) + 1) / v)
    if arrangement.schedule == "1f1b":
        return min(_ahead(copies[j:]) if arrangement.copies else p - j, own)
    if arrangement.schedule == "zero-bubble":
        return min(p, m)
    return own if arrangement.schedule == "gpipe" else _counted(arrangement.schedule, j, p, m)


def _ahead(copies: Sequence[int]) -> int:
    """h of the first of these stages, the last of which holds one."""
    held = 1
    for count, following in reversed(list(pairwise(copies))):
        held = 1 + ceil(held * following / count)
    return held


@cache
def _counted(schedule: str, worker: int, workers: int, micro_batches: int) -> int:
    """By going through what it does."""
    return schedules.in_flight(schedules.parse(schedule), worker, workers, micro_batches)


def sent_bytes(division: StageDivision, workload: Workload, arrangement: Arrangement) -> dict[str, float]:
    """By the worker that sends most, in a step; to shards by the mean one."""
    m, row = arrangement.micro_batches, division.row
    return {
        "shards": m * _to_shards(division, arrangement) / len(row),
        "stages": 2.0 * m * max((stage.sent_bytes for stage in row[:-1]), default=0),
        "replicas": max(_to_replicas(row[j], workload, arrangement, j) for j in kinds_of(row, arrangement)),
    }


_BY_RING = {"all_reduce": 2}
"""How often a collective sends what it is given, among many."""


def _to_shards(division: StageDivision, arrangement: Arrangement) -> float:
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


EXACT = (*STREAMS, "sequential")
"""Schedules whose closed forms are what a simulation comes to."""


def cost(
    workload: Workload,
    cluster: Cluster,
    arrangement: Arrangement,
    habits: OverlapModel | None = None,
    division: StageDivision | None = None,
) -> Cost:
    """Of one step, by closed forms.

    Args:
        workload: does not refuse the arrangement.
        cluster: has room for its workers.
        arrangement: every size of it.
        habits: of who carries it out; None: nothing overlaps and nothing is held beside.
        division: of the layers, where it is known already.
    """
    habits = habits or OverlapModel()
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


def messages_s(row: Sequence[Stage], arrangement: Arrangement, cluster: Cluster, habits: OverlapModel) -> Seconds:
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
    stage: Stage, workload: Workload, arrangement: Arrangement, cluster: Cluster, habits: OverlapModel, j: int = 0
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


def tied_s(division: StageDivision, workload: Workload, arrangement: Arrangement, cluster: Cluster) -> Seconds:
    """What stages that share parameters take to sum Δ of them; 0 where all that share them are on one stage."""
    at: dict[str, tuple[int, set[int]]] = {}
    for place, layer in enumerate(division.layers):
        if layer.tied:
            size, where = at.get(layer.tied, (0, set()))
            where.add(bisect_right(division.cuts, place) % arrangement.stages)
            at[layer.tied] = max(size, layer.parameters), where
    near = cluster.neighbours(arrangement).on_host
    shared = [(size * workload.numerics.gradient, len(where)) for size, where in at.values() if len(where) > 1]
    return sum(
        cluster.messages.seconds("all_reduce", size, DeviceGroup(many, min(many, near))) for size, many in shared
    )


def optimizer_s(
    stage: Stage, workload: Workload, arrangement: Arrangement, cluster: Cluster, habits: OverlapModel, j: int = 0
) -> Seconds:
    """A, Δ and what is remembered, read and written once, and each further Δ added: bound by memory's bandwidth."""
    numerics, among = workload.numerics, holders(arrangement, j)
    update = 2 * numerics.total * stage.parameters / (among if arrangement.divided else 1)
    own = stage.parameters / (among if arrangement.divided == 3 else 1)
    added = habits.added_moves * numerics.gradient * own * (turns(arrangement, j) - 1)
    return (update + added) / cluster.device.memory_bytes_per_s

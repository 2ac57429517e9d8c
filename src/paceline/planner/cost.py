"""Closed forms of a step: its time term by term, the memory of its workers, and the bytes that they send.

::

    one micro-batch on stage j      c_j = Σ layers (forward + backward + collectives of its shards)
    compute + shards                max a ⌈m / (a n_j)⌉ · c_j               stage j has n_j replicas
    bubble                          a (Σ c_j - c of the busiest) / v        with equal stages a (p - 1)/v · c
    stages                          exposed messages between stages: a (p - 1) each way while the pipeline fills and
                                    empties, and of the others the part that does not overlap
    replicas                        exposed part of the sum of Δ, and of gathering divided parameters
    optimizer                       bytes of A, Δ and the optimizer's state, read and written once, and of Δ thrice for
                                    each micro-batch that is accumulated

A step has a mini-batches of m / a micro-batches each: the pipeline is empty between them. An asynchronous pipeline has
no bubble, and its step is that of its steady state (stage_division.py).

Sources: the bubble of GPipe (1811.06965) and of interleaved schedules (2104.04473), collectives of ZeRO (1910.02054).
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from math import ceil

from paceline import schedule as schedules
from paceline.core.types import Seconds
from paceline.planner.base import Arrangement, Cost, Numerics, OverlapModel, WorkerMemory, Workload
from paceline.planner.cluster import Cluster, DeviceGroup
from paceline.planner.stage_division import (
    ASYNC_SCHEDULES,
    Divisions,
    Stage,
    StageDivision,
    busiest,
    distinct_stages,
    staleness,
    steady_micro_batch_s,
    weight_versions,
)

# Schedules whose closed forms equal a simulation.
EXACT = (*ASYNC_SCHEDULES, "sequential")


def cost(
    workload: Workload,
    cluster: Cluster,
    arrangement: Arrangement,
    overlap_model: OverlapModel | None = None,
    division: StageDivision | None = None,
) -> Cost:
    """Return the cost of one step, by closed forms.

    Args:
        workload: does not refuse the arrangement.
        cluster: has room for its workers.
        arrangement: every size of it.
        overlap_model: of the runtime; None: nothing overlaps, and the runtime takes no time or memory.
        division: of the layers, where it is known already.
    """
    division = division or Divisions(workload, cluster).of(arrangement)
    overlap, stages = overlap_model or OverlapModel(), division.stages
    step = Step(workload, cluster, arrangement, overlap, stages)
    # Hundreds of stages are of a few kinds: terms are computed once for each kind.
    slowest, distinct = busiest(stages, arrangement), distinct_stages(stages, arrangement)
    many = arrangement.own_micro_batches(slowest)
    terms = {
        "compute": many * (stages[slowest].forward_s + stages[slowest].backward_s),
        "shards": many * stages[slowest].calls_s,
        "bubble": bubble_s(stages, arrangement),
        "stages": step.messages_s(),
        "replicas": max(map(step.replicas_s, distinct)) + tied_s(division, workload, arrangement, cluster),
        "optimizer": max(map(step.optimizer_s, distinct)),
        "waiting": overlap.step_s + overlap.micro_batch_s * arrangement.micro_batches,
    }
    old = staleness(arrangement.schedule, [each.parameters for each in stages])
    sent = sent_bytes(division, workload, arrangement, shares=shares_parameters(arrangement, cluster))
    return Cost(terms, step.memory(), sent, division.cuts, old)


@dataclass(frozen=True, slots=True)
class Step:
    """A step of an arrangement, of which each method computes a part of the cost."""

    workload: Workload
    cluster: Cluster
    arrangement: Arrangement
    overlap_model: OverlapModel
    stages: Sequence[Stage]

    def memory(self) -> tuple[WorkerMemory, ...]:
        """Return the peak memory of a worker of each stage.

        Parameters, gradients and the optimizer's state count as divided by ZeRO; activations once for each micro-batch
        in flight; an asynchronous pipeline keeps several versions of the parameters.
        """
        a, numerics, overlap, last = self.arrangement, self.workload.numerics, self.overlap_model, len(self.stages) - 1
        built, result = dict[object, WorkerMemory](), list[WorkerMemory]()
        shares = shares_parameters(a, self.cluster)
        for j, (stage, flying) in enumerate(zip(self.stages, in_flight(a), strict=True)):
            versions = weight_versions(a.schedule, a.stages, j)
            key = id(stage), versions, a.stage_replicas[j], j == last, flying
            if key not in built:  # of hundreds of stages most are equal
                among, size = a.parameter_replicas(j), stage.parameters
                # 1910.02054, figure 1: the optimizer's state is divided first, then gradients, then parameters.
                zero_1, zero_2, zero_3 = (among if a.divided >= level else 1 for level in (1, 2, 3))
                if shares:  # each counts its part of what there is once
                    zero_3 = among
                # A message is received while another is sent; the last stage sends nothing on.
                buffers: float = stage.working_bytes + (0 if j == last else 2 * stage.sent_bytes)
                # A worker's slice of the sum is beside Δ, whose memory the sum still reads.
                if a.divided == 1 and not shares:
                    buffers += numerics.gradient * size / zero_1
                parameters = versions * numerics.parameter * size / zero_3
                states = parameters, numerics.gradient * size / zero_2, numerics.optimizer * size / zero_1
                activations = flying * stage.saved_bytes * overlap.fragmentation
                built[key] = WorkerMemory(*states, activations, buffers * overlap.fragmentation, overlap.context_bytes)
            result.append(built[key])
        return tuple(result)

    def messages_s(self) -> Seconds:
        """Return the exposed messages: 2 (p - 1) in a row while the pipeline fills and empties, and a part of the
        others.

        With ``sequential``, where one micro-batch is in the pipeline at a time, all are exposed; in an asynchronous
        pipeline they are the delay of the steady state.
        """
        a, stages, cluster = self.arrangement, self.stages, self.cluster
        if a.stages == 1:
            return 0.0
        group, exposed = cluster.neighbours(a), 1 - self.overlap_model.send_overlap
        # The slowest message paces all: stages send in lockstep.
        one = max(cluster.messages.seconds("send", each.sent_bytes / a.chunks, group) for each in stages[:-1])
        if a.schedule in ASYNC_SCHEDULES:
            last = len(stages) - 1  # the first stage sends nothing back, the last nothing on
            busy = [stage.seconds + one * exposed * ((j > 0) + (j < last)) for j, stage in enumerate(stages)]
            later = steady_micro_batch_s(busy, one * (1 - exposed)) - max(stage.seconds for stage in stages)
            return a.micro_batches * later
        if a.schedule == "sequential":
            return 2 * (a.stages - 1) * a.micro_batches * one
        return one * (2 * (a.stages - 1) * a.accumulated + 2 * a.micro_batches * a.chunks * exposed)

    def replicas_s(self, j: int) -> Seconds:
        """Return the exposed time of summing Δ over all that have stage j, and of gathering divided parameters.

        See :func:`zero_collectives` for ZeRO's; without it Δ is all-reduced. They overlap with a part of backward, of
        divided parameters with a part of both passes of each micro-batch.
        """
        a, stage = self.arrangement, self.stages[j]
        group = self.cluster.replicas(a, a.stage_replicas[j])
        if group.size == 1:
            return 0.0
        collectives, shares = zero_collectives(a) if a.divided else None, shares_parameters(a, self.cluster)
        spent = replica_sum_s(stage.parameters, self.workload.numerics, self.cluster, group, collectives, shares=shares)
        # Divided parameters are gathered in each micro-batch, so each of its passes can overlap.
        passes = a.micro_batches if a.divided == 3 else 1
        hides = stage.backward_s + (stage.forward_s if a.divided == 3 else 0.0)
        return max(0.0, spent - self.overlap_model.overlap * hides * passes)

    def optimizer_s(self, j: int) -> Seconds:
        """Return the time to read and write A, Δ and the optimizer's state of stage j once, and to accumulate each
        further Δ.

        It is bound by the memory's bandwidth, or by the launch of a kernel for each.
        """
        a, numerics, parameters = self.arrangement, self.workload.numerics, self.stages[j].parameters
        among = a.parameter_replicas(j)
        device, further = self.cluster.device, a.own_micro_batches(j) - 1
        update = 2 * numerics.total * parameters / (among if a.divided else 1)
        # Under ZeRO-3 alone Δ is accumulated in shards.
        own = parameters / (among if a.divided == 3 else 1)
        added = self.overlap_model.added_moves * numerics.gradient * own
        update_s, added_s = (max(size / device.memory_bytes_per_s, device.launch_s) for size in (update, added))
        return update_s + (added_s * further if added else 0.0)


def in_flight(arrangement: Arrangement) -> Sequence[float]:
    """Return the micro-batches in flight on each stage, whole ones of all its chunks.

    1F1B min(p - j, m), and with n_j replicas h_j = 1 + ⌈h_{j+1} · n_{j+1} / n_j⌉ of the ⌈m / n_j⌉ that are its own;
    zero-bubble min(p, m), as W is put off; interleaved (p - 1) / v more for the first stage, which falls to 2 less for
    each later one of its p · v chunks; p - j where the pipeline is asynchronous; all others as the schedule says. m is
    of a mini-batch: the next one begins when the pipeline is empty.
    """
    p, v, m, schedule = arrangement.stages, arrangement.chunks, arrangement.mini_batch, arrangement.schedule
    if schedule in ASYNC_SCHEDULES:
        return range(p, 0, -1)
    if schedule == "sequential":
        return (1,) * p
    if v > 1:
        return [min(m, ((v - 1) * p + 2 * (p - 1 - j) + 1) / v) for j in range(p)]
    if schedule == "1f1b" and not arrangement.copies:
        return [min(p - j, m) for j in range(p)]
    if schedule == "zero-bubble":
        return (min(p, m),) * p
    own = [ceil(m / copies) for copies in arrangement.stage_replicas]
    if schedule == "gpipe":
        return own
    if schedule == "1f1b":
        # From the last stage to the first: each keeps one more than its successors can have started.
        ahead = [1]  # h, from the last stage to the first
        for copies, following in reversed(list(pairwise(arrangement.copies))):
            ahead.append(1 + ceil(ahead[-1] * following / copies))
        return [min(pair) for pair in zip(reversed(ahead), own, strict=True)]
    order = schedules.parse(schedule)
    return [schedules.in_flight(order, j, p, m) for j in range(p)]


def sent_bytes(
    division: StageDivision, workload: Workload, arrangement: Arrangement, *, shares: bool = False
) -> dict[str, float]:
    """Return the bytes that the worker sends in a step that sends most; to shards those of the mean worker.

    A ring's all_reduce sends its bytes twice, all other collectives once, less the part that a worker keeps. To
    replicas it is Δ once or twice, and A as often as it is gathered: never where replicas share it.
    """
    a, stages, numerics = arrangement, division.stages, workload.numerics
    shards = 0.0
    if a.shards > 1:
        for part, (start, end) in enumerate(pairwise([0, *division.cuts, len(division.layers)])):
            # With v chunks stage j has every p-th part.
            t = a.shards_by_stage[part % a.stages]
            calls = chain.from_iterable((*x.forward_calls, *x.backward_calls) for x in division.layers[start:end])
            moved = sum(call.size_bytes * (2 if call.collective == "all_reduce" else 1) for call in calls)
            shards += moved * (t - 1) / t
    sums, gathers = zero_collectives(a)
    gathered = 0 if shares else gathers * numerics.parameter
    each = sums * numerics.gradient + gathered if a.divided else 2 * numerics.gradient
    replicas = 0.0
    for j in distinct_stages(stages, a):
        among = a.parameter_replicas(j)
        replicas = max(replicas, stages[j].parameters * each * (among - 1) / among)
    return {
        "shards": a.micro_batches * shards / len(stages),
        "stages": 2.0 * a.micro_batches * max((stage.sent_bytes for stage in stages[:-1]), default=0),
        "replicas": replicas,
    }


def replica_sum_s(
    parameters: float,
    numerics: Numerics,
    cluster: Cluster,
    group: DeviceGroup,
    collectives: tuple[int, int] | None,
    *,
    shares: bool = False,
) -> Seconds:
    """Return the time to sum Δ of so many parameters in a group.

    Under ZeRO it takes so many reduce_scatters, with so many all_gathers of A, of nothing where workers share its
    memory; None: it takes one all_reduce.
    """
    seconds, gradient_bytes = cluster.messages.seconds, parameters * numerics.gradient
    if collectives is None:
        return seconds("all_reduce", gradient_bytes, group)
    spent = collectives[0] * seconds("reduce_scatter", gradient_bytes, group)
    return spent + collectives[1] * seconds("all_gather", 0 if shares else parameters * numerics.parameter, group)


def shares_parameters(arrangement: Arrangement, cluster: Cluster) -> bool:
    """Return whether replicas have the parameters once: whole models under ZeRO-1 where processes can share memory."""
    a = arrangement
    return cluster.shares_memory and a.divided == 1 and a.stages == a.shards == a.context == 1


def zero_collectives(arrangement: Arrangement) -> tuple[int, int]:
    """Return how often a step reduces Δ and gathers A under ZeRO: (reduce_scatters, all_gathers).

    ZeRO 1 and 2: once each. 3: A is gathered for either pass of each micro-batch, and Δ reduced after each; in a
    pipeline, which accumulates its own Δ, after the last.
    """
    if arrangement.divided < 3:
        return 1, 1
    return arrangement.micro_batches if arrangement.stages == 1 else 1, 2 * arrangement.micro_batches


def bubble_s(stages: Sequence[Stage], arrangement: Arrangement) -> Seconds:
    """Return (Σ c_j - c) / v: the time that the busiest stage, c, waits while the pipeline fills and empties.

    ``sequential`` has each micro-batch wait for the one before it: then it is m times as much. Asynchronous pipelines
    have none. Under ``zero-bubble`` gradients of weights, half of backward, fill the gaps, as far as there are any to
    put off: (p - 1) max(F, I) and, where m < p, (p - m) min(F, I) remain, of unequal stages the sum of max(F, I) but
    for the largest, and the mean of min(F, I). Source: Qi et al., 2401.10241, for W = I; the second part is ours.
    """
    if arrangement.schedule in ASYNC_SCHEDULES:
        return 0.0
    if arrangement.schedule == "zero-bubble":
        # F, I and W of a stage: backward is half I, the gradient of its input, and half W.
        longer = [max(stage.forward_s, stage.backward_s / 2) for stage in stages]
        shorter = [min(stage.forward_s, stage.backward_s / 2) for stage in stages]
        missing = max(0, len(stages) - arrangement.mini_batch)
        unfilled = sum(longer) - max(longer) + missing * sum(shorter) / len(stages)
        return arrangement.accumulated * unfilled
    waits = sum(each.seconds for each in stages) - stages[busiest(stages, arrangement)].seconds
    if arrangement.schedule == "sequential":
        return waits * arrangement.micro_batches
    return waits * arrangement.accumulated / arrangement.chunks


def tied_s(division: StageDivision, workload: Workload, arrangement: Arrangement, cluster: Cluster) -> Seconds:
    """Return the time to sum Δ of tied layers over the stages that have them; 0 where one stage has all of them."""
    owners: dict[str, tuple[int, set[int]]] = {}
    for place, layer in enumerate(division.layers):
        if layer.tied:
            size, stages = owners.get(layer.tied, (0, set()))
            stages.add(bisect_right(division.cuts, place) % arrangement.stages)
            owners[layer.tied] = max(size, layer.parameters), stages
    # The first and the last stage share an embedding, as a rule: as far apart as neighbours at the least.
    on_host = cluster.neighbours(arrangement).on_host
    shared = [(size * workload.numerics.gradient, len(stages)) for size, stages in owners.values() if len(stages) > 1]
    return sum(
        cluster.messages.seconds("all_reduce", size, DeviceGroup(many, min(many, on_host))) for size, many in shared
    )

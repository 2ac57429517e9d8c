"""Simulation of a pipeline's step: when it ends, with the durations of each part's passes and of messages.

Each worker executes its schedule's order; an action begins when the worker is free and its inputs have arrived::

    F of part j     needs F of part j - 1        a message later, if another worker computed it
    B, I of part j  needs B or I of part j + 1   likewise, and its own F

Where all workers alternate in a common rhythm, whole slots are computed at once as rows of numbers, and slots that have
become periodic are skipped: thousands of micro-batches take as long as a few. Where stages have replicas there is no
such rhythm, and the step is simulated event by event. :mod:`paceline.schedule.simulate` records every action as well,
and takes 13 times as long or more (1F1B of 8 workers and 64 micro-batches: 20 ms, here 0.6 to 1.5).

Schedules whose workers keep a common rhythm are simulated slot by slot. What worker w does in slot k, each counted in
its order: F forwards, B backwards, W gradients of weights::

    1f1b, zero-bubble    F k, B k - (p - 1 - w), W k - (p - 1)    F needs worker w - 1's of this slot, B worker w + 1's
                                                                  of the one before
    interleaved          F k - w, B k - (v + 1) p + 2 + w         both need what the worker before made in the slot
                                                                  before, and the first of them what the last made

Times of a slot follow from those of the one before by maxima and sums alone. So once a whole rhythm has delayed all of
them by the same time, each one to come does too, and they are taken at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice, pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.core.mesh import StageReplicas
from paceline.core.types import Seconds
from paceline.planner.base import Arrangement, OverlapModel
from paceline.planner.cluster import Cluster
from paceline.planner.stage_division import StageDivision, calls_s
from paceline.schedule import parse

# A row for each variant of the durations, a column for each worker or part.
Real: TypeAlias = NDArray[np.float64]

# Arrival of an input that no action waits for.
NEVER = -np.inf

# Relative to the time so far: times that differ by less are rounded sums of the same numbers.
STEADY = 1e-14

# Slots between two tests for periodicity, where the period is shorter.
CHECK_EVERY = 8


@dataclass(frozen=True, slots=True)
class PartTimes:
    """Durations of each part for one micro-batch."""

    forward: tuple[Seconds, ...]
    backward: tuple[Seconds, ...]
    transfer: Seconds = 0.0
    """Time of a message from part to part that overlaps with its sender's compute."""
    blocking: Seconds = 0.0
    """Time that a message blocks its sender, after either pass."""

    def with_blocking_sends(self) -> "PartTimes":
        """Add the blocking time to the passes; the first part sends nothing back, the last nothing on."""
        last = len(self.forward) - 1
        forward = tuple(each + self.blocking * (j < last) for j, each in enumerate(self.forward))
        backward = tuple(each + self.blocking * (j > 0) for j, each in enumerate(self.backward))
        return PartTimes(forward, backward, self.transfer)


def part_times(
    division: StageDivision, arrangement: Arrangement, cluster: Cluster, overlap_model: OverlapModel
) -> PartTimes:
    """Return the durations of a division's parts, collectives included; all messages take as long as the longest."""
    layers, p = division.layers, arrangement.stages
    parts = [layers[start:end] for start, end in pairwise([0, *division.cuts, len(layers)])]
    sizes = [arrangement.with_shards(t) for t in arrangement.shards_by_stage]
    passes: dict[int, tuple[Seconds, Seconds]] = {}
    for place, part in enumerate(parts):
        for layer in {id(each): each for each in part}.values():  # layers that are equal are one object
            # Each pass has its share of the exposed time of the collectives.
            group = cluster.group(sizes[place % p].shards, 1)
            forward_s = sum(cluster.messages.seconds(*call, group) for call in layer.forward_calls)
            both_s = forward_s + sum(cluster.messages.seconds(*call, group) for call in layer.backward_calls)
            exposed = calls_s(layer, cluster, sizes[place % p]) / both_s if both_s else 0.0
            backward_s = layer.backward_s + exposed * (both_s - forward_s)
            passes[id(layer)] = layer.forward_s + exposed * forward_s, backward_s
    message_s = 0.0
    if p > 1 and len(parts) > 1:
        group = cluster.neighbours(arrangement)
        outputs = {part[-1].output_bytes for part in parts[:-1]}
        message_s = max(cluster.messages.seconds("send", size, group) for size in outputs)
    hidden_s = message_s * overlap_model.send_overlap
    forward, backward = (tuple(sum(passes[id(layer)][n] for layer in part) for part in parts) for n in (0, 1))
    return PartTimes(forward, backward, hidden_s, message_s - hidden_s)


def steps_s(arrangement: Arrangement, variants: Sequence[PartTimes]) -> list[Seconds]:
    """Return the time from the first forward to the last backward of a step, for several variants of the durations.

    A step has one mini-batch after the other. A pipeline of two equal parts, three micro-batches: (m + p - 1) (F + B):

    >>> steps_s(Arrangement(stages=2, micro_batches=3), [PartTimes((1.0, 1.0), (2.0, 2.0))])
    [12.0]
    """
    a, each = arrangement, [variant.with_blocking_sends() for variant in variants]
    in_slots = a.chunks > 1 or a.schedule in ("gpipe", "1f1b", "zero-bubble")
    if not in_slots or max(a.copies, default=1) > 1:
        return [by_events_s(a, times) for times in each]
    forward, backward = np.array([x.forward for x in each], float), np.array([x.backward for x in each], float)
    hop = np.array([x.transfer for x in each], float)[:, None]
    if a.chunks > 1:
        ends_s = _interleaved_s(forward, backward, hop, a.stages, a.mini_batch)
    elif a.schedule == "gpipe":
        ends_s = _gpipe_s(forward, backward, hop, a.mini_batch)
    else:
        ends_s = _alternating_s(forward, backward, hop, a.mini_batch, splits=a.schedule == "zero-bubble")
    return [a.accumulated * float(end_s) for end_s in ends_s]


# ------------------------------------------------------------------------------------------------------------- in slots


def _gpipe_s(forward: Real, backward: Real, hop: Real, micro_batches: int) -> Real:
    """Return the end of GPipe: one worker after the other, each all micro-batches at once."""
    place, p = np.arange(micro_batches), forward.shape[1]

    def in_turn(arrived: Real, takes_s: Real) -> Real:
        """end_i = max(arrived_i, end_{i-1}) + takes, for a row of micro-batches, as a running maximum."""
        return np.asarray(np.maximum.accumulate(arrived - place * takes_s, axis=1) + (place + 1) * takes_s)

    done, free = np.zeros((len(forward), micro_batches)), list[Real]()
    for w in range(p):
        done = in_turn(done + hop * (w > 0), forward[:, w, None])
        free.append(done[:, -1:])
    done = np.repeat(free[-1], micro_batches, axis=1)
    for w in reversed(range(p)):
        done = in_turn(np.maximum(done + hop * (w < p - 1), free[w]), backward[:, w, None])
    return done[:, -1]


def _alternating_s(forward: Real, backward: Real, hop: Real, micro_batches: int, *, splits: bool) -> Real:
    """Return the end of 1F1B or, where backward is split in halves, of zero-bubble.

    In slot k every worker has F of micro-batch k, then worker w has B of micro-batch k - (p - 1 - w).
    """
    (variants, p), m = forward.shape, micro_batches
    backward = backward / 2 if splits else backward
    # Forwards of a slot wait for each other from the first worker to the last: a running maximum once each is shifted
    # by the sum of those before it.
    chain = np.cumsum(forward, axis=1) + hop * np.arange(p)
    lead = forward - chain
    free, sent = np.zeros((variants, p)), np.full((variants, p + 1), NEVER)
    k, steady = 0, SteadyState(p, m, CHECK_EVERY)
    while k < m + p - 1:
        if k < m:
            free = np.maximum.accumulate(free + lead, axis=1) + chain
        # Workers that have a backward in this slot; others are still filling, or done.
        first, last = max(0, p - 1 - k), min(p, p - 1 - k + m)
        free[:, first:last] = np.maximum(free[:, first:last], sent[:, first + 1 : last + 1] + hop)
        free[:, first:last] += backward[:, first:last]
        sent[:, first:last] = free[:, first:last]
        # W fills the gap after each B once the pipeline is full.
        if splits and k >= p - 1:
            free += backward
        k += 1
        k += steady.skip(k, free, sent)
    return np.asarray(free.max(axis=1))


def _interleaved_s(forward: Real, backward: Real, hop: Real, workers: int, micro_batches: int) -> Real:
    """Return the end of the interleaved schedule, of which each worker has v of the parts; m is a multiple of p.

    In slot k worker w has its forward number k - w; backwards are the same with workers and parts reversed, p v - 1
    slots later.
    """
    parts, variants = forward.shape[1], len(forward)
    count, later = parts // workers * micro_batches, parts - 1
    w = np.arange(workers)
    # In slot k worker w works on chunk ((k - w) mod p v) div p.
    part_of = [w + (k - w) % parts // workers * workers for k in range(parts)]
    takes_s = [[each[:, part] for part in part_of] for each in (forward, backward[:, ::-1])]
    sent = [np.full((variants, workers + 1), NEVER) for _ in range(2)]  # by the worker before each; 0: by the last one
    free = np.zeros((variants, workers))
    k, steady = 0, SteadyState(later + workers - 1, count, parts)
    while k < later + workers - 1 + count:
        for direction, (slot, view) in enumerate(((k, free), (k - later, free[:, ::-1]))):
            first, last = max(0, slot - count + 1), min(workers, slot + 1)
            if first >= last:
                continue
            place, times = slot % parts, sent[direction]
            arrived = times[:, first:last] + hop
            if first == 0 and place < workers:
                arrived[:, 0] = NEVER  # the model's first part needs no other
            view[:, first:last] = np.maximum(view[:, first:last], arrived) + takes_s[direction][place][:, first:last]
            times[:, first + 1 : last + 1] = view[:, first:last]
            # The last worker sends to the first, which has the next chunk.
            times[:, 0] = times[:, -1]
        k += 1
        k += steady.skip(k, free, *sent)
    return np.asarray(free.max(axis=1))


@dataclass(eq=False, slots=True)
class SteadyState:
    """Detection of slots that have become periodic.

    Args:
        begins: the first slot in which all workers are busy.
        ends: the slot after the last of these.
        period: slots between two comparisons.
    """

    begins: int
    ends: int
    period: int
    _before: Real | None = field(default=None, init=False)

    def skip(self, k: int, *times: Real) -> int:
        """Return how many of the remaining slots are skipped, whole periods of them; their time is added to times."""
        if not self.begins <= k < self.ends or (k - self.begins) % self.period:
            return 0
        now, before = np.concatenate(times, axis=1), self._before
        self._before = now
        if before is None:
            return 0
        with np.errstate(invalid="ignore"):  # NEVER - NEVER
            delay = np.where(now == NEVER, now[:, :1] - before[:, :1], now - before)
        if np.any(np.ptp(delay, axis=1) > STEADY * now.max()):
            return 0
        many = (self.ends - k) // self.period
        for each in times:
            each += delay[:, :1] * many
        return many * self.period


# ------------------------------------------------------------------------------------------------------------ by events

# An action: whether it is a forward, its part, its micro-batch; the gradient of a weight has part -1 - j.
Step = tuple[bool, int, int]


@lru_cache(maxsize=64)
def _orders(schedule: str, copies: tuple[int, ...], micro_batches: int) -> tuple[tuple[Step, ...], ...]:
    order, replicas, stages = parse(schedule), StageReplicas(copies), len(copies)
    result = []
    for each in replicas:
        if max(copies) == 1:
            actions = order.actions(each.stage, stages, micro_batches)
        else:
            actions = order.stage_replica_actions(each, replicas, micro_batches)
        parts = ((a, -1 - a.stage if a.kind == "backward_weight" else a.stage) for a in actions)
        result.append(tuple((a.kind == "forward", part, a.micro_batch) for a, part in parts))
    return tuple(result)


def by_events_s(arrangement: Arrangement, times: PartTimes) -> Seconds:
    """Return the end of a step of any schedule, with sends that don't block: each worker runs until it has to wait."""
    schedule = f"interleaved:chunks={arrangement.chunks}" if arrangement.chunks > 1 else arrangement.schedule
    orders = _orders(schedule, tuple(arrangement.stage_replicas), arrangement.mini_batch)
    forward, backward, hop, last = times.forward, times.backward, times.transfer, len(times.forward) - 1
    if arrangement.schedule == "zero-bubble":
        backward = tuple(each / 2 for each in backward)
    sent_on: list[dict[int, Seconds]] = [{} for _ in forward]
    sent_back: list[dict[int, Seconds]] = [{} for _ in forward]
    free, done, waiting = [0.0] * len(orders), [0] * len(orders), list(range(len(orders)))
    while waiting:
        blocked = list[int]()
        for worker in waiting:
            order, count, now = orders[worker], done[worker], free[worker]
            for is_forward, part, i in islice(order, count, None):  # without calls: all the time is spent here
                if part < 0:
                    now += backward[-1 - part]
                elif is_forward:
                    arrived = sent_on[part - 1].get(i) if part else -hop
                    if arrived is None:
                        break
                    now = max(now, arrived + hop) + forward[part]
                    sent_on[part][i] = now
                else:
                    arrived = sent_back[part + 1].get(i) if part < last else -hop
                    if arrived is None:
                        break
                    now = max(now, arrived + hop) + backward[part]
                    sent_back[part][i] = now
                count += 1
            done[worker], free[worker] = count, now
            if count < len(order):
                blocked.append(worker)
        waiting = blocked
    return arrangement.accumulated * max(free)

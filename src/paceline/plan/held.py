"""What a worker holds at the most, by what it is for.

Sources: memory of ZeRO (1910.02054), activations of a pipeline's schedules (2104.04473).
"""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from math import ceil

from paceline import schedule as schedules
from paceline.plan.base import Arrangement, Held, Workload
from paceline.plan.division import Stage
from paceline.plan.habits import Habits
from paceline.plan.sizes import copies_of, holders, mini_batch, own_turns
from paceline.plan.streams import STREAMS, versions


def held_by_all(row: Sequence[Stage], workload: Workload, arrangement: Arrangement, habits: Habits) -> tuple[Held, ...]:
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


def held_by(stage: Stage, j: int, workload: Workload, arrangement: Arrangement, habits: Habits, *, last: bool) -> Held:
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

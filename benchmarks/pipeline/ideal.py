"""How quick a step could be: what a schedule makes of stage times, were communication free."""

from collections.abc import Sequence
from typing import NamedTuple

from paceline.schedule import Schedule, StageTimes, simulate


class PartTimes(NamedTuple):
    """Seconds that one part of a model takes for one micro-batch."""

    forward: float
    backward: float
    backward_input: float
    """The part of ``backward`` that is left where the linear layers' weights and biases need no gradient."""


def ideal_s(
    schedule: Schedule,
    parts: Sequence[PartTimes],
    updates: Sequence[float],
    micro_batches: int,
    cores: int,
) -> float:
    """Seconds of a step: until the last worker has made its update, and no less than all work takes on all cores.

    Args:
        schedule: any that flushes.
        parts: of the model, in order.
        updates: seconds of each worker's step of the optimizer.
        micro_batches: m.
        cores: on which the workers run.

    >>> from paceline.schedule import parse
    >>> two = [PartTimes(1.0, 2.0, 1.0)] * 2
    >>> ideal_s(parse("gpipe"), two, [0.5, 0.5], 8, cores=2), ideal_s(parse("1f1b"), two, [0.5, 0.5], 8, cores=1)
    (27.5, 49.0)
    """
    inputs = tuple(min(part.backward_input, part.backward) for part in parts)
    weights = tuple(part.backward - half for part, half in zip(parts, inputs, strict=True))
    times = StageTimes(tuple(part.forward for part in parts), inputs, weights)
    ends = [0.0] * len(updates)
    for span in simulate(schedule.resolved(micro_batches), times, len(updates), micro_batches):
        ends[span.stage] = max(ends[span.stage], span.end_ns / 1e9)
    work = micro_batches * sum(part.forward + part.backward for part in parts) + sum(updates)
    return max(work / cores, *(end + update for end, update in zip(ends, updates, strict=True)))


def simple_s(one_s: float, schedule: Schedule, workers: int, micro_batches: int) -> float:
    """The same from the step of one process alone, t/p · (1 + (p - 1)/(v·m)): t in p equal stages of v chunks each.

    >>> from paceline.schedule import parse
    >>> round(simple_s(0.888, parse("gpipe"), workers=2, micro_batches=8), 4)
    0.4995
    """
    return one_s / workers * (1 + (workers - 1) / (schedule.chunks * micro_batches))

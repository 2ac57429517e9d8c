"""A schedule as a table: a row a worker, a column a unit of time."""

from paceline.core.mesh import StageReplicas
from paceline.schedule.base import Schedule
from paceline.schedule.dependencies import Dependencies
from paceline.schedule.simulate import StageTimes, timeline

_UNIT = 10**9


def draw(
    schedule: Schedule,
    workers: int,
    micro_batches: int,
    stage_replicas: StageReplicas | None = None,
    dependencies: Dependencies | None = None,
) -> str:
    """Return the table, each forward one unit, each half of a backward one.

    ``---`` continues an action, ``.`` is idle, ``U`` at the end of a backward is the update that follows.

    Args:
        schedule: any.
        workers: p.
        micro_batches: m, or the length of the stream.
        stage_replicas: of the stages; one of n then takes n times as long as one of one. None: one of each.
        dependencies: which parts need which; None: each needs the one before it.

    >>> from paceline.schedule import parse
    >>> print(draw(parse("gpipe"), 2, 2))
    worker 0|0F0 0F1  .   .   .  0B1 --- 0B0 ---
    worker 1| .  1F0 1F1 1B1 --- 1B0 ---  .   .
    12 of 18 cells are busy: 67 %
    >>> print(draw(parse("1f1b"), 2, 4, StageReplicas((2, 1))))
    worker 0.0|0F0 --- 0F2 ---  .  0B0 --- --- ---  .   .  0B2 --- --- ---  .   .   .
    worker 0.1|0F1 --- 0F3 ---  .   .   .   .  0B1 --- --- ---  .   .  0B3 --- --- ---
    worker 1.0| .   .  1F0 1B0 --- 1F1 1B1 --- 1F2 1B2 --- 1F3 1B3 ---  .   .   .   .
    36 of 54 cells are busy: 67 %
    """
    times = StageTimes.balanced(schedule, workers, stage_replicas)
    run = list(timeline(schedule, times, workers, micro_batches, stage_replicas, dependencies))
    width = max(len(str(timed.action)) for timed in run)
    units = max(timed.end_ns for timed in run) // _UNIT
    names = [str(w) for w in range(workers)] if stage_replicas is None else [f"{s}.{c}" for s, c in stage_replicas]
    rows = [[".".center(width)] * units for _ in names]
    for timed in run:
        cells, start, end = rows[timed.worker], timed.start_ns // _UNIT, timed.end_ns // _UNIT
        if timed.action.kind == "update":  # takes no time: its letter ends the cell of the backward before it
            cells[end - 1] = cells[end - 1][:-1] + "U"
        else:
            cells[start:end] = [str(timed.action).ljust(width)] + ["-" * width] * (end - start - 1)
    longest = max(map(len, names))
    lines = [f"worker {name:<{longest}}|{' '.join(row)}".rstrip() for name, row in zip(names, rows, strict=True)]
    busy = sum(timed.end_ns - timed.start_ns for timed in run) // _UNIT
    total = units * len(names)
    return "\n".join([*lines, f"{busy} of {total} cells are busy: {busy / total:.0%}".replace("%", " %")])

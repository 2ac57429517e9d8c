"""A schedule as a table: a row a worker, a column a unit of time."""

from collections.abc import Iterable

from paceline.schedule.base import Schedule
from paceline.schedule.simulate import StageTimes, Timed, timeline

_UNIT = 10**9


def draw(schedule: Schedule, workers: int, micro_batches: int) -> str:
    """The table, each forward one unit, each half of a backward one.

    ``---`` goes on with what was begun, ``.`` is idle, ``U`` at the end of a backward is the update that follows.

    Args:
        schedule: any.
        workers: p.
        micro_batches: m, or the length of the stream.

    >>> from paceline.schedule import parse
    >>> print(draw(parse("gpipe"), 2, 2))
    worker 0|0F0 0F1  .   .   .  0B1 --- 0B0 ---
    worker 1| .  1F0 1F1 1B1 --- 1B0 ---  .   .
    12 of 18 cells are busy: 67 %
    """
    found = list(timeline(schedule, StageTimes.equal(schedule.parts(workers)), workers, micro_batches))
    width = max(len(str(timed.action)) for timed in found)
    columns = max(timed.end_ns for timed in found) // _UNIT
    rows = [_row([t for t in found if t.worker == worker], columns, width) for worker in range(workers)]
    lines = [f"worker {worker:<{len(str(workers - 1))}}|{' '.join(row)}".rstrip() for worker, row in enumerate(rows)]
    busy = sum(timed.end_ns - timed.start_ns for timed in found) // _UNIT
    total = columns * workers
    return "\n".join([*lines, f"{busy} of {total} cells are busy: {busy / total:.0%}".replace("%", " %")])


def _row(found: Iterable[Timed], columns: int, width: int) -> list[str]:
    cells = [".".center(width)] * columns
    for timed in found:
        start, end = timed.start_ns // _UNIT, timed.end_ns // _UNIT
        if timed.action.kind == "update":
            cells[end - 1] = cells[end - 1][:-1] + "U"
        else:
            cells[start:end] = [str(timed.action).ljust(width)] + ["-" * width] * (end - start - 1)
    return cells

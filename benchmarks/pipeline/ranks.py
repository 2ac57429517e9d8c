"""The table of step times: a row for each side of each cell."""

import statistics
import warnings
from collections.abc import Sequence
from typing import Any

from alone import cores
from ideal import simple_s
from kit.crew import Member
from kit.machine import machine
from kit.work import Measured
from rounds import REFERENCE, Cell, Found, Name, Pace, Rounds, sides
from sides import THEIRS
from together import tell

import paceline.comm
from paceline import schedule


def measure(member: Member, cells: Sequence[Cell], schedules: Sequence[str], pace: Pace) -> None:
    """All cells of one number of stages."""
    warnings.simplefilter("ignore", FutureWarning)  # torch is renaming its collectives
    paceline.comm.register()
    for cell in cells:
        found = Rounds(member, cell, schedules, pace).run()
        tell(member, Measured([_row(member, cell, name, found) for name in sides(schedules)]))


def _row(member: Member, cell: Cell, name: Name, found: Found) -> dict[str, Any]:
    side, planned = name
    row = {
        "size": cell.size,
        "stages": member.ranks,
        "backend": cell.backend,
        "schedule": planned,
        "side": side,
        **_figures(name, found),
        "simple_ms": _ms(_simple_s(member, planned, found)),
        "difference": f"{found.differences[name]:.1e}",
        "moved": f"{found.moved:.1e}",
        "steps": found.job.steps,
        "pairs": len(found.times[name]),
        "clock": "wall" if member.ranks <= cores() else "processor",
    }
    return row | machine()


def _figures(name: Name, found: Found) -> dict[str, str]:
    times, ideals, theirs = found.times[name], found.ideals[name[1]], found.times.get((THEIRS, name[1]))
    return {
        "step_ms": _ms(statistics.median(times)),
        "ideal_ms": _ms(statistics.median(ideals)),
        "of_ideal": _ratio(times, ideals),
        "of_torch": _ratio(times, theirs) if theirs else "",
        "one_ms": _ms(statistics.median(found.times[REFERENCE])),
    }


def _simple_s(member: Member, planned: str, found: Found) -> float:
    one_s = statistics.median(found.times[REFERENCE])
    return simple_s(one_s, schedule.parse(planned), member.ranks, found.job.micro_batches)


def _ratio(times: Sequence[float], others: Sequence[float]) -> str:
    return f"{statistics.median(a / b for a, b in zip(times, others, strict=True)):.3f}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}"

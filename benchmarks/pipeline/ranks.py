"""The table of step times: a row for each side of each cell."""

import statistics
import warnings
from collections.abc import Sequence
from typing import Any

from alone import cores
from ideal import simple_s
from kit.crew import Member
from kit.machine import machine
from kit.together import tell
from kit.work import Measured
from models import MICRO_BATCHES
from rounds import Cell, Found, Pace, Rounds
from sides import BESIDE, ONE, OURS, THEIRS, THEIRS_ON_GLOO

import paceline.comm
from paceline import schedule


def measure(member: Member, cells: Sequence[Cell], pace: Pace) -> None:
    """All cells of one number of stages."""
    warnings.simplefilter("ignore", FutureWarning)  # torch is renaming its collectives
    paceline.comm.register()
    for cell in cells:
        found = Rounds(member, cell, pace).run()
        tell(member, Measured([_row(member, cell, side, found) for side in found.times if side != ONE]))


def _row(member: Member, cell: Cell, side: str, found: Found) -> dict[str, Any]:
    row = {
        "size": cell.size,
        "stages": member.ranks,
        "backend": cell.backend,
        "schedule": cell.schedule,
        "side": side,
        **_figures(cell, side, found),
        "simple_ms": _ms(_simple_s(member, cell, found)),
        "difference": f"{found.differences[side]:.1e}",
        "moved": f"{found.moved:.1e}",
        "steps": found.steps,
        "pairs": len(found.ideals),
        "clock": "wall" if member.ranks <= cores() else "processor",
    }
    return row | machine()


def _figures(cell: Cell, side: str, found: Found) -> dict[str, str]:
    times, theirs = found.times[side], found.times.get(THEIRS)
    beside = found.times.get(f"{OURS}, {BESIDE.get(cell.schedule)}")
    on_gloo = found.times.get(THEIRS_ON_GLOO, theirs)
    return {
        "step_ms": _ms(statistics.median(times)),
        "ideal_ms": _ms(statistics.median(found.ideals)),
        "of_ideal": _ratio(times, found.ideals),
        "of_torch": _ratio(times, theirs) if theirs else "",
        "of_torch_on_gloo": _ratio(times, on_gloo) if on_gloo else "",
        "of_beside": _ratio(times, beside) if beside else "",
        "one_ms": _ms(statistics.median(found.times[ONE])),
    }


def _simple_s(member: Member, cell: Cell, found: Found) -> float:
    one_s = statistics.median(found.times[ONE])
    return simple_s(one_s, schedule.parse(cell.schedule), member.ranks, MICRO_BATCHES)


def _ratio(times: Sequence[float], others: Sequence[float]) -> str:
    return f"{statistics.median(a / b for a, b in zip(times, others, strict=True)):.3f}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}"

"""The table: a row for each side of each cell."""

import statistics
import warnings
from collections.abc import Sequence
from typing import Any

from kit.crew import Member
from kit.machine import machine
from kit.work import Measured
from rounds import Cell, Found, Pace, Rounds
from sides import ONE, THEIRS

import paceline.comm


def measure(member: Member, cells: Sequence[Cell], pace: Pace) -> None:
    """All cells of one number of shards."""
    warnings.simplefilter("ignore", FutureWarning)  # torch is renaming its collectives
    paceline.comm.register()
    for cell in cells:
        found = Rounds(member, cell, pace).run()
        if member.rank == 0:
            member.tell(Measured([_row(member, cell, side, found) for side in found.steps]))


def _row(member: Member, cell: Cell, side: str, found: Found) -> dict[str, Any]:
    row = {
        "row": cell.row,
        "shards": member.ranks,
        "backend": cell.backend,
        "side": side,
        "step_ms": _ms(found.steps[side]),
        "of_one": _ratio(found.steps[side], found.steps[ONE]),
        "of_dtensor": _ratio(found.steps[side], found.steps.get(THEIRS)),
        "forward_ms": _ms(found.forwards[side]),
        "forward_of_one": _ratio(found.forwards[side], found.forwards[ONE]),
        "forward_of_dtensor": _ratio(found.forwards[side], found.forwards.get(THEIRS)),
        "difference": f"{found.difference:.1e}",
        "pairs": len(found.steps[side]),
    }
    return row | machine()


def _ms(seconds: Sequence[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.3f}"


def _ratio(times: Sequence[float], others: Sequence[float] | None) -> str:
    return "" if others is None else f"{statistics.median(a / b for a, b in zip(times, others, strict=True)):.3f}"

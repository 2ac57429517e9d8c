"""Bytes that stages keep between forward and backward, against the number of micro-batches."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from job import Job
from kit.crew import Member
from kit.machine import machine
from kit.together import tell
from kit.work import Begun, Measured
from ours import times, trained

import paceline.comm

COUNTS = (4, 8, 16, 32, 64)
"""m."""

WAYS = {
    "gpipe": "schedule=gpipe",
    "1f1b": "schedule=1f1b",
    "zero-bubble": "schedule=zero-bubble",
    "gpipe, boundaries": "schedule=gpipe recompute=boundaries",
    "1f1b, boundaries": "schedule=1f1b recompute=boundaries",
}
"""How a table and a legend call some strategies."""


class Fill(NamedTuple):
    """One model, one strategy and one m."""

    size: str
    way: str
    micro_batches: int

    def __str__(self) -> str:
        return f"{self.size}, {self.way}, m = {self.micro_batches}"


def memory(member: Member, fills: Sequence[Fill]) -> None:
    """One step of each, on micro-batches of one size, however many."""
    paceline.comm.register()
    for fill in fills:
        tell(member, Begun(f"saved: {fill}, {member.ranks} stages"))
        run = trained(WAYS[fill.way], Job(fill.size, fill.micro_batches, "shm"), 1, times(1))
        tell(member, Measured([_row(member, fill, *each) for each in enumerate(run.summary["peak_saved_bytes"])]))


def _row(member: Member, fill: Fill, stage: int, saved_bytes: int) -> dict[str, Any]:
    row = {
        "size": fill.size,
        "stages": member.ranks,
        "way": fill.way,
        "micro_batches": fill.micro_batches,
        "stage": stage,
        "peak_saved_bytes": saved_bytes,
    }
    return row | machine()

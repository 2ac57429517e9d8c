"""What each rank does: check a call on both backends, then make it on them by turns.

::

    shm   check         1 to 3 calls                turn        turn turn        turn
    gloo         check                1 to 3 calls       turn turn        turn turn

In a turn all meet at a barrier and make some calls in a row; its time is the mean of them, on the slowest rank.
"""

import statistics
import time
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from calls import BARRIER, CALLS, FLOAT_BYTES, Case
from kit.crew import Member
from kit.machine import machine
from kit.words import size_text
from kit.work import Begun, Measured

import paceline.comm

BACKENDS = ("shm", "gloo")

MOST_CALLS = 300
"""In a turn."""


class Cell(NamedTuple):
    """One call on so many bytes."""

    call: str
    nbytes: int

    def __str__(self) -> str:
        return self.call if self.call == BARRIER else f"{self.call} of {size_text(self.nbytes)}"


class Pace(NamedTuple):
    """How often and for how long both are measured."""

    pairs: int
    turn_s: float
    """About; a call that takes longer is made once."""


def measure(member: Member, cells: Sequence[Cell], pace: Pace) -> None:
    """The work of a rank."""
    warnings.simplefilter("ignore", FutureWarning)  # torch is renaming its collectives
    paceline.comm.register()
    course = Course(member, {name: dist.new_group(backend=name) for name in BACKENDS}, pace)
    for cell in cells:
        if member.rank == 0:
            member.tell(Begun(f"{cell}, {member.ranks} ranks"))
        row = course.row(cell)
        if member.rank == 0:
            member.tell(Measured([row | machine()]))


class Course:
    """All cells of one number of ranks, as one of them sees it.

    Args:
        member: this rank.
        groups: a group of all ranks for each backend.
        pace: of the measurement.
    """

    def __init__(self, member: Member, groups: dict[str, dist.ProcessGroup], pace: Pace) -> None:
        self._member, self._groups, self._pace = member, groups, pace

    def row(self, cell: Cell) -> dict[str, Any]:
        """Check, then measure."""
        elements = max(self._member.ranks, cell.nbytes // FLOAT_BYTES)
        for backend in BACKENDS:
            self._check(cell, elements, backend)
        case = CALLS[cell.call](elements, self._member.rank, self._member.ranks)
        for output in case.outputs:
            output.zero_()  # or sums of sums of sums would overflow
        counts = {backend: self._count(case, backend) for backend in BACKENDS}
        times = self._times(case, counts)
        middle = {backend: statistics.median(taken) * 1e6 for backend, taken in times.items()}
        ratio = statistics.median(g / s for s, g in zip(times["shm"], times["gloo"], strict=True))
        return {
            "call": cell.call,
            "ranks": self._member.ranks,
            "bytes": cell.nbytes,
            "shm_us": f"{middle['shm']:.1f}",
            "gloo_us": f"{middle['gloo']:.1f}",
            "ratio": f"{ratio:.3f}",
            "pairs": self._pace.pairs,
            "shm_calls": counts["shm"],
            "gloo_calls": counts["gloo"],
            "turn_ms": f"{1e3 * self._pace.turn_s:g}",
        }

    def _check(self, cell: Cell, elements: int, backend: str) -> None:
        case = CALLS[cell.call](elements, self._member.rank, self._member.ranks)
        if not case.check(self._groups[backend]):
            raise ArithmeticError(f"{cell} on {backend} gives something else than it must")

    def _count(self, case: Case, backend: str) -> int:
        """Calls in a turn; the same on all ranks."""
        once = self._turn(case, backend, 1)
        if once < self._pace.turn_s:  # a long call costs too much to be tried again
            once = min(once, *(self._turn(case, backend, 1) for _ in range(2)))
        return max(1, min(MOST_CALLS, int(self._pace.turn_s / once)))

    def _times(self, case: Case, counts: dict[str, int]) -> dict[str, list[float]]:
        """Seconds a call, of each turn."""
        times: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
        for turn in range(self._pace.pairs):
            for backend in BACKENDS if turn % 2 else reversed(BACKENDS):
                times[backend].append(self._turn(case, backend, counts[backend]))
        return times

    def _turn(self, case: Case, backend: str, calls: int) -> float:
        group = self._groups[backend]
        dist.barrier(self._groups["shm"])
        began = time.perf_counter()
        for _ in range(calls):
            case.call(group)
        return self._slowest((time.perf_counter() - began) / calls)

    def _slowest(self, seconds: float) -> float:
        """Of all ranks."""
        word = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(word, dist.ReduceOp.MAX, group=self._groups["shm"])
        return word.item()

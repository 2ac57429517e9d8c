"""What each rank does: turns of all sides by turns, checked against each other.

::

    DDP on Gloo   a few steps: how many fit into a turn
    each side     turn            turn turn            turn      its time: the median of its steps on the slowest rank
                  |                                              checked: all end with the same parameters
"""

import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from kit.crew import Member
from kit.machine import machine
from kit.work import Begun, Measured
from models import parameters
from sides import AGAINST, ALONE, DIVIDED, SIDES, WHOLE, Job, Side, Turn, ours, version
from torch import Tensor

TOLERANCE = 1e-5
"""Parameters are below 1; float32 keeps 6e-8 of them at a step, and sides sum in orders of their own."""

FEWEST, MOST = 3, 40
"""Steps of a turn that count."""

SHORT = 4
"""Steps of a turn whose memory is looked at."""


class Cell(NamedTuple):
    """One model on so many samples a rank."""

    model: str
    batch: int
    optimizer: str = "sgd"

    def job(self, steps: int) -> Job:
        """So many steps of it."""
        return Job(self.model, self.batch, steps, self.optimizer)

    def __str__(self) -> str:
        return f"{self.model}, batch {self.batch}, {self.optimizer}"


class Pace(NamedTuple):
    """How often and for how long all are measured."""

    pairs: int
    turn_s: float
    """Of the steps that count, about."""


class Rounds(NamedTuple):
    """All turns of one cell."""

    steps: int
    times: dict[str, list[float]]
    """Seconds of a step, of each turn."""
    first: dict[str, Turn]
    differences: dict[str, float]
    """The largest of a parameter from the reference's, on any rank."""

    def row(self, side: str, against: str) -> dict[str, Any]:
        """Figures of a side."""
        pairs = zip(self.times[side], self.times[against], strict=True)
        return {
            "step_ms": f"{1e3 * statistics.median(self.times[side]):.3f}",
            "ratio": f"{statistics.median(a / b for a, b in pairs):.3f}",
            "difference": f"{self.differences[side]:.1e}" if side in self.differences else "",
            "steps": self.steps,
            "pairs": len(self.times[side]),
        }


def measure(member: Member, cells: Sequence[Cell], sides: Sequence[str], pace: Pace) -> None:
    """The table of step times: all sides of each cell."""
    _quietly()
    for cell in cells:
        _tell(member, Begun(f"{cell}, {member.ranks} ranks"))
        found = rounds(cell, {side: SIDES[side] for side in sides}, AGAINST, pace)
        _tell(member, Measured([_row(member, cell, side, found) for side in sides]))


def divided(member: Member, wanted: Sequence[tuple[Cell, str]], pace: Pace) -> None:
    """The table of divided optimizers: cells on backends, with the whole state on each rank, and divided among all."""
    _quietly()
    for cell, backend in wanted:
        _tell(member, Begun(f"{cell}, {member.ranks} ranks, {backend}"))
        sides: dict[str, Side] = {words: _ours(backend, words) for words in (WHOLE, DIVIDED)}
        found = rounds(cell, sides, WHOLE, pace)
        _tell(member, Measured([_divided_row(member, cell, backend, found)]))


def memory(member: Member, cell: Cell, side: str) -> None:
    """Peak memory of the fullest rank, in processes that do nothing else."""
    _quietly()
    _tell(member, Begun(f"memory: {cell}, {member.ranks} ranks, {side}"))
    SIDES[side](cell.job(SHORT))
    peak = _largest(peak_bytes())
    row = _head(member, cell) | {"side": side, "peak_mib": f"{peak / 2**20:.1f}", "version": version(side)}
    _tell(member, Measured([row | machine()]))


def rounds(cell: Cell, sides: Mapping[str, Side], against: str, pace: Pace) -> Rounds:
    """All turns of some sides; raises ArithmeticError where they do not end with the same parameters."""
    order, trial = list(sides), cell.job(FEWEST)
    once = _largest(statistics.median(sides[against](trial).times))
    job = cell.job(max(FEWEST, min(MOST, int(pace.turn_s / once))))
    times: dict[str, list[float]] = {side: [] for side in sides}
    first: dict[str, Turn] = {}
    differences: dict[str, float] = {}
    for number in range(pace.pairs):
        for side in order if number % 2 == 0 else reversed(order):
            dist.barrier()
            turn = sides[side](job)
            times[side].append(_largest(statistics.median(turn.times)))
            first.setdefault(side, turn)
        if number == 0:
            differences = _differences(first, against)
            first = {side: turn._replace(state={}) for side, turn in first.items()}
    return Rounds(job.steps, times, first, differences)


def _differences(turns: Mapping[str, Turn], against: str) -> dict[str, float]:
    """How far each side that communicates has ended from the reference."""
    found = {}
    for side, turn in turns.items():
        if side == ALONE:
            continue
        found[side] = _largest(max(_distance(p, turn.state[n]) for n, p in turns[against].state.items()))
        if not found[side] <= TOLERANCE:
            raise ArithmeticError(
                f"{side} ended {found[side]:g} from {against} in some parameter, from the same A_0 and batches; "
                f"allowed: {TOLERANCE:g}"
            )
    return found


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def _row(member: Member, cell: Cell, side: str, found: Rounds) -> dict[str, Any]:
    figures = _head(member, cell) | {"side": side} | found.row(side, AGAINST)
    sent = _payload(side, found.first[side], parameters(cell.model), member.ranks)
    return figures | sent | {"version": version(side)} | machine()


def _payload(side: str, turn: Turn, elements: int, ranks: int) -> dict[str, Any]:
    """What all ranks send in a step, and who says so."""
    from paceline.engine.spmd.communicator import ring_bytes

    if turn.payload_bytes is not None:
        return {"payload_bytes": round(turn.payload_bytes), "payload_by": "its summary"}
    if side == ALONE:
        return {"payload_bytes": 0, "payload_by": "nothing is sent"}
    return {"payload_bytes": ranks * ring_bytes(4 * elements, ranks), "payload_by": "ring formula"}


def _divided_row(member: Member, cell: Cell, backend: str, found: Rounds) -> dict[str, Any]:
    whole, parts = found.row(WHOLE, WHOLE), found.row(DIVIDED, WHOLE)
    return {
        "elements": parameters(cell.model),
        "optimizer": cell.optimizer,
        "ranks": member.ranks,
        "backend": backend,
        "whole_ms": whole["step_ms"],
        "divided_ms": parts["step_ms"],
        **{name: parts[name] for name in ("ratio", "difference", "steps", "pairs")},
    } | machine()


def _head(member: Member, cell: Cell) -> dict[str, Any]:
    return {
        "model": cell.model,
        "parameters": parameters(cell.model),
        "ranks": member.ranks,
        "batch": cell.batch,
        "optimizer": cell.optimizer,
    }


def _ours(backend: str, words: str) -> Callable[[Job], Turn]:
    return lambda job: ours(f"distributed:{backend}", words, job)


def _quietly() -> None:
    warnings.simplefilter("ignore", FutureWarning)  # torch is renaming its collectives


def _tell(member: Member, word: Any) -> None:
    if member.rank == 0:
        member.tell(word)


def _largest(value: float) -> float:
    """Of all ranks."""
    word = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(word, dist.ReduceOp.MAX)
    return word.item()


def peak_bytes() -> int:
    """The most memory this process has had at once, shared pages in it: VmHWM of Linux."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))

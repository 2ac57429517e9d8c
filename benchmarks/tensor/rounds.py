"""Turns of all sides by turns, a few steps each, checked against each other before.

::

    check      5 steps of each side from A_0: all end with the parameters of one process
    round 1    steps of one process | DTensor | nothing sent | Paceline, forward passes of all       warms up
    round 2    the same in the other order

A side's time is the median of its turn on the slowest rank.
"""

import statistics
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import torch.distributed as dist
from kit.crew import Member
from kit.together import largest
from kit.turns import timed
from kit.work import Begun
from models import ROWS, Row
from ours import Step, Unsent, trained
from sides import ONE, OURS, THEIRS, UNSENT, One, Side, theirs
from torch import Tensor

CHECKED = 5
"""Steps after which parameters are compared."""

TOLERANCE = 1e-4
"""Parameters are about 0.1; float32 keeps 1e-8 of them at a step. Sums of a few hundred terms in two orders, carried
through several layers and steps, differ by some thousand times that; BatchNorm's divisions count most."""

MOVED = 1e-3
"""How far some parameter must have gone from A_0."""

MOST = 60
"""Steps of a turn that count."""


class Cell(NamedTuple):
    """One model, carried by one backend."""

    row: str
    backend: str

    def __str__(self) -> str:
        return f"{self.row}, {self.backend}"


class Pace(NamedTuple):
    """How often and for how long all are measured."""

    pairs: int
    turn_s: float


class Found(NamedTuple):
    """What all rounds of one cell gave."""

    steps: Mapping[str, list[float]]
    """Seconds of a step, of each round, by side."""
    forwards: Mapping[str, list[float]]
    """Seconds of a forward pass of one sample."""
    difference: float


class Rounds:
    """All of one cell, as one rank sees it.

    Args:
        member: this rank.
        cell: what is trained.
        pace: of the measurement.
    """

    def __init__(self, member: Member, cell: Cell, pace: Pace) -> None:
        self._member, self._cell, self._pairs = member, cell, pace.pairs
        self._row = ROWS[cell.row]
        self._count = _fitting(self._row, pace.turn_s)
        self._steps: dict[str, list[float]] = defaultdict(list)
        self._forwards: dict[str, list[float]] = defaultdict(list)

    def run(self) -> Found:
        """Go through them; raises ArithmeticError where sides don't end with the same parameters."""
        sides: dict[str, Side] = {ONE: One(self._row)}
        if (other := theirs(self._row)) is not None:
            sides[THEIRS] = other
        difference = self._checked(sides)
        sides[UNSENT] = Unsent(self._row)
        steps = (self._pairs + 1) * (self._count + 1)
        trained(self._row, self._cell.backend, steps, lambda step, forward: self._go(sides, step, forward))
        return Found(self._steps, self._forwards, difference)

    def _checked(self, sides: Mapping[str, Side]) -> float:
        for side in sides.values():
            for _ in range(CHECKED):
                side.step()
        states = {name: side.state() for name, side in sides.items()}
        run = trained(self._row, self._cell.backend, CHECKED, lambda step, _: [step() for _ in range(CHECKED)] and None)
        states[OURS] = {name: run.state[name] for name in states[ONE]}
        start = dict(self._row.built().named_parameters())
        if max(_apart(start[name].detach(), value) for name, value in states[ONE].items()) < MOVED:
            raise ArithmeticError(f"{self._cell}: no parameter has moved by {MOVED}")
        worst = 0.0
        for name, state in states.items():
            difference = max(_apart(value, states[ONE][each]) for each, value in state.items())
            if not difference <= TOLERANCE:
                raise ArithmeticError(
                    f"{self._cell}: {name} ended {difference:g} from one process; allowed: {TOLERANCE}"
                )
            worst = max(worst, difference)
        return worst

    def _go(self, sides: Mapping[str, Side], step: Step, forward: Step) -> None:
        steps = {name: side.step for name, side in sides.items()} | {OURS: step}
        forwards = {name: side.forward for name, side in sides.items()} | {OURS: forward}
        for number in range(self._pairs + 1):
            where = f"{self._cell}, {self._member.ranks} shards, round {number} of {self._pairs}"
            if self._member.rank == 0:
                self._member.tell(Begun(where))
            turns = [(self._steps, name, each) for name, each in steps.items()]
            turns += [(self._forwards, name, each) for name, each in forwards.items()]
            for table, name, each in turns if number % 2 == 0 else reversed(turns):
                dist.barrier()
                taken = [timed(each) for _ in range(self._count + 1)]
                seconds = largest(statistics.median(taken[1:]))
                if number:
                    table[name].append(seconds)


def _fitting(row: Row, turn_s: float) -> int:
    one = One(row)
    one.step()
    return max(1, min(MOST, int(turn_s / largest(timed(one.step)))))


def _apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())

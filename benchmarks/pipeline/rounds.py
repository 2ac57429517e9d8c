"""Turns of all sides of one schedule by turns, a few steps each, checked against each other before.

::

    check      5 steps of each side from A_0: all end with the parameters of one process
    round 1    turn of one process | torch | Paceline | stages alone     warms up, and is not counted
    round 2    stages alone | Paceline | torch | one process             a side's time: the median of its steps,
    round 3    one process | torch | ...                                 on the slowest rank

Processors that others use too change their pace within seconds; turns are short, so that all sides meet each pace.
"""

import functools
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import torch.distributed as dist
from alone import Alone, Measured, cores
from checks import STEPS, differences, moved
from ideal import ideal_s
from job import Job
from kit.crew import Member
from kit.together import gathered, largest, tell
from kit.turns import timed
from kit.work import Begun
from models import MICRO_BATCHES
from ours import Step, times, trained
from sides import BESIDE, ONE, OURS, One, Side, others

from paceline import schedule

MOST = 40
"""Steps of a turn that count."""


# Makes turns of what of Paceline takes part.
Loop: TypeAlias = Callable[[Mapping[str, Step]], None]


class Cell(NamedTuple):
    """One model under one schedule, carried by one backend."""

    size: str
    backend: str
    schedule: str

    def __str__(self) -> str:
        return f"{self.size}, {self.backend}, {self.schedule}"


class Pace(NamedTuple):
    """How often and for how long all are measured."""

    pairs: int
    turn_s: float
    """Of the steps that count, about."""


class Found(NamedTuple):
    """What all rounds of one cell gave."""

    steps: int
    """Of a turn."""
    times: Mapping[str, list[float]]
    """Seconds of a step, of each round, by side."""
    ideals: list[float]
    """The same of the ideal."""
    differences: Mapping[str, float]
    moved: float


class Rounds:
    """All of one cell, as one rank sees it.

    Args:
        member: this rank.
        cell: what is trained.
        pace: of the measurement.
    """

    def __init__(self, member: Member, cell: Cell, pace: Pace) -> None:
        self._member, self._cell, self._pairs = member, cell, pace.pairs
        self._order = schedule.parse(cell.schedule)
        self._job = Job(cell.size, MICRO_BATCHES, cell.backend)
        self._steps = _steps(self._job, pace.turn_s)
        self._ours = {OURS: f"schedule={cell.schedule}"}
        """What of Paceline takes part, by side."""
        if (beside := BESIDE.get(cell.schedule)) is not None:
            self._ours[f"{OURS}, {beside}"] = f"schedule={beside}"
        self._times: dict[str, list[float]] = defaultdict(list)
        self._ideals: list[float] = []

    def run(self) -> Found:
        """Go through them; raises ArithmeticError where sides don't end with the same parameters."""
        sides = others(self._cell.schedule, self._job)
        ends, way = self._checked(sides)
        steps, loop = (self._pairs + 1) * (self._steps + 1), functools.partial(self._go, sides)
        for name, words in reversed(self._ours.items()):
            loop = functools.partial(self._nested, name, words, steps, loop)
        loop({})
        for side in sides.values():
            side.close()
        return Found(self._steps, self._times, self._ideals, ends, way)

    def _checked(self, sides: Mapping[str, Side]) -> tuple[dict[str, float], float]:
        for side in sides.values():
            for _ in range(STEPS):
                side.step()
        states = {name: side.state() for name, side in sides.items()}
        for name, words in self._ours.items():
            states[name] = dict(trained(words, self._job, STEPS, times(STEPS)).state)
        return differences(states, ONE), moved(self._job, states[ONE])

    def _nested(self, name: str, words: str, steps: int, loop: Loop, inner: Mapping[str, Step]) -> None:
        """Go on within a run of ours, so that several take turns."""
        trained(words, self._job, steps, lambda step: loop({**inner, name: step}))

    def _go(self, sides: Mapping[str, Side], ours: Mapping[str, Step]) -> None:
        every = {name: side.step for name, side in sides.items()} | ours
        alone = Alone(self._job, self._order)
        for number in range(self._pairs + 1):
            self._say(number)
            turns: list[Callable[[], None]] = [self._turn(name, each, number > 0) for name, each in every.items()]
            turns.append(self._ideal(alone, number > 0))
            for turn in turns if number % 2 == 0 else reversed(turns):
                dist.barrier()
                turn()

    def _turn(self, name: str, step: Step, counts: bool) -> Callable[[], None]:
        def turn() -> None:
            taken = [timed(step) for _ in range(self._steps + 1)]
            seconds = largest(statistics.median(taken[1:]))
            if counts:
                self._times[name].append(seconds)

        return turn

    def _ideal(self, alone: Alone, counts: bool) -> Callable[[], None]:
        def turn() -> None:
            each: list[Measured] = gathered(alone.measure(self._steps))
            found = {number: part for process in each for number, part in process.parts.items()}
            parts, updates = [found[number] for number in sorted(found)], [process.update for process in each]
            if counts:
                self._ideals.append(ideal_s(self._order, parts, updates, MICRO_BATCHES, cores()))

        return turn

    def _say(self, number: int) -> None:
        """Also that this crew is alive."""
        where = f"{self._cell}, {self._member.ranks} stages"
        tell(self._member, Begun(f"{where}, round {number} of {self._pairs}"))


def _steps(job: Job, turn_s: float) -> int:
    """Of a turn that count: as many as go into its time."""
    one = One(job)
    one.step()
    step_s = largest(timed(one.step)) / min(dist.get_world_size(), cores())
    return max(1, min(MOST, int(turn_s / step_s)))

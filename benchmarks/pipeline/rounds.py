"""Turns of all sides by turns, checked against each other.

::

    one process    a few steps: how many fit into a turn
    half of all    turn                   turn turn ...   a side's time: the median of its steps on the slowest rank
    stages alone        turn         turn                 what the ideals of the same round are made of
    the others               turn turn                    after the first: all end with the parameters of one process
"""

import functools
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist
from alone import Alone, alone, cores
from checks import differences, moved
from ideal import ideal_s
from job import Job, Turn
from kit.crew import Member
from kit.work import Begun
from models import MICRO_BATCHES
from sides import INSIDE, ONE, OURS, THEIRS, Side, one, ours, theirs
from together import gathered, largest, tell

from paceline import schedule

FEWEST, MOST = 3, 40
"""Steps of a turn that count."""

Name = tuple[str, str]
"""(side, schedule)."""

REFERENCE: Name = (ONE, "")


class Cell(NamedTuple):
    """One model, carried by one backend."""

    size: str
    backend: str

    def __str__(self) -> str:
        return f"{self.size}, {self.backend}"


class Pace(NamedTuple):
    """How often and for how long all are measured."""

    pairs: int
    turn_s: float
    """Of the steps that count, about."""


class Found(NamedTuple):
    """What all rounds of one cell gave."""

    job: Job
    times: dict[Name, list[float]]
    """Seconds of a step, of each round."""
    ideals: dict[str, list[float]]
    """The same of the ideal, by schedule."""
    differences: dict[Name, float]
    moved: float


class Rounds:
    """All of one cell, as one rank sees it.

    Args:
        member: this rank.
        cell: what is trained.
        schedules: of the sides.
        pace: of the measurement.
    """

    def __init__(self, member: Member, cell: Cell, schedules: Sequence[str], pace: Pace) -> None:
        self._member, self._cell, self._schedules, self._pairs = member, cell, schedules, pace.pairs
        self._sides = {REFERENCE: one} | sides(schedules)
        self._job = _job(cell, pace)

    def run(self) -> Found:
        """Go through them; raises ArithmeticError where sides don't end with the same parameters."""
        times: dict[Name, list[float]] = {name: [] for name in self._sides}
        ideals: dict[str, list[float]] = {name: [] for name in self._schedules}
        ends, way = dict[Name, float](), 0.0
        for number in range(self._pairs):
            turns, ideal = self._round(number)
            for name, turn in turns.items():
                times[name].append(largest(statistics.median(turn.times)))
            for planned, seconds in ideal.items():
                ideals[planned].append(seconds)
            if number == 0:
                ends, way = differences(turns, REFERENCE), moved(self._job, turns[REFERENCE])
        return Found(self._job, times, ideals, ends, way)

    def _round(self, number: int) -> tuple[dict[Name, Turn], dict[str, float]]:
        """The turn of each side, and the ideal of each schedule from turns between."""
        order = list(self._sides) if number % 2 == 0 else list(reversed(self._sides))
        half = len(order) // 2
        turns = {name: self._turn(number, name) for name in order[:half]}
        self._say(number, "stages alone")
        ideal = ideals(self._job, self._schedules)
        return turns | {name: self._turn(number, name) for name in order[half:]}, ideal

    def _turn(self, number: int, name: Name) -> Turn:
        self._say(number, " ".join(name).strip())
        dist.barrier()
        return self._sides[name](self._job)

    def _say(self, number: int, who: str) -> None:
        """Also that this crew is alive."""
        where = f"{self._cell}, {self._member.ranks} stages"
        tell(self._member, Begun(f"{where}, round {number + 1} of {self._pairs}: {who}"))


def sides(schedules: Sequence[str]) -> dict[Name, Side]:
    """Those of some schedules, each beside what it is compared with."""
    mine: dict[Name, Side] = {(OURS, name): functools.partial(ours, name) for name in schedules}
    others: dict[Name, Side] = {(THEIRS, name): functools.partial(theirs, name) for name in schedules if name in INSIDE}
    every = mine | others
    return {name: every[name] for name in sorted(every, key=lambda name: (schedules.index(name[1]), name[0]))}


def ideals(job: Job, schedules: Sequence[str]) -> dict[str, float]:
    """Of each schedule, from one turn of the stages alone for each way to cut the model."""
    ranks, turns, found = dist.get_world_size(), dict[int, list[Alone]](), {}
    for name in schedules:
        order = schedule.parse(name)
        count = order.parts(ranks)
        if count not in turns:
            turns[count] = gathered(alone(job, count))
        each = turns[count]
        parts = [each[order.worker_of(part, ranks)].parts[part] for part in range(count)]
        found[name] = ideal_s(order, parts, [process.update for process in each], job.micro_batches, cores())
    return found


def _job(cell: Cell, pace: Pace) -> Job:
    trial = Job(cell.size, FEWEST, MICRO_BATCHES, cell.backend)
    step_s = largest(statistics.median(one(trial).times)) / min(dist.get_world_size(), cores())
    return trial._replace(steps=max(FEWEST, min(MOST, int(pace.turn_s / step_s))))

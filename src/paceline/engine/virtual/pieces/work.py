"""What a crew is told to measure, and what each of it finds."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.core.types import Seconds
from paceline.engine.base import Job
from paceline.engine.setup import Setup
from paceline.engine.team.crew import Answering
from paceline.engine.team.leisure import excused
from paceline.engine.team.team import Team
from paceline.engine.virtual.pieces.computing import Found, plain, sharded
from paceline.engine.virtual.pieces.sending import Message, collectives, message
from paceline.engine.virtual.pieces.silent import Call
from paceline.engine.virtual.pieces.staged import staged

WORD = "word"
"""A question that takes no work to answer."""


@dataclass(frozen=True)
class Heard:
    """From one rank."""

    found: Found
    collectives: Mapping[Call, Seconds]
    messages: Mapping[int, Message]
    """By bytes."""


@dataclass(frozen=True)
class Work:
    """To measure the pieces of a job's step."""

    job: Job

    @property
    def timeout_s(self) -> Seconds:
        """Bound on every wait of one rank for another."""
        return self.job.timeout_s

    def begin(self, team: Team) -> Answering:
        """One rank's."""
        return lambda question: None if question == WORD else self._heard(team)

    def _heard(self, team: Team) -> Heard:
        strategy = self.job.strategy
        measure: Any = staged if strategy.pipelined else sharded if strategy.tensor_parallel else plain
        with excused(team):
            found: Found = measure(Setup.of(self.job), team)
            every = team.gather(found, "what was measured")
            calls = {call: None for each in every for call in _calls(each)}
            sizes = sorted({size for each in every for sent in each.sent_bytes.values() for size in sent})
            return Heard(found, collectives(team, calls) if calls else {}, {n: message(team, n) for n in sizes})


def _calls(found: Found) -> list[Call]:
    return [*found.calls, *found.last_calls, *(call for each in found.stage_calls.values() for call in each)]

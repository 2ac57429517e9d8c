"""Who sends what to whom, and in which order: each worker derives it from the schedule, so nobody has to be told.

All messages of a mini-batch stand in one line, that of an ideal run. Each worker sends, and expects, in this order::

    rank         0         1         2         3         4
    message   a0: 0>1   a0: 1>2   a1: 0>1   g0: 2>1   a1: 1>2   ...      a: a value, g: the gradient of one

Before a worker waits, for a message or for one of its own to be taken, it expects all that stand before that one in the
line. So nobody waits in a circle, even where to send is to wait: take the first message that has not arrived. Its
sender waits for nothing else, since whatever it needs stands before it; and its receiver, if it waits, expects it.

A stream of micro-batches that go on from mini-batch to mini-batch has such a line without an end, of which each worker
derives no more than it has come to.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from paceline.core.mesh import StageReplicas
from paceline.replica.pipeline.base import Crossing, Cut
from paceline.schedule.base import LETTERS, Action, Schedule
from paceline.schedule.simulate import StageTimes, by_end, timeline

Slot: TypeAlias = tuple[str, int, int, bool]
"""(crossing, consumer, micro-batch, whether it is the gradient): one message."""

ENDLESS = sys.maxsize
"""More micro-batches than any stream has."""


@dataclass(frozen=True, slots=True)
class Message:
    """A value on its way from the part that makes it to one that needs it, or its gradient on the way back."""

    rank: int
    """Its place in the line."""
    name: str
    """Of the crossing."""
    source: int
    """The part that makes the value."""
    consumer: int
    """The part that needs it."""
    micro_batch: int
    gradient: bool
    sender: int
    """A worker."""
    receiver: int
    """A worker, maybe the same one: then nothing is sent."""

    @property
    def between(self) -> tuple[int, int]:
        """Which workers share the value: its maker, and who needs it."""
        return (self.receiver, self.sender) if self.gradient else (self.sender, self.receiver)

    @property
    def what(self) -> str:
        """In words that follow "waited for"."""
        back = self.gradient
        here, there = (self.consumer, self.source) if back else (self.source, self.consumer)
        kind, letter = ("the gradient of ", LETTERS["backward"]) if back else ("", LETTERS["forward"])
        return (
            f"{kind}{self.name} of micro-batch {self.micro_batch}, from stage {here} for stage {there} "
            f"({there}{letter}{self.micro_batch})"
        )


class ScheduledAction(NamedTuple):
    """An action of one worker, what it waits for and what it gives."""

    action: Action
    needs: tuple[Message, ...]
    """Of a forward pass, values in the order of the crossings; of a backward pass, gradients, and of one crossing those
    of its consumers, ascending."""
    gives: tuple[Message, ...]
    """By rank."""


class Leg(NamedTuple):
    """A part of a worker's way: up to and with its next action."""

    task: ScheduledAction
    incoming: tuple[Message, ...]
    """What other workers send it before that, by rank."""


@dataclass(frozen=True)
class WorkerProgram:
    """One worker's way through a mini-batch."""

    tasks: tuple[ScheduledAction, ...]
    incoming: tuple[Message, ...]
    """What other workers send it, by rank."""


@dataclass(frozen=True)
class CommPlan:
    """What all workers of a pipeline know: how the model is cut, and in which order they work.

    Its workers are its columns: where several take turns at a stage, each does its own micro-batches.
    """

    schedule: Schedule
    stages: int
    """p."""
    micro_batches: int
    crossings: tuple[Crossing, ...]
    tied: Mapping[str, tuple[int, ...]]
    """Parameter -> parts that hold it, where several do."""
    copies: tuple[int, ...] = ()
    """How many columns take turns at each stage; empty: one at each."""

    @classmethod
    def of(
        cls, cut: Cut, schedule: Schedule, stages: int, micro_batches: int, copies: tuple[int, ...] = ()
    ) -> "CommPlan":
        """That of a model which has been cut."""
        crossings = tuple(crossing for part in cut.parts for crossing in part.sent)
        return cls(schedule, stages, micro_batches, crossings, cut.tied, copies)

    @property
    def columns(self) -> StageReplicas:
        """The workers."""
        return StageReplicas(self.copies or (1,) * self.stages)

    @property
    def workers(self) -> int:
        """How many there are."""
        return len(self.columns)

    def stage_of(self, part: int) -> int:
        """Where a part is."""
        return self.schedule.worker_of(part, self.stages)

    def worker_of(self, part: int, micro_batch: int = 0) -> int:
        """Who does a micro-batch in a part."""
        return self.columns.of(self.stage_of(part), micro_batch)

    def itinerary(self, worker: int, micro_batches: int) -> WorkerProgram:
        """One worker's, for a mini-batch that is cut into as many, at most ``self.micro_batches``."""
        legs = list(self._legs(worker, self._line(self.micro_batches, micro_batches)))
        return WorkerProgram(tuple(leg.task for leg in legs), tuple(m for leg in legs for m in leg.incoming))

    def stream(self, worker: int) -> Iterator[Leg]:
        """One worker's way through a stream without an end; what is derived of it is what has been taken."""
        return self._legs(worker, self._line(ENDLESS, ENDLESS))

    def _legs(self, worker: int, line: Iterable[tuple[int, Action, tuple[Message, ...]]]) -> Iterator[Leg]:
        there, incoming = dict[Slot, Message](), list[Message]()
        for actor, action, gives in line:
            if actor == worker:
                needs = tuple(there.pop(slot) for slot in self._needs(action))
                yield Leg(ScheduledAction(action, needs, gives), tuple(incoming))
                incoming = []
            mine = [message for message in gives if message.receiver == worker]
            there.update(((m.name, m.consumer, m.micro_batch, m.gradient), m) for m in mine)
            incoming += [message for message in mine if actor != worker]

    def _line(self, planned: int, micro_batches: int) -> Iterator[tuple[int, Action, tuple[Message, ...]]]:
        """All workers' actions in the order of an ideal run; the messages that each gives, in the order of the line.

        Of so many micro-batches as are planned only the first are there.
        """
        columns = self.columns
        times = StageTimes.balanced(self.schedule, self.stages, columns)
        rank = 0
        for each in by_end(timeline(self.schedule, times, self.stages, planned, columns), self.workers):
            if each.action.micro_batch < micro_batches:
                gives = tuple(self._gives(each.action, rank))
                rank += len(gives)
                yield each.worker, each.action, gives

    def _gives(self, action: Action, rank: int) -> Iterator[Message]:
        i = action.micro_batch
        here = self.worker_of(action.stage, i)
        for place, (crossing, consumer, back) in enumerate(self._handed_on(action), rank):
            there = self.worker_of(crossing.source if back else consumer, i)
            yield Message(place, crossing.name, crossing.source, consumer, i, back, here, there)

    def _handed_on(self, action: Action) -> Iterator[tuple[Crossing, int, bool]]:
        if action.kind == "forward":
            yield from ((c, consumer, False) for c in self.sent(action.stage) for consumer in c.consumers)
        elif action.kind in ("backward", "backward_input"):
            yield from ((c, action.stage, True) for c in reversed(self.received(action.stage)))

    def _needs(self, action: Action) -> Iterator[Slot]:
        part, i = action.stage, action.micro_batch
        if action.kind == "forward":
            yield from ((c.name, part, i, False) for c in self.received(part))
        elif action.kind in ("backward", "backward_input"):
            yield from ((c.name, consumer, i, True) for c in self.sent(part) for consumer in c.consumers)

    def sent(self, part: int) -> Sequence[Crossing]:
        """What a part makes for others."""
        return [c for c in self.crossings if c.source == part]

    def received(self, part: int) -> Sequence[Crossing]:
        """What a part needs of others."""
        return [c for c in self.crossings if part in c.consumers]

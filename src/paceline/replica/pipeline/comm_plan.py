"""The communication plan of a pipeline: the order of all messages, which each worker derives from the schedule.

All messages of a mini-batch are ordered by rank, as an ideal run would send them. Each worker sends, and posts its
receives, in this order::

    rank         0         1         2         3         4
    message   a0: 0>1   a0: 1>2   a1: 0>1   g0: 2>1   a1: 1>2   ...      a: a value, g: the gradient of one

Before a worker waits, for a message or for one of its own to be received, it posts the receives of all messages of
lower rank. So no workers wait in a circle, even where a send blocks until it is received: take the message of lowest
rank that has not arrived. Its sender waits for nothing else, since whatever it needs has a lower rank; and its
receiver, if it waits, has posted the receive.

A stream of micro-batches that goes on from mini-batch to mini-batch has such an order without an end, of which each
worker derives no more than it has come to.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from paceline.core.mesh import StageReplicas
from paceline.replica.pipeline.base import Crossing, Cut
from paceline.replica.pipeline.p2p_queue import P2PMessage
from paceline.schedule.base import Action, Schedule
from paceline.schedule.simulate import StageTimes, by_end, timeline

MessageKey: TypeAlias = tuple[str, int, int, bool]
"""(crossing, consumer, micro-batch, whether it is the gradient): one message."""

ENDLESS = sys.maxsize
"""More micro-batches than any stream has."""


class ScheduledAction(NamedTuple):
    """An action of one worker with the messages that it needs and sends."""

    action: Action
    receives: tuple[P2PMessage, ...]
    """Values for a forward pass, in the order of the crossings; gradients for a backward pass, and those of one
    crossing by ascending consumer."""
    sends: tuple[P2PMessage, ...]
    """By rank."""


class StreamStep(NamedTuple):
    """A worker's next action in a stream."""

    action: ScheduledAction
    incoming: tuple[P2PMessage, ...]
    """Messages that other workers send it since the action before, by rank."""


@dataclass(frozen=True)
class WorkerProgram:
    """All actions of one worker for a mini-batch."""

    actions: tuple[ScheduledAction, ...]
    incoming: tuple[P2PMessage, ...]
    """Messages that other workers send it, by rank."""


@dataclass(frozen=True)
class CommPlan:
    """The cut, the schedule and the workers of a pipeline: all that the order of messages depends on."""

    schedule: Schedule
    stages: int
    """p."""
    micro_batches: int
    crossings: tuple[Crossing, ...]
    tied: Mapping[str, tuple[int, ...]]
    """Parameter -> parts that hold it, where several do."""
    copies: tuple[int, ...] = ()
    """How many replicas each stage has; empty: one each."""

    @classmethod
    def of(
        cls, cut: Cut, schedule: Schedule, stages: int, micro_batches: int, copies: tuple[int, ...] = ()
    ) -> "CommPlan":
        """Return the plan of a model that has been cut."""
        crossings = tuple(crossing for part in cut.parts for crossing in part.sent)
        return cls(schedule, stages, micro_batches, crossings, cut.tied, copies)

    @property
    def columns(self) -> StageReplicas:
        """The workers: each replica of each stage is one."""
        return StageReplicas(self.copies or (1,) * self.stages)

    @property
    def workers(self) -> int:
        """How many workers there are."""
        return len(self.columns)

    def stage_of(self, part: int) -> int:
        """Return the stage that runs a part."""
        return self.schedule.worker_of(part, self.stages)

    def worker_of(self, part: int, micro_batch: int = 0) -> int:
        """Return the worker that runs a part of a micro-batch."""
        return self.columns.processing(self.stage_of(part), micro_batch)

    def worker_program(self, worker: int, micro_batches: int) -> WorkerProgram:
        """Return a worker's actions for a mini-batch that is cut into ``micro_batches``, at most those planned."""
        steps = list(self._steps(worker, self._all_actions(self.micro_batches, micro_batches)))
        return WorkerProgram(tuple(step.action for step in steps), tuple(m for step in steps for m in step.incoming))

    def stream(self, worker: int) -> Iterator[StreamStep]:
        """Yield a worker's actions in a stream without an end; no more is derived than is taken."""
        return self._steps(worker, self._all_actions(ENDLESS, ENDLESS))

    def sent(self, part: int) -> Sequence[Crossing]:
        """Return the values that a part computes for others."""
        return [c for c in self.crossings if c.source == part]

    def received(self, part: int) -> Sequence[Crossing]:
        """Return the values that a part reads of others."""
        return [c for c in self.crossings if part in c.consumers]

    def _steps(
        self, worker: int, actions: Iterable[tuple[int, Action, tuple[P2PMessage, ...]]]
    ) -> Iterator[StreamStep]:
        pending, incoming = dict[MessageKey, P2PMessage](), list[P2PMessage]()
        for actor, action, sends in actions:
            if actor == worker:
                receives = tuple(pending.pop(key) for key in self._receives(action))
                yield StreamStep(ScheduledAction(action, receives, sends), tuple(incoming))
                incoming = []
            own = [message for message in sends if message.receiver == worker]
            pending.update(((m.name, m.consumer, m.micro_batch, m.gradient), m) for m in own)
            incoming += [message for message in own if actor != worker]

    def _all_actions(self, planned: int, micro_batches: int) -> Iterator[tuple[int, Action, tuple[P2PMessage, ...]]]:
        """Yield (worker, action, messages sent) in the order of an ideal run.

        The run is that of all ``planned`` micro-batches; the actions of those beyond ``micro_batches`` are left out.
        """
        columns = self.columns
        times = StageTimes.balanced(self.schedule, self.stages, columns)
        rank = 0
        for span in by_end(timeline(self.schedule, times, self.stages, planned, columns), self.workers):
            if span.action.micro_batch < micro_batches:
                sends = tuple(self._sends(span.action, rank))
                rank += len(sends)
                yield span.worker, span.action, sends

    def _sends(self, action: Action, rank: int) -> Iterator[P2PMessage]:
        part, i = action.stage, action.micro_batch
        sender = self.worker_of(part, i)
        if action.kind == "forward":
            crossings = [(c, consumer, consumer) for c in self.sent(part) for consumer in c.consumers]
        elif action.kind in ("backward", "backward_input"):
            # Backward reaches the values that were received last first.
            crossings = [(c, part, c.source) for c in reversed(self.received(part))]
        else:
            crossings = []
        back = action.kind != "forward"
        for place, (crossing, consumer, destination) in enumerate(crossings, rank):
            receiver = self.worker_of(destination, i)
            yield P2PMessage(place, crossing.name, crossing.source, consumer, i, back, sender, receiver)

    def _receives(self, action: Action) -> Iterator[MessageKey]:
        part, i = action.stage, action.micro_batch
        if action.kind == "forward":
            yield from ((c.name, part, i, False) for c in self.received(part))
        elif action.kind in ("backward", "backward_input"):
            yield from ((c.name, consumer, i, True) for c in self.sent(part) for consumer in c.consumers)

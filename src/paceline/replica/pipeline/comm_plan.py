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

A :class:`PipelineContext` has the plan and all else that one worker is made of.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from paceline.core.mesh import StageReplicas
from paceline.core.types import ReplicaId
from paceline.program import Program
from paceline.replica.autograd import NO_RECORDER
from paceline.replica.capture.capture import Captured
from paceline.replica.compilation import CompiledPart
from paceline.replica.flat_state import FlatLayout
from paceline.replica.pipeline.cut import Crossing, Cut, Part
from paceline.replica.pipeline.p2p_queue import P2P, P2PMessage, StageReplicaGroup
from paceline.schedule.base import Action, Schedule
from paceline.schedule.simulate import StageTimes, by_end, timeline
from paceline.trace.recorder import AnyRecorder

# (crossing, consumer, micro-batch, whether it is the gradient): one message.
MessageKey: TypeAlias = tuple[str, int, int, bool]

# More micro-batches than any stream has.
ENDLESS = sys.maxsize


class ScheduledAction(NamedTuple):
    """An action of one worker with the messages that it needs and sends.

    Args:
        receives: values for a forward pass, in the order of the crossings; gradients for a backward pass, and those of
            one crossing by ascending consumer.
        sends: messages, by rank.
        incoming: messages that other workers send this one since its action before, by rank.
    """

    action: Action
    receives: tuple[P2PMessage, ...]
    sends: tuple[P2PMessage, ...]
    incoming: tuple[P2PMessage, ...]


@dataclass(frozen=True)
class WorkerProgram:
    """All actions of one worker for a mini-batch.

    Args:
        incoming: messages that other workers send it, by rank.
    """

    actions: tuple[ScheduledAction, ...]
    incoming: tuple[P2PMessage, ...]


@dataclass(frozen=True)
class CommPlan:
    """The cut, the schedule and the workers of a pipeline: all that the order of messages depends on.

    Args:
        stage_replicas: the workers: each replica of each of the p stages is one.
        tied: parameter -> parts that hold it, where several do.
    """

    schedule: Schedule
    stage_replicas: StageReplicas
    micro_batches: int
    crossings: tuple[Crossing, ...]
    tied: Mapping[str, tuple[int, ...]]
    _programs: dict[tuple[int, int], WorkerProgram] = field(default_factory=dict, init=False, compare=False, repr=False)

    @classmethod
    def of(cls, cut: Cut, schedule: Schedule, stage_replicas: StageReplicas, micro_batches: int) -> "CommPlan":
        """Return the plan of a model that has been cut."""
        crossings = tuple(crossing for part in cut.parts for crossing in part.sent)
        return cls(schedule, stage_replicas, micro_batches, crossings, cut.tied)

    def stage_of(self, part: int) -> int:
        """Return the stage that runs a part."""
        return self.schedule.worker_of(part, len(self.stage_replicas.copies))

    def worker_program(self, worker: int, micro_batches: int) -> WorkerProgram:
        """Return a worker's actions for a mini-batch that is cut into ``micro_batches``, at most those planned."""
        key = worker, micro_batches
        if key not in self._programs:
            actions = tuple(self.actions(worker, self.micro_batches, micro_batches))
            self._programs[key] = WorkerProgram(actions, tuple(m for task in actions for m in task.incoming))
        return self._programs[key]

    def actions(self, worker: int, planned: int = ENDLESS, micro_batches: int = ENDLESS) -> Iterator[ScheduledAction]:
        """Yield a worker's actions, in the order of an ideal run of all workers; no more is derived than is taken.

        The run is that of all ``planned`` micro-batches; the actions of those beyond ``micro_batches`` are left out.
        """
        replicas = self.stage_replicas
        times = StageTimes.balanced(self.schedule, len(replicas.copies), replicas)
        spans = timeline(self.schedule, times, len(replicas.copies), planned, replicas)
        pending, incoming, rank = dict[MessageKey, P2PMessage](), list[P2PMessage](), 0
        for span in by_end(spans, len(replicas)):
            action, i, gradient = span.action, span.action.micro_batch, span.action.kind != "forward"
            if i >= micro_batches:
                continue
            sends: list[P2PMessage] = []
            for crossing, consumer in self._crossings(action, receives=False):
                receiver = replicas.processing(self.stage_of(crossing.source if gradient else consumer), i)
                name, source = crossing.name, crossing.source
                sends.append(P2PMessage(rank, name, source, consumer, i, gradient, span.worker, receiver))
                rank += 1
            if span.worker == worker:
                needed = self._crossings(action, receives=True)
                receives = tuple(pending.pop((c.name, consumer, i, gradient)) for c, consumer in needed)
                yield ScheduledAction(action, receives, tuple(sends), tuple(incoming))
                incoming = []
            own = [message for message in sends if message.receiver == worker]
            pending.update(((m.name, m.consumer, i, gradient), m) for m in own)
            incoming += [message for message in own if span.worker != worker]

    def _crossings(self, action: Action, *, receives: bool) -> list[tuple[Crossing, int]]:
        """Return (crossing, consumer) of the messages that an action receives, else of those that it sends."""
        if action.kind not in ("forward", "backward", "backward_input"):
            return []
        part = action.stage
        if receives == (action.kind == "forward"):
            inputs = [(each, part) for each in self.crossings if part in each.consumers]
            # Backward reaches the values that were received last first.
            return inputs if receives else inputs[::-1]
        return [(each, consumer) for each in self.crossings if each.source == part for consumer in each.consumers]


Recompute: TypeAlias = Literal["none", "boundaries", "all"]
BatchNormMode: TypeAlias = Literal["micro-batch", "mini-batch"]


@dataclass(frozen=True)
class PipelineContext:
    """Everything that one worker of a pipeline is made of.

    Args:
        program: gives seed, precision, loss and, where the weights move in the pipeline, the optimizer.
        plan: the same on all workers of the replica.
        captured: the model that the parts were cut from; only its output's form is used.
        parts: those of this worker, ascending. Their modules are changed in place.
        layout: of the tensors of this worker's parts.
        worker: this worker's number in the replica.
        replica: the replica of the model.
        device: where the parts run, as torch writes it.
        p2p: sends to and receives from the other workers of the replica; None: there are none.
        recorder: of this worker's spans.
        recompute: "none" keeps all that backward needs. "boundaries" keeps the inputs of a part, and runs its forward
            again before its backward: least is kept between the two. "all" cuts a part into √n pieces, keeps the inputs
            of each, and runs their forward passes again one by one during backward: more is kept between, but never all
            of a part at once. The same random numbers are drawn again; running buffers move once. Where a backward
            follows at once upon its forward, "boundaries" recomputes nothing.
        batchnorm: whether running statistics move with each micro-batch, or once, by those of the whole mini-batch.
        stage_replicas: the replicas of this worker's stage; None: it is the only one.
        compiled: number of a part -> its compiled forward, in place of its module's.
    """

    program: Program
    plan: CommPlan
    captured: Captured
    parts: Sequence[Part]
    layout: FlatLayout
    worker: int
    replica: ReplicaId = 0
    device: str = "cpu"
    p2p: P2P | None = None
    recorder: AnyRecorder = NO_RECORDER
    recompute: Recompute = "none"
    batchnorm: BatchNormMode = "micro-batch"
    stage_replicas: StageReplicaGroup | None = None
    compiled: Mapping[int, CompiledPart] = field(default_factory=dict[int, CompiledPart])

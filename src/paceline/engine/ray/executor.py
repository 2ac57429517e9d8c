"""Executes the coordinator's decisions on Ray: updates A, discards Δs, answers replicas.

An update writes its A into new vectors: those that were sent, or handed in for evaluation, are never written again,
since the object store and other actors read them without a copy.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from paceline.aggregation.base import Apply, Arrival
from paceline.checkpoint.base import TensorChunk
from paceline.core.data_order import BatchRange
from paceline.core.types import Clock, ReplicaId, Seconds, Version
from paceline.engine.ray.messages import CONTROL, END, RayGrant, Reply, arrays_of
from paceline.engine.run_context import RunContext, first_state
from paceline.engine.run_state import delta_chunks
from paceline.engine.server_optimizer import DeltaStatistics, ServerOptimizer
from paceline.engine.worker_metrics import Figures, SpanLog
from paceline.replica.flat_state import FlatState
from paceline.trace.spans import SERVER


class ReplicaRecord:
    """Grants, figures and pending reply of one replica; several actors in a row may be that replica.

    Args:
        run: number of the run.
        actor: of the replica; None: it has not been started.
        attempt: the newest before the run was resumed; 0: the run begins.
    """

    def __init__(self, run: int, actor: Any, attempt: Clock) -> None:
        self._run, self.actor = run, actor
        self.attempt, self.micro_steps = attempt, 0
        """The newest grant, and the micro-steps of all grants since the run began or was resumed."""
        self.ready = self.finished = self.dead = False
        """Whether its model is built; its loop has ended; it has died, and no other actor has replaced it."""
        self.excused_s: Seconds = 0.0
        """End of its last announced delay."""
        self.figures = self._before = Figures(0, 0, 0, 0)
        """Figures of all actors that were this replica, and of those before the present one."""
        self.step_times: Sequence[Seconds] = ()
        self._waiting: asyncio.Future[Reply] | None = None
        self._early: Reply | None = None
        """The reply to its next call, where it has not called yet."""

    def wait(self) -> asyncio.Future[Reply]:
        """Return a future of the reply to this call of the replica."""
        self._waiting = asyncio.get_running_loop().create_future()
        early, self._early = self._early, None
        if early is not None:
            self.reply(early)
        return self._waiting

    def reply(self, reply: Reply) -> None:
        """Answer the replica's call, or its next one."""
        if self._waiting is None or self._waiting.done():
            self._early = reply
        else:
            self._waiting.set_result(reply)

    def measured(self, figures: Figures) -> None:
        """Add the figures so far of the present actor to those of the actors before it."""
        steps, busy_ns, payload_bytes, peak = self._before
        self.figures = Figures(
            steps + figures.steps,
            busy_ns + figures.busy_ns,
            payload_bytes + figures.payload_bytes,
            max(peak, figures.peak_memory_bytes),
        )

    def cancel(self, attempt: float) -> None:
        """Have the replica stop an attempt; infinity ends its training."""
        if self.actor is not None:
            self.actor.cancel.options(concurrency_group=CONTROL).remote(self._run, attempt)

    def lost(self) -> None:
        """Note that the actor has died; another one may continue where it stopped."""
        self._before = self.figures
        self._waiting = self._early = None
        self.ready, self.dead, self.excused_s = False, True, 0.0


class RayExecutor:
    """Holds A and the undecided Δs of a run, and executes its coordinator's decisions.

    Args:
        context: of the run.
        replicas: records of its replicas.
    """

    def __init__(self, context: RunContext, replicas: Sequence[ReplicaRecord]) -> None:
        self._replicas = replicas
        resume = context.job.resume
        self._version: Version = 0 if resume is None else resume.run.coordinator.version
        _, state = first_state(context.job.program, context.job.running_buffers)
        self.owner = ServerOptimizer(context.job.program, context.policy, state)
        """A and its optimizer; the vectors of an A are never written again."""
        self.statistics = DeltaStatistics(context.policy, self.owner)
        self.undecided: dict[tuple[ReplicaId, Clock], FlatState] = {}
        """Δs that were neither applied nor discarded."""
        if resume is not None:
            self.owner.restore(resume)
            for name in resume.deltas() if context.keeps_policy else []:
                self.undecided[name] = delta = state.layout.new()
                resume.checkpoint.read_into(delta_chunks(delta, *name))
        self.spans = SpanLog(context.job.trace, SERVER)
        """Of the updates."""

    def chunks(self) -> list[TensorChunk]:
        """Return A, its optimizer's state, and the Δs that the policy holds."""
        held = [chunk for name, delta in self.undecided.items() for chunk in delta_chunks(delta, *name)]
        return [*self.owner.chunks(), *held]

    def send(self, replica: ReplicaId, batches: BatchRange) -> None:
        record = self._replicas[replica]
        record.attempt += 1
        record.micro_steps += batches.size
        record.reply((RayGrant(record.attempt, batches, self._version), arrays_of(self.owner.state)))

    def apply(self, action: Apply) -> None:
        began = time.monotonic_ns()
        deltas = [(self.undecided.pop((a.replica, a.clock)), weight) for a, weight in action.deltas]
        self.owner.apply(deltas, action.rate, alone=action.alone, out=self.owner.state.layout.new())
        self._version += 1
        ended = time.monotonic_ns()
        self.statistics.applied((ended - began) * 1e-9)
        self.spans.recorder.record("apply", self._version, began, ended)

    def discard(self, arrivals: tuple[Arrival, ...]) -> None:
        for arrival in arrivals:
            del self.undecided[arrival.replica, arrival.clock]

    def cancel(self, replica: ReplicaId) -> None:
        self._replicas[replica].cancel(self._replicas[replica].attempt)

    def dismiss(self, replica: ReplicaId) -> None:
        self._replicas[replica].reply(END)

"""Executes the coordinator's decisions on Ray: updates A, discards Δs, answers replicas.

An update writes its A into new vectors: those that were sent, or handed in for evaluation, are never written again,
since the object store and other actors read them without a copy.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

from paceline.aggregation.base import Apply, Arrival
from paceline.core.mesh import Coordinate
from paceline.core.records import WorkerFigures
from paceline.core.types import Clock, ReplicaId, Seconds, Version
from paceline.engine.ray.messages import END, Bytes, RayGrant, Reply, arrays_of, state_of
from paceline.engine.run_context import RunContext, first_state
from paceline.engine.server_optimizer import DeltaStatistics, ServerOptimizer
from paceline.engine.worker_metrics import Figures, SpanLog, worker_figures
from paceline.replica.flat_state import FlatState
from paceline.trace.spans import SERVER


class ReplicaRecord:
    """Grants, figures and pending reply of one replica; several actors in a row may be that replica."""

    def __init__(self) -> None:
        self.attempt = self.micro_steps = 0
        """The newest grant, and the micro-steps of all grants."""
        self.ready = self.finished = self.dead = False
        """Whether its model is built; its loop has ended; it has died, and no other actor has replaced it."""
        self.excused_s: Seconds = 0.0
        """End of its last announced delay."""
        self.figures = Figures(0, 0, 0, 0)
        self.step_times: Sequence[Seconds] = ()
        self._before = Figures(0, 0, 0, 0)
        """Of the actors before this one."""
        self._waiting: asyncio.Future[Reply] | None = None
        self._early: Reply | None = None
        """The reply to its next call, where it has not called yet."""

    def wait(self) -> asyncio.Future[Reply]:
        """Return a future of the reply to this call of the replica."""
        self._waiting = asyncio.get_running_loop().create_future()
        early, self._early = self._early, None
        if early is not None:
            self._reply(early)
        return self._waiting

    def send(self, grant: RayGrant, arrays: list[Bytes]) -> None:
        """Reply with a grant and its A."""
        self.attempt = grant.attempt
        self.micro_steps += grant.micro_steps
        self._reply((grant, arrays))

    def dismiss(self) -> None:
        """Reply that training has ended."""
        self._reply(END)

    def lost(self) -> None:
        """Note that the actor has died; another one may continue where it stopped."""
        self._before, self.figures = _sum(self._before, self.figures), Figures(0, 0, 0, 0)
        self._waiting = self._early = None
        self.ready, self.dead, self.excused_s = False, True, 0.0

    def figures_at(self, replica: ReplicaId, parameter_bytes: int, seconds: Seconds) -> WorkerFigures:
        """Return the figures of all actors that were this replica."""
        figures = _sum(self._before, self.figures)
        return worker_figures(Coordinate(replica), figures, self.step_times, parameter_bytes, seconds)

    def _reply(self, reply: Reply) -> None:
        if self._waiting is None or self._waiting.done():
            self._early = reply
        else:
            self._waiting.set_result(reply)


def _sum(a: Figures, b: Figures) -> Figures:
    peak = max(a.peak_memory_bytes, b.peak_memory_bytes)
    return Figures(a.steps + b.steps, a.busy_ns + b.busy_ns, a.payload_bytes + b.payload_bytes, peak)


class RayExecutor:
    """Holds A and the undecided Δs of a run, and executes its coordinator's decisions.

    Args:
        context: of the run.
        replicas: records of its replicas.
        version: returns the version of A.
        cancel: has a replica stop an attempt.
    """

    def __init__(
        self,
        context: RunContext,
        replicas: Sequence[ReplicaRecord],
        version: Callable[[], Version],
        cancel: Callable[[ReplicaId, Clock], None],
    ) -> None:
        self._replicas, self._version, self._cancel = replicas, version, cancel
        _, state = first_state(context.job.program, context.job.running_buffers)
        self._owner = ServerOptimizer(context.job.program, context.policy, state)
        self._statistics = DeltaStatistics(context.policy, self._owner)
        self._undecided: dict[tuple[ReplicaId, Clock], FlatState] = {}
        self.spans = SpanLog(context.job.trace, SERVER)
        """Of the updates."""

    @property
    def state(self) -> FlatState:
        """A; these vectors are never written again."""
        return self._owner.state

    def take(self, replica: ReplicaId, attempt: Clock, arrays: Sequence[Bytes], now: Seconds) -> Mapping[str, float]:
        """Keep a Δ until it is decided on; returns the statistics that the policy needs."""
        delta = self._undecided[replica, attempt] = state_of(self.state.layout, arrays)
        return self._statistics.observe(delta, now)

    def send(self, replica: ReplicaId, micro_steps: int) -> None:
        record = self._replicas[replica]
        record.send(RayGrant(record.attempt + 1, micro_steps, self._version()), arrays_of(self.state))

    def apply(self, action: Apply) -> None:
        began = time.monotonic_ns()
        deltas = [(self._undecided.pop((a.replica, a.clock)), weight) for a, weight in action.deltas]
        self._owner.apply(deltas, action.rate, alone=action.alone, out=self.state.layout.new())
        ended = time.monotonic_ns()
        self._statistics.applied((ended - began) * 1e-9)
        self.spans.recorder.record("apply", self._version() + 1, began, ended)

    def discard(self, arrivals: tuple[Arrival, ...]) -> None:
        for arrival in arrivals:
            del self._undecided[arrival.replica, arrival.clock]

    def cancel(self, replica: ReplicaId) -> None:
        self._cancel(replica, self._replicas[replica].attempt)

    def dismiss(self, replica: ReplicaId) -> None:
        self._replicas[replica].dismiss()

    def close(self) -> None:
        """Release the memory of the spans."""
        self.spans.close()

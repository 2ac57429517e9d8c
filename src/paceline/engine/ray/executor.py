"""Executes the coordinator's decisions on Ray: A moves, Δs are dropped, replicas are answered.

What the coordinator decides, done: A moves, Δs are dropped, replicas are answered.

An update writes its A into vectors of its own, so those that were sent, or handed in for scoring, are never written
again.
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
    """What one replica was sent, and what it told; several in a row may have its name."""

    def __init__(self) -> None:
        self.attempt = self.micro_steps = 0
        """What it was sent A for, in all."""
        self.ready = self.finished = self.dead = False
        """Whether its model is built; whether its loop has ended; whether it has died, and no other is there."""
        self.excused_s: Seconds = 0.0
        self.figures = Figures(0, 0, 0, 0)
        self.step_times: Sequence[Seconds] = ()
        self._before = Figures(0, 0, 0, 0)
        self._answer: asyncio.Future[Reply] | None = None
        self._kept: Reply | None = None
        """What it is told when it next asks."""

    def ask(self) -> asyncio.Future[Reply]:
        """It waits from now on, until the future is answered."""
        self._answer = asyncio.get_running_loop().create_future()
        kept, self._kept = self._kept, None
        if kept is not None:
            self._reply(kept)
        return self._answer

    def send(self, order: RayGrant, arrays: list[Bytes]) -> None:
        """Answer with A."""
        self.attempt = order.attempt
        self.micro_steps += order.micro_steps
        self._reply((order, arrays))

    def dismiss(self) -> None:
        """Answer that training has ended, now or when it asks."""
        self._reply(END)

    def lost(self) -> None:
        """It is dead; another may go on where it has stopped."""
        self._before, self.figures = _sum(self._before, self.figures), Figures(0, 0, 0, 0)
        self._answer = self._kept = None
        self.ready, self.dead, self.excused_s = False, True, 0.0

    def figures_at(self, replica: ReplicaId, parameter_bytes: int, seconds: Seconds) -> WorkerFigures:
        """Return the figures of all actors that ran this replica."""
        figures = _sum(self._before, self.figures)
        return worker_figures(Coordinate(replica), figures, self.step_times, parameter_bytes, seconds)

    def _reply(self, reply: Reply) -> None:
        if self._answer is None or self._answer.done():
            self._kept = reply
        else:
            self._answer.set_result(reply)


def _sum(a: Figures, b: Figures) -> Figures:
    peak = max(a.peak_memory_bytes, b.peak_memory_bytes)
    return Figures(a.steps + b.steps, a.busy_ns + b.busy_ns, a.payload_bytes + b.payload_bytes, peak)


class RayExecutor:
    """The hands of a run's coordinator.

    Args:
        setup: of the run.
        lanes: its replicas.
        version: which A this is; asked when it is.
        cancel: has a replica stop an attempt.
    """

    def __init__(
        self,
        setup: RunContext,
        lanes: Sequence[ReplicaRecord],
        version: Callable[[], Version],
        cancel: Callable[[ReplicaId, Clock], None],
    ) -> None:
        self._lanes, self._version, self._cancel = lanes, version, cancel
        _, state = first_state(setup.job.program, setup.job.running_buffers)
        self._owner = ServerOptimizer(setup.job.program, setup.policy, state)
        self._observer = DeltaStatistics(setup.policy, self._owner)
        self._held: dict[tuple[ReplicaId, Clock], FlatState] = {}
        self.spans = SpanLog(setup.job.trace, SERVER)

    @property
    def state(self) -> FlatState:
        """A, which nobody will write to."""
        return self._owner.state

    def take(self, replica: ReplicaId, attempt: Clock, arrays: Sequence[Bytes], now: Seconds) -> Mapping[str, float]:
        """Hold a Δ until its fate is decided; what the policy asks to know of it."""
        delta = self._held[replica, attempt] = state_of(self.state.layout, arrays)
        return self._observer.observe(delta, now)

    def send(self, replica: ReplicaId, micro_steps: int) -> None:
        lane = self._lanes[replica]
        lane.send(RayGrant(lane.attempt + 1, micro_steps, self._version()), arrays_of(self.state))

    def apply(self, action: Apply) -> None:
        began = time.monotonic_ns()
        deltas = [(self._held.pop((a.replica, a.clock)), weight) for a, weight in action.deltas]
        self._owner.apply(deltas, action.rate, alone=action.alone, out=self.state.layout.new())
        ended = time.monotonic_ns()
        self._observer.applied((ended - began) * 1e-9)
        self.spans.recorder.record("apply", self._version() + 1, began, ended)

    def discard(self, arrivals: tuple[Arrival, ...]) -> None:
        for arrival in arrivals:
            del self._held[arrival.replica, arrival.clock]

    def cancel(self, replica: ReplicaId) -> None:
        self._cancel(replica, self._lanes[replica].attempt)

    def dismiss(self, replica: ReplicaId) -> None:
        self._lanes[replica].dismiss()

    def close(self) -> None:
        """Release the memory of the spans."""
        self.spans.close()

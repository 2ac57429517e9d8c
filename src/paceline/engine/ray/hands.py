"""What the coordinator decides, done: A moves, Δs are dropped, replicas are answered.

An update writes its A into vectors of its own, so those that were sent, or handed in for scoring, are never written
again.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence

from paceline.aggregation.base import Apply, Arrival
from paceline.comm.kernel import memfd_create
from paceline.core.types import Clock, ReplicaId, Seconds, Version
from paceline.engine.observe import Observer
from paceline.engine.owner import Owner
from paceline.engine.ray.freight import Bytes, arrays_of, state_of
from paceline.engine.ray.lane import Lane
from paceline.engine.ray.messages import Order
from paceline.engine.setup import Setup, first_state
from paceline.replica.state import State
from paceline.trace.recorder import NullRecorder, Recorder, read_packed
from paceline.trace.spans import SERVER, Span


class Hands:
    """The hands of a run's coordinator.

    Args:
        setup: of the run.
        lanes: its replicas.
        version: which A this is; asked when it is.
        cancel: has a replica stop an attempt.
    """

    def __init__(
        self,
        setup: Setup,
        lanes: Sequence[Lane],
        version: Callable[[], Version],
        cancel: Callable[[ReplicaId, Clock], None],
    ) -> None:
        self._lanes, self._version, self._cancel = lanes, version, cancel
        _, state = first_state(setup.job.program, setup.job.running_buffers)
        self._owner = Owner(setup.job.program, setup.policy, state)
        self._observer = Observer(setup.policy, self._owner)
        self._held: dict[tuple[ReplicaId, Clock], State] = {}
        self._sink = memfd_create("paceline:spans") if setup.job.trace else -1
        self._recorder = Recorder(SERVER, 0, 0, self._sink) if setup.job.trace else NullRecorder()

    @property
    def state(self) -> State:
        """A, which nobody will write to."""
        return self._owner.state

    def take(self, replica: ReplicaId, attempt: Clock, arrays: Sequence[Bytes], now: Seconds) -> Mapping[str, float]:
        """Hold a Δ until its fate is decided; what the policy asks to know of it."""
        delta = self._held[replica, attempt] = state_of(self.state.layout, arrays)
        return self._observer.observe(delta, now)

    def send(self, replica: ReplicaId, micro_steps: int) -> None:
        lane = self._lanes[replica]
        lane.send(Order(lane.attempt + 1, micro_steps, self._version()), arrays_of(self.state))

    def apply(self, action: Apply) -> None:
        began = time.monotonic_ns()
        deltas = [(self._held.pop((a.replica, a.clock)), weight) for a, weight in action.deltas]
        self._owner.apply(deltas, action.rate, alone=action.alone, out=self.state.layout.new())
        ended = time.monotonic_ns()
        self._observer.applied((ended - began) * 1e-9)
        self._recorder.record("apply", self._version() + 1, began, ended)

    def discard(self, arrivals: tuple[Arrival, ...]) -> None:
        for arrival in arrivals:
            del self._held[arrival.replica, arrival.clock]

    def cancel(self, replica: ReplicaId) -> None:
        self._cancel(replica, self._lanes[replica].attempt)

    def dismiss(self, replica: ReplicaId) -> None:
        self._lanes[replica].dismiss()

    def spans(self) -> list[Span]:
        """What was recorded of the updates; read it when there are no more."""
        if self._sink < 0:
            return []
        self._recorder.close()
        return read_packed(self._sink)

    def close(self) -> None:
        """Let go of everything."""
        if self._sink >= 0:
            os.close(self._sink)

"""Scripts of the events of a run: the order in which Δs arrive, and faults.

Real processes arrive in any order. A script makes a run of them repeatable, so that it can be compared, Δ by Δ, with
one in virtual time; and it makes a process die at a chosen moment.
"""

import signal
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from paceline.core.types import Clock, ReplicaId
from paceline.engine.coordinator import Coordinator
from paceline.engine.local.control_block import CANCELLED, Completion

# sent: instead of beginning the step, whose Δ will never be; taken: once its Δ has been decided on.
When: TypeAlias = Literal["sent", "taken"]

# Completions that were not read.
Pending: TypeAlias = list[tuple[ReplicaId, Completion]]


@dataclass(frozen=True, slots=True)
class Fault:
    """A signal to one worker."""

    replica: ReplicaId
    step: Clock
    when: When
    number: int


@dataclass(frozen=True, slots=True)
class EventScript:
    """A value; each method returns a longer script.

    >>> EventScript().order((1, 1), (0, 1)).kill(replica=0, step=5).faults[0].number
    <Signals.SIGKILL: 9>
    """

    arrivals: tuple[tuple[ReplicaId, Clock], ...] = ()
    faults: tuple[Fault, ...] = ()

    def order(self, *arrivals: tuple[ReplicaId, Clock]) -> "EventScript":
        """Read Δs in this order of (replica, step), and later ones as they come; replicas that left are skipped.

        Cancelled attempts are not arrivals; a replica has stopped before the next Δ is read.
        """
        return replace(self, arrivals=self.arrivals + arrivals)

    def kill(self, *, replica: ReplicaId, step: Clock, when: When = "sent") -> "EventScript":
        """Kill a worker at a step."""
        return replace(self, faults=(*self.faults, Fault(replica, step, when, signal.SIGKILL)))

    def stop(self, *, replica: ReplicaId, step: Clock, when: When = "sent") -> "EventScript":
        """Suspend a worker at a step: the process stays, but does nothing any more."""
        return replace(self, faults=(*self.faults, Fault(replica, step, when, signal.SIGSTOP)))


class FaultInjector:
    """Executes a script in one run.

    Args:
        script: of the run; an empty one has no effect.
        send_signal: to the worker of a replica.
    """

    def __init__(self, script: EventScript, send_signal: Callable[[ReplicaId, int], None]) -> None:
        self._order = deque(script.arrivals)
        self._faults = {(f.replica, f.step, f.when): f.number for f in script.faults}
        self._send_signal = send_signal

    def inject(self, replica: ReplicaId, step: Clock, when: When = "sent") -> None:
        """Send the fault of a step that is about to be granted, or whose Δ was decided on."""
        if self._faults and (number := self._faults.get((replica, step, when))) is not None:
            self._send_signal(replica, number)

    def due(self, pending: Callable[[], Pending], coordinator: Coordinator) -> Iterator[tuple[ReplicaId, Completion]]:
        """Yield the completions to read now; the next one is chosen when the one before has been decided on."""
        while self._order:
            chosen = self._next(pending(), coordinator)
            if chosen is None:
                return
            yield chosen
        yield from sorted(pending(), key=lambda each: each[1].at_ns)

    def _next(self, pending: Pending, coordinator: Coordinator) -> tuple[ReplicaId, Completion] | None:
        # First what is no arrival: completions of replicas that stop, were cancelled or have left.
        stopping = coordinator.present & coordinator.cancelling
        for replica, completion in pending:
            if replica in stopping or completion.ending == CANCELLED or replica not in coordinator.present:
                return replica, completion
        while self._order and self._order[0][0] not in coordinator.present:
            self._order.popleft()
        for replica, completion in pending if self._order and not stopping else ():
            if (replica, completion.attempt) == self._order[0]:
                self._order.popleft()
                return replica, completion
        return None

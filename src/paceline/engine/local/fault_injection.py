"""What is to happen in a run, told beforehand: the order in which Δs arrive, and faults.

Real processes arrive in any order. A script makes a run of them repeatable, so that it can be compared, Δ by Δ, with
one in virtual time; and it makes a process die at a chosen moment, not at some moment.
"""

import signal
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from paceline.core.types import Clock, ReplicaId
from paceline.engine.coordinator import Coordinator
from paceline.engine.local.control_block import CANCELLED, Completion

When: TypeAlias = Literal["sent", "taken"]
"""``sent``: instead of beginning the step, whose Δ will never be; ``taken``: once its Δ has been decided on."""

Untaken: TypeAlias = Callable[[], list[tuple[ReplicaId, Completion]]]
"""The reports that lie on the board and have not been taken."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A signal to one worker."""

    replica: ReplicaId
    step: Clock
    when: When
    number: int


@dataclass(frozen=True, slots=True)
class EventScript:
    """A value; each method returns a longer one.

    >>> EventScript().order((1, 1), (0, 1)).kill(replica=0, step=5).faults[0].number
    <Signals.SIGKILL: 9>
    """

    arrivals: tuple[tuple[ReplicaId, Clock], ...] = ()
    faults: tuple[Fault, ...] = ()

    def order(self, *arrivals: tuple[ReplicaId, Clock]) -> "EventScript":
        """Take Δs in this order of (replica, step), and those after it as they come; replicas that left are skipped.

        Attempts that were cancelled are not arrivals; a replica has stopped before the next Δ is taken.
        """
        return replace(self, arrivals=self.arrivals + arrivals)

    def kill(self, *, replica: ReplicaId, step: Clock, when: When = "sent") -> "EventScript":
        """Kill a worker at a step."""
        return self._with(Fault(replica, step, when, signal.SIGKILL))

    def stop(self, *, replica: ReplicaId, step: Clock, when: When = "sent") -> "EventScript":
        """Suspend a worker at a step: it lives, but does nothing any more."""
        return self._with(Fault(replica, step, when, signal.SIGSTOP))

    def _with(self, fault: Fault) -> "EventScript":
        return replace(self, faults=(*self.faults, fault))


def _when(told: tuple[ReplicaId, Completion]) -> int:
    return told[1].at_ns


class FaultInjector:
    """Carries a script out in one run.

    Args:
        script: an empty one lets everything take its course.
        send_signal: to the worker of a replica.
    """

    def __init__(self, script: EventScript, send_signal: Callable[[ReplicaId, int], None]) -> None:
        self._order = deque(script.arrivals)
        self._faults = {(f.replica, f.step, f.when): f.number for f in script.faults}
        self._send_signal = send_signal

    def before_grant(self, replica: ReplicaId, step: Clock) -> None:
        """A replica is to be sent A for a step: its worker may have to meet its fault instead."""
        if self._faults:
            self._reached(replica, step, "sent")

    def after_decision(self, replica: ReplicaId, step: Clock) -> None:
        """A Δ has been decided on: its worker may have to meet its fault now."""
        if self._faults:
            self._reached(replica, step, "taken")

    def due(self, untaken: Untaken, coordinator: Coordinator) -> Iterator[tuple[ReplicaId, Completion]]:
        """The reports to take now, one after the other; the next is looked for when the one before has been taken."""
        while self._order:
            found = self._next(untaken(), coordinator)
            if found is None:
                return
            yield found
        yield from sorted(untaken(), key=_when)

    def _reached(self, replica: ReplicaId, step: Clock, when: When) -> None:
        number = self._faults.get((replica, step, when))
        if number is not None:
            self._send_signal(replica, number)

    def _next(
        self, told: list[tuple[ReplicaId, Completion]], coordinator: Coordinator
    ) -> tuple[ReplicaId, Completion] | None:
        stopping = {replica for replica in coordinator.present if coordinator.voids(replica)}
        for replica, report in told:
            if replica in stopping or report.ending == CANCELLED or replica not in coordinator.present:
                return replica, report
        while self._order and self._order[0][0] not in coordinator.present:
            self._order.popleft()
        for replica, report in told if self._order and not stopping else ():
            if (replica, report.attempt) == self._order[0]:
                self._order.popleft()
                return replica, report
        return None

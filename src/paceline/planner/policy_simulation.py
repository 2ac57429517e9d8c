"""Simulation of a policy without tensors: arrivals, decisions, and a virtual clock.

The engines' own coordinator runs the policy; its decisions only move the clock::

    replica r   |-- compute + delay --|                        |-- compute + delay --|
    policy                            | arrived -> Apply ... Release

The k-th draws of a replica are those of the virtual engine for the same seed, so both have the same events.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from operator import add
from typing import Any, NamedTuple, final

from paceline.aggregation import Aggregation
from paceline.aggregation.base import Apply, Arrival
from paceline.clock.distributions import Constant
from paceline.clock.times import Delay, EventQueue, Times
from paceline.core.delta import Accumulated, Change, Distance
from paceline.core.types import Clock, ReplicaId, Seconds, Version
from paceline.engine.budget import Unbounded
from paceline.engine.coordinator import Coordinator


@final
@dataclass(frozen=True, slots=True)
class Pace:
    """Mean pace of replicas under a policy."""

    update_s: Seconds
    """Time between two updates of A."""
    batches: float
    """Batches of an update."""
    staleness: float
    """Updates between reading A and applying Δ, mean over applied Δs."""
    fresh: float | None
    """Share of applied Δs that were computed from the A they were applied to; None: not known."""
    discarded: float
    """Share of attempts that are in no update, cancelled ones among them."""
    batch_s: Seconds
    """Time of a batch on a replica without delay."""
    updates: int = 0
    """Updates of the simulation; 0: the pace follows from equations."""

    def step_s(self, replicas: int) -> Seconds:
        """Return the time of as many batches as there are replicas, to compare with a synchronous step."""
        return self.update_s * replicas / self.batches

    def waiting_s(self, replicas: int) -> Seconds:
        """Return how much longer that is than if no replica waited or was slow."""
        return self.step_s(replicas) - self.batch_s


@dataclass(eq=False, slots=True)
class SimulatedAttempt:
    """A pending Δ."""

    replica: ReplicaId
    clock: Clock
    version: Version
    cancelled: bool = False


class SimulationCounts(NamedTuple):
    """Counters of a simulation at one time."""

    now_s: Seconds
    updates: int
    applied: int
    stale: int
    """Updates between reading A and applying Δ, summed over all applied Δs."""
    fresh: int
    """Δs applied to the A that they were computed from."""
    arrived: int
    cancelled: int

    def pace_until(self, later: "SimulationCounts", micro_steps: int, batch_s: Seconds) -> Pace:
        """Return the means over the events from these counts to later ones."""
        now_s, updates, applied, stale, fresh, arrived, cancelled = (b - a for a, b in zip(self, later, strict=True))
        return Pace(
            update_s=now_s / updates,
            batches=micro_steps * applied / updates,
            staleness=stale / applied,
            fresh=fresh / applied,
            discarded=max(0.0, 1 - applied / (arrived + cancelled)),  # some that had arrived before may be applied
            batch_s=batch_s,
            updates=int(updates),
        )


_NOTHING = Constant(0.0)


class Simulation:
    """Executor of a coordinator's decisions that only advances a clock.

    Args:
        policy: resolved.
        replicas: P.
        times: none of them measured.
        delay: of some replicas; None: of none.
        seed: of all draws.
    """

    def __init__(self, policy: Aggregation[Any], replicas: int, times: Times, delay: Delay | None, seed: int) -> None:
        self.micro_steps = micro_steps(policy)
        self._streams = [attempts(times, delay, r, replicas, seed, self.micro_steps) for r in range(replicas)]
        self._apply, self._gradient = times.apply_stream(seed), times.gradient_stream(seed)
        self._server_takes_time = times.apply != _NOTHING or times.gradient != _NOTHING
        self._now: Seconds = 0.0
        self._clocks = [0] * replicas
        self._attempts: list[SimulatedAttempt | None] = [None] * replicas
        self._events: EventQueue[SimulatedAttempt] = EventQueue()
        self._coordinator = Coordinator(policy, replicas, Unbounded(self.micro_steps), self)
        self._coordinator.begin()

    @property
    def updates(self) -> int:
        """Updates of A so far."""
        return self._coordinator.version

    @property
    def arrivals(self) -> int:
        """Δs that have arrived so far."""
        return self._coordinator.tally.gradients

    def turn(self) -> None:
        """Process the next event."""
        if not self._events:
            raise self._coordinator.deadlock()
        # The server may still have been busy with an update when the Δ arrived.
        start = max(self._events.next_s, self._now)
        attempt = self._events.pop()
        if attempt.cancelled:
            return
        self._now = start
        self._attempts[attempt.replica] = None
        self._coordinator.arrived(Arrival(attempt.replica, attempt.version, attempt.clock, self.micro_steps, start))

    def counts(self) -> SimulationCounts:
        """Return the current counters."""
        tally = self._coordinator.tally
        stale = sum(staleness * count for staleness, count in tally.staleness.items())
        applied, fresh = tally.applied, tally.staleness[0]
        return SimulationCounts(self._now, self.updates, applied, stale, fresh, tally.gradients, tally.cancelled)

    # ------------------------------------------------------------------------------ executor of the policy's decisions

    def send(self, replica: ReplicaId, micro_steps: int) -> None:
        del micro_steps
        self._clocks[replica] += 1
        attempt = SimulatedAttempt(replica, self._clocks[replica], self._coordinator.version)
        self._attempts[replica] = attempt
        self._events.push(self._now + next(self._streams[replica]), attempt)

    def apply(self, action: Apply) -> None:
        if self._server_takes_time:
            self._now += next(self._apply) + sum(next(self._gradient) for _ in action.deltas)

    def discard(self, arrivals: tuple[Arrival, ...]) -> None:
        del arrivals

    def cancel(self, replica: ReplicaId) -> None:
        attempt = self._attempts[replica]
        assert attempt is not None, "it computes"
        attempt.cancelled = True  # its event stays in the queue, and is ignored
        self._coordinator.cancelled(replica)

    def dismiss(self, replica: ReplicaId) -> None:
        raise AssertionError(f"replica {replica} may go on for ever")


def micro_steps(policy: Aggregation[Any]) -> int:
    """Return the number of batches of a Δ.

    >>> from paceline.aggregation import LocalSteps, Synchronous
    >>> micro_steps(LocalSteps(period=8)), micro_steps(Synchronous())
    (8, 1)
    """
    match policy.delta:
        case Accumulated(steps) | Change(steps) | Distance(steps):
            return steps
    return 1


def attempts(
    times: Times, delay: Delay | None, replica: ReplicaId, replicas: int, seed: int, micro_steps: int
) -> Iterator[Seconds]:
    """Yield the time from sending A to a replica until its Δ arrives, one attempt after the other, without end."""
    compute: Iterator[Seconds]
    if isinstance(times.compute, Constant):
        compute = repeat(times.compute.value)
    else:
        stream = times.compute_stream(replica, seed)
        assert stream is not None, "nothing is measured here"
        compute = stream
    late = delay.stream(replica, replicas, seed) if delay else None
    if micro_steps == 1 and times.transfer == _NOTHING:  # the usual case, without a generator
        return compute if late is None else map(add, compute, late)
    return _with_transfers(compute, late or repeat(0.0), times.transfer_stream(replica, seed), micro_steps)


def _with_transfers(
    compute: Iterator[Seconds], late: Iterator[Seconds], transfer: Iterator[Seconds], micro_steps: int
) -> Iterator[Seconds]:
    while True:
        sent_s = next(transfer)
        spent_s = sum(next(compute) + next(late) for _ in range(micro_steps))
        yield sent_s + spent_s + next(transfer)

"""A run of a policy without a tensor: arrivals, what is decided, and a virtual clock.

The engines' own coordinator runs the policy; what it decides moves the clock and nothing else::

    replica r   |-- compute + delay --|                        |-- compute + delay --|
    policy                            | arrived -> Apply ... Release

The k-th draws of a replica are those that the virtual engine has for the same seed, so both go through the same events.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from operator import add
from typing import Any, NamedTuple, final

from paceline.aggregation import Aggregation
from paceline.aggregation.base import Apply, Arrival
from paceline.clock.distributions import Constant
from paceline.clock.event_queue import EventQueue
from paceline.clock.times import Delay, Times
from paceline.core.delta import Accumulated, Change, Distance
from paceline.core.types import Clock, ReplicaId, Seconds, Version
from paceline.engine.budget import Unbounded
from paceline.engine.coordinator import Coordinator


@final
@dataclass(frozen=True, slots=True)
class Pace:
    """What a policy makes of replicas' times, on average."""

    update_s: Seconds
    """Between two updates of A."""
    batches: float
    """That an update is made of."""
    staleness: float
    """Updates between reading A and applying Δ, mean over applied Δs."""
    fresh: float | None
    """The share of applied Δs that were computed from the A they were applied to; None: not known."""
    discarded: float
    """The share of attempts that no update saw, cancelled ones among them."""
    batch_s: Seconds
    """What a replica takes for a batch where nothing delays it."""
    updates: int = 0
    """That this was seen over; 0: it follows from equations."""

    def step_s(self, replicas: int) -> Seconds:
        """What as many batches take as there are replicas: what a synchronous step compares with."""
        return self.update_s * replicas / self.batches

    def waiting_s(self, replicas: int) -> Seconds:
        """How much longer that is than if nobody waited and nothing was slow."""
        return self.step_s(replicas) - self.batch_s


@dataclass(eq=False, slots=True)
class Attempt:
    """A Δ under way."""

    replica: ReplicaId
    clock: Clock
    version: Version
    void: bool = False
    """Cancelled: it will not arrive."""


class Seen(NamedTuple):
    """All counts at one moment."""

    now_s: Seconds
    updates: int
    applied: int
    stale: int
    """Updates between reading A and applying Δ, of all applied Δs together."""
    fresh: int
    """Δs applied to the A that they were computed from."""
    arrived: int
    cancelled: int

    def pace(self, later: "Seen", micro_steps: int, batch_s: Seconds) -> Pace:
        """Means over what happened from here until later."""
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
    """The hands of a coordinator, which only let time pass.

    Args:
        policy: resolved.
        replicas: P.
        times: none of them measured.
        delay: of some replicas; None: of nobody.
        seed: of all draws.
    """

    def __init__(self, policy: Aggregation[Any], replicas: int, times: Times, delay: Delay | None, seed: int) -> None:
        self.micro_steps = micro_steps(policy)
        self._streams = [attempts(times, delay, r, replicas, seed, self.micro_steps) for r in range(replicas)]
        self._apply, self._gradient = times.apply_stream(seed), times.gradient_stream(seed)
        self._serves = times.apply != _NOTHING or times.gradient != _NOTHING
        self._now: Seconds = 0.0
        self._clocks = [0] * replicas
        self._attempts: list[Attempt | None] = [None] * replicas
        self._events: EventQueue[Attempt] = EventQueue()
        self._coordinator = Coordinator(policy, replicas, Unbounded(self.micro_steps), self)
        self._coordinator.begin()

    @property
    def updates(self) -> int:
        """Of A so far."""
        return self._coordinator.version

    @property
    def arrivals(self) -> int:
        """Δs so far."""
        return self._coordinator.tally.gradients

    def turn(self) -> None:
        """The next event."""
        if not self._events:
            raise self._coordinator.deadlock()
        start = max(self._events.next_s, self._now)
        attempt = self._events.pop()
        if attempt.void:
            return
        self._now = start
        self._attempts[attempt.replica] = None
        self._coordinator.arrived(Arrival(attempt.replica, attempt.version, attempt.clock, self.micro_steps, start))

    def seen(self) -> Seen:
        """All that has happened."""
        tally = self._coordinator.tally
        stale = sum(staleness * count for staleness, count in tally.staleness.items())
        applied, fresh = tally.applied, tally.staleness[0]
        return Seen(self._now, self.updates, applied, stale, fresh, tally.gradients, tally.cancelled)

    # ------------------------------------------------------------------------------------------ hands: what is decided

    def send(self, replica: ReplicaId, micro_steps: int) -> None:
        del micro_steps
        self._clocks[replica] += 1
        attempt = Attempt(replica, self._clocks[replica], self._coordinator.version)
        self._attempts[replica] = attempt
        self._events.push(self._now + next(self._streams[replica]), attempt)

    def apply(self, action: Apply) -> None:
        if self._serves:
            self._now += next(self._apply) + sum(next(self._gradient) for _ in action.deltas)

    def discard(self, arrivals: tuple[Arrival, ...]) -> None:
        del arrivals

    def cancel(self, replica: ReplicaId) -> None:
        attempt = self._attempts[replica]
        assert attempt is not None, "it computes"
        attempt.void = True
        self._coordinator.cancelled(replica)

    def dismiss(self, replica: ReplicaId) -> None:
        raise AssertionError(f"replica {replica} may go on for ever")


def micro_steps(policy: Aggregation[Any]) -> int:
    """Batches that a Δ is of.

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
    """From when a replica is sent A to when its Δ is there, one attempt after the other, without end."""
    compute = _computing(times, replica, seed)
    late = delay.stream(replica, replicas, seed) if delay else None
    if micro_steps == 1 and times.transfer == _NOTHING:
        return compute if late is None else map(add, compute, late)
    return _several(compute, late or repeat(0.0), times.transfer_stream(replica, seed), micro_steps)


def _computing(times: Times, replica: ReplicaId, seed: int) -> Iterator[Seconds]:
    """Nothing has to be drawn for what is always the same."""
    if isinstance(times.compute, Constant):
        return repeat(times.compute.value)
    stream = times.compute_stream(replica, seed)
    assert stream is not None, "nothing is measured here"
    return stream


def _several(
    compute: Iterator[Seconds], late: Iterator[Seconds], transfer: Iterator[Seconds], micro_steps: int
) -> Iterator[Seconds]:
    while True:
        moved = next(transfer)
        spent = sum(next(compute) + next(late) for _ in range(micro_steps))
        yield moved + spent + next(transfer)

"""Runs a policy on small messages, counts all that happens, and never touches a tensor.

One coordinator decides for the whole model; its decisions go, in order, to its engine's :class:`DecisionExecutor`::

    engine --- arrived / left / joined --> coordinator --- policy ---> Decision
       ^                                                                  |
       +------ apply / send / discard / cancel / dismiss (Hands) <--------+

It also knows when a replica has had its share of the budget: released then, it is dismissed instead of sent, and the
policy sees P shrink.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.aggregation import text_of
from paceline.aggregation.base import Action, Aggregation, Apply, Arrival, Decision, Discard, Release
from paceline.core.errors import PacelineError
from paceline.core.types import Clock, LeaveReason, ReplicaId, Version
from paceline.engine.budget import StepQuota


class DecisionExecutor(Protocol):
    """What an engine does for a decision."""

    def apply(self, action: Apply) -> None:
        """Update A; the coordinator counts the version."""

    def send(self, replica: ReplicaId, micro_steps: int) -> None:
        """Send it the current A; its next Δ takes this many micro-steps."""

    def discard(self, arrivals: tuple[Arrival, ...]) -> None:
        """Drop these Δs."""

    def cancel(self, replica: ReplicaId) -> None:
        """Stop its attempt; answer with :meth:`Coordinator.cancelled` once it has stopped."""

    def dismiss(self, replica: ReplicaId) -> None:
        """It has had its share of the budget and ends."""


@dataclass
class Tally:
    """Counts of a run so far."""

    gradients: int = 0
    applied: int = 0
    discarded: int = 0
    cancelled: int = 0
    nonfinite: int = 0
    samples: int = 0
    """In applied Δs."""
    seen_samples: int = 0
    """In all Δs that arrived."""
    micro_steps: int = 0
    """Of all attempts that ended, cancelled ones included."""
    staleness: Counter[int] = field(default_factory=Counter[int])
    recent_staleness: int = 0
    recent_applied: int = 0


class Coordinator:
    """One run of one policy.

    Args:
        policy: resolved.
        replicas: P at the start.
        allowance: each replica's share of the budget.
        hands: the engine's.
    """

    def __init__(self, policy: Aggregation[Any], replicas: int, allowance: StepQuota, hands: DecisionExecutor) -> None:
        self._policy, self._allowance, self._hands = policy, allowance, hands
        self._state = policy.start(replicas)
        self._held: dict[tuple[ReplicaId, Clock], Arrival] = {}
        self._computing: set[ReplicaId] = set()
        self._cancelling: set[ReplicaId] = set()
        self._finishing: deque[ReplicaId] = deque()
        self._granted = [0] * replicas
        self._executing = False
        self.present = set(range(replicas))
        self.version: Version = 0
        self.tally = Tally()

    @property
    def threshold(self) -> int:
        """K as it stands."""
        return self._policy.waits_for(self._state)

    @property
    def computing(self) -> frozenset[ReplicaId]:
        """The replicas that are at work on a Δ."""
        return frozenset(self._computing)

    @property
    def waiting(self) -> list[ReplicaId]:
        """Who takes part and does not compute."""
        return sorted(self.present - self._computing)

    @property
    def idle(self) -> bool:
        """Whether every replica has gone."""
        return not self.present

    def deadlock(self) -> PacelineError:
        """What to raise where nobody computes, and so nothing can arrive any more."""
        return PacelineError(
            f"{text_of(self._policy)} lets nobody go on: replicas {sorted(self.present)} all wait; its arrived() must "
            "Release those who wait"
        )

    def begin(self) -> None:
        """Send A_0 to all."""
        for replica in sorted(self.present):
            self._go_on(replica)
        self._see_off()

    def voids(self, replica: ReplicaId) -> bool:
        """Whether this replica's attempt was called off: if its Δ arrives all the same, that counts as its stopping."""
        return replica in self._cancelling

    def arrived(self, arrival: Arrival) -> None:
        """A Δ is there."""
        tally, replica = self.tally, arrival.replica
        self._computing.discard(replica)
        tally.gradients += 1
        tally.seen_samples += arrival.samples
        tally.micro_steps += self._granted[replica]
        self._held[arrival.replica, arrival.clock] = arrival
        if arrival.finite:
            self._decide(*self._policy.arrived(self._state, arrival))
        else:
            tally.nonfinite += 1
            self._execute(Discard((arrival,)))
            self._execute(Release((replica,)))
        if self._finishing:
            self._see_off()

    def cancelled(self, replica: ReplicaId) -> None:
        """A replica has stopped its attempt and can read A."""
        self._cancelling.discard(replica)
        self._computing.discard(replica)
        self.tally.cancelled += 1
        self.tally.micro_steps += self._granted[replica]
        self._go_on(replica)
        self._see_off()

    def left(self, replica: ReplicaId, reason: LeaveReason) -> None:
        """A replica is gone."""
        if replica not in self.present:
            return
        self.present.remove(replica)
        self._cancelling.discard(replica)
        self._computing.discard(replica)
        self._decide(*self._policy.left(self._state, replica, reason))
        self._see_off()

    def joined(self, replica: ReplicaId) -> None:
        """A replica that had left is back, and waits for A."""
        self.present.add(replica)
        self._decide(*self._policy.joined(self._state, replica))
        self._go_on(replica)
        self._see_off()

    def retire(self, replica: ReplicaId) -> None:
        """A replica that would have gone on is done instead: its budget is spent, or its loop has ended."""
        self.present.remove(replica)
        self._computing.discard(replica)
        self._finishing.append(replica)

    def finish(self) -> None:
        """The time is up: what is still held is discarded and counted, and nobody takes part any more."""
        if self._held:
            self._execute(Discard(tuple(self._held.values())))
        self.present.clear()

    def recent_staleness(self) -> float | None:
        """Mean staleness of the Δs applied since this was last asked."""
        tally = self.tally
        mean = tally.recent_staleness / tally.recent_applied if tally.recent_applied else None
        tally.recent_staleness = tally.recent_applied = 0
        return mean

    def _decide(self, state: Any, decision: Decision) -> None:
        self._state = state
        outermost, self._executing = not self._executing, True
        try:
            for action in decision:
                self._execute(action)
        finally:
            self._executing = not outermost

    def _execute(self, action: Action) -> None:
        if isinstance(action, Apply):
            arrivals = [a for a, _ in action.deltas]
            self._check(arrivals)
            self._hands.apply(action)
            self._settle(arrivals)
            self._count(action)
            self.version += 1
        elif isinstance(action, Release):
            for replica in action.replicas:
                self._go_on(replica)
        elif isinstance(action, Discard):
            self._check(action.arrivals)
            self._settle(action.arrivals)
            self.tally.discarded += len(action.arrivals)
            self._hands.discard(action.arrivals)
        else:
            for replica in action.replicas:
                self._cancel(replica)

    def _check(self, arrivals: Sequence[Arrival]) -> None:
        if len(arrivals) == 1 and (arrivals[0].replica, arrivals[0].clock) in self._held:
            return
        names = {(a.replica, a.clock) for a in arrivals}
        if len(names) < len(arrivals) or not names <= self._held.keys():
            raise PacelineError(
                f"{text_of(self._policy)} named Δs (replica, clock) {sorted((a.replica, a.clock) for a in arrivals)}, "
                f"but holds {sorted(self._held)}: each Δ must be applied or discarded exactly once"
            )

    def _settle(self, arrivals: Sequence[Arrival]) -> None:
        for arrival in arrivals:
            del self._held[arrival.replica, arrival.clock]

    def _count(self, action: Apply) -> None:
        tally = self.tally
        for arrival, _ in action.deltas:
            staleness = self.version - arrival.version
            tally.staleness[staleness] += 1
            tally.recent_staleness += staleness
            tally.samples += arrival.samples
        tally.applied += len(action.deltas)
        tally.recent_applied += len(action.deltas)

    def _cancel(self, replica: ReplicaId) -> None:
        if replica in self._computing:
            self._cancelling.add(replica)
            self._hands.cancel(replica)
        else:
            self._go_on(replica)

    def _go_on(self, replica: ReplicaId) -> None:
        if replica not in self.present:
            return
        if replica in self._computing:
            raise PacelineError(
                f"{text_of(self._policy)} released replica {replica}, which is computing; release those that wait, "
                "cancel others"
            )
        micro_steps = self._granted[replica] = self._allowance.grant(replica)
        if micro_steps:
            self._computing.add(replica)
            self._hands.send(replica, micro_steps)
        else:
            self._hands.dismiss(replica)
            self.retire(replica)

    def _see_off(self) -> None:
        """Tell the policy who is done, once the log that released them has been executed whole."""
        while self._finishing and not self._executing:
            self._decide(*self._policy.left(self._state, self._finishing.popleft(), "done"))

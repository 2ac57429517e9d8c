"""Δs that wait to be applied together, and the replicas that wait with them."""

from typing import NamedTuple

from paceline.aggregation.base import Apply, Arrival, Cancel, Combine, Decision, Release, combined
from paceline.core.types import ReplicaId


class Buffer(NamedTuple):
    """What every policy with a threshold keeps. Tuples, for appending to one is cheaper than copying a set."""

    alive: frozenset[ReplicaId]
    """Who takes part; len(alive) is P."""
    held: tuple[Arrival, ...] = ()
    """Δs that have arrived and are neither applied nor discarded, also of replicas that have left since."""
    waiting: tuple[ReplicaId, ...] = ()
    """Those of ``alive`` that have arrived and are not released."""

    def add(self, arrival: Arrival) -> "Buffer":
        """One more Δ, whose replica waits."""
        return Buffer(self.alive, (*self.held, arrival), (*self.waiting, arrival.replica))

    def without(self, replica: ReplicaId) -> "Buffer":
        """One replica less; its Δs stay."""
        return Buffer(self.alive - {replica}, self.held, tuple(r for r in self.waiting if r != replica))

    def joined(self, replica: ReplicaId) -> "Buffer":
        """One computing replica more."""
        return self._replace(alive=self.alive | {replica})

    def settle(self, k: int, combine: Combine, *, hold: bool = True, cancel: bool = False) -> "tuple[Buffer, Decision]":
        """Do what is due: apply what is held once it is enough, and release whom the rules release.

        Args:
            k: how many Δs make an update. With ``hold`` Δs of replicas that have left don't count, but are applied
                with the others: so a round is a round of all who are there. With nobody there, any Δ is enough.
            combine: how they are weighed.
            hold: whether a replica waits until its Δ is applied, or goes on at once.
            cancel: whether an update ends the attempts of those that still compute.
        """
        if not self._enough(k, hold):
            return (self, ()) if hold else (self._replace(waiting=()), released(self.waiting))
        update = combined(self.held, combine)
        # Without a sample there was no update: the A that the others compute with is still the current one.
        late = sorted(self.alive.difference(self.waiting)) if cancel and updates(update) else []
        cancelled = (Cancel(tuple(late)),) if late else ()
        return Buffer(self.alive), (*update, *cancelled, *released(self.waiting))

    def _enough(self, k: int, hold: bool) -> bool:
        if not self.alive:
            return bool(self.held)
        return len(self.waiting if hold else self.held) >= k


def released(waiting: tuple[ReplicaId, ...]) -> Decision:
    """Release all who wait together, in ascending order."""
    return (Release(tuple(sorted(waiting))),) if waiting else ()


def updates(decision: Decision) -> int:
    """How many updates of A a decision makes."""
    return sum(type(action) is Apply for action in decision)

"""Bounded staleness: no replica gets further ahead of the slowest than the bound."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, final, get_args

from paceline.aggregation.base import Aggregation, Apply, Arrival, Combine, Decision, Discard, released
from paceline.core.errors import check_choice, check_int
from paceline.core.registry import register
from paceline.core.types import Clock, LeaveReason, ReplicaId


class Clocks(NamedTuple):
    """The state of :class:`StaleSynchronous`. ``slowest`` and ``at_slowest`` avoid a scan of all clocks per arrival."""

    of: Mapping[ReplicaId, Clock]
    """Number of Δs that each replica that takes part has sent."""
    slowest: Clock = 0
    at_slowest: int = 0
    """Number of replicas at ``slowest``."""
    waiting: tuple[ReplicaId, ...] = ()

    def moved(self, replica: ReplicaId) -> "Clocks":
        """Advance the clock of a replica, which then waits."""
        clock = self.of[replica]
        after = Clocks(
            {**self.of, replica: clock + 1},
            self.slowest,
            self.at_slowest - (clock == self.slowest),
            (*self.waiting, replica),
        )
        # Clocks only grow, so the slowest changes only when the last replica at it has moved on.
        return after if after.at_slowest else after.recounted()

    def without(self, replica: ReplicaId) -> "Clocks":
        """Remove a replica."""
        of = {r: c for r, c in self.of.items() if r != replica}
        return self._replace(of=of, waiting=tuple(r for r in self.waiting if r != replica)).recounted()

    def recounted(self) -> "Clocks":
        """Find the slowest anew; without any replica it stays."""
        slowest = min(self.of.values(), default=self.slowest)
        return self._replace(slowest=slowest, at_slowest=sum(c == slowest for c in self.of.values()))


@final
@register("stale-synchronous")
@dataclass(frozen=True)
class StaleSynchronous(Aggregation[Clocks]):
    """Apply each Δ on arrival; a replica at clock c waits until the slowest is at c - bound (Ho et al. 2013).

    Clocks are counted here, from arrivals, so a replica that joins or comes back starts at the slowest's clock instead
    of blocking all others. With bound=1::

        replica 0   1■■2■■......|3■■       at clock 2 it waits until the slowest has sent its first Δ
        replica 1   1■■■■■■■■■■■|2■■■

    Args:
        bound: s; with 0 all go in lockstep, and plain SGD is synchronous SGD up to rounding.
        combine: ``mean`` weighs each Δ 1/P, so that P of them move A as far as a synchronous update; ``sum`` weighs 1.

    Raises:
        InputError: a negative bound.
    """

    bound: int = 3
    combine: Combine = "mean"

    def __post_init__(self) -> None:
        check_int("stale-synchronous:bound", self.bound, least=0)
        check_choice("stale-synchronous:combine", self.combine, get_args(Combine))

    def start(self, replicas: int) -> Clocks:
        return Clocks(dict.fromkeys(range(replicas), 0), 0, replicas)

    def arrived(self, state: Clocks, arrival: Arrival) -> tuple[Clocks, Decision]:
        after, free = self._go_on(state.moved(arrival.replica))
        if arrival.samples == 0:
            return after, (Discard((arrival,)), *free)
        weight = 1.0 / len(state.of) if self.combine == "mean" else 1.0
        return after, (Apply(((arrival, weight),)), *free)

    def left(self, state: Clocks, replica: ReplicaId, reason: LeaveReason) -> tuple[Clocks, Decision]:
        del reason
        return self._go_on(state.without(replica))

    def joined(self, state: Clocks, replica: ReplicaId) -> tuple[Clocks, Decision]:
        return state._replace(of={**state.of, replica: state.slowest}).recounted(), ()

    def waits_for(self, state: Clocks) -> int:
        del state
        return 1

    def _go_on(self, state: Clocks) -> tuple[Clocks, Decision]:
        limit = state.slowest + self.bound
        free = tuple(r for r in state.waiting if state.of[r] <= limit)
        if not free:
            return state, ()
        return state._replace(waiting=tuple(r for r in state.waiting if state.of[r] > limit)), released(free)

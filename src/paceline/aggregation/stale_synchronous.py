"""Bounded staleness: no replica gets further ahead of the slowest than the bound."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, final, get_args

from paceline.aggregation.base import Aggregation, Apply, Arrival, Chunked, Combine, Decision, Discard, released
from paceline.core.errors import check_choice, check_int
from paceline.core.registry import register
from paceline.core.types import Clock, LeaveReason, ReplicaId

# Clocks of so many replicas lie together: one that moves costs a copy of these, and not of those of all replicas.
SEGMENT = 64

Segment: TypeAlias = Mapping[ReplicaId, Clock]


class Clocks(NamedTuple):
    """The state of :class:`StaleSynchronous`. What is derived from the clocks avoids a scan of them per arrival."""

    segments: tuple[Segment, ...]
    """Number of Δs that each replica that takes part has sent; replica r is in segment r // SEGMENT."""
    replicas: int
    slowest: Clock = 0
    at_slowest: int = 0
    """Number of replicas at ``slowest``."""
    waiting: Chunked[ReplicaId] = Chunked()

    @classmethod
    def at_start(cls, replicas: int) -> "Clocks":
        """Return those of replicas that have sent nothing."""
        starts = range(0, replicas, SEGMENT)
        segments = tuple(dict.fromkeys(range(start, min(start + SEGMENT, replicas)), 0) for start in starts)
        return cls(segments, replicas, 0, replicas)

    @property
    def of(self) -> Mapping[ReplicaId, Clock]:
        """Return the clock of each replica."""
        return {replica: clock for segment in self.segments for replica, clock in segment.items()}

    def clock(self, replica: ReplicaId) -> Clock:
        """Return the clock of a replica."""
        return self.segments[replica // SEGMENT][replica]

    def moved(self, replica: ReplicaId) -> "Clocks":
        """Advance the clock of a replica."""
        clock = self.clock(replica)
        at_slowest = self.at_slowest - (clock == self.slowest)
        after = Clocks(self._with(replica, clock + 1), self.replicas, self.slowest, at_slowest, self.waiting)
        # Clocks only grow, so the slowest changes only when the last replica at it has moved on.
        return after if at_slowest else after.recounted()

    def without(self, replica: ReplicaId) -> "Clocks":
        """Remove a replica."""
        at_slowest = self.at_slowest - (self.clock(replica) == self.slowest)
        waiting = Chunked.of(r for r in self.waiting if r != replica)
        after = Clocks(self._with(replica, None), self.replicas - 1, self.slowest, at_slowest, waiting)
        return after if at_slowest else after.recounted()

    def joined(self, replica: ReplicaId) -> "Clocks":
        """Add a replica, at the clock of the slowest."""
        segments = self._with(replica, self.slowest)
        return Clocks(segments, self.replicas + 1, self.slowest, self.at_slowest + 1, self.waiting)

    def recounted(self) -> "Clocks":
        """Find the slowest anew; without any replica it stays."""
        slowest = min((c for segment in self.segments for c in segment.values()), default=self.slowest)
        at_slowest = sum(c == slowest for segment in self.segments for c in segment.values())
        return self._replace(slowest=slowest, at_slowest=at_slowest)

    def _with(self, replica: ReplicaId, clock: Clock | None) -> tuple[Segment, ...]:
        """Return the segments with another clock of a replica; None: it has none."""
        number = replica // SEGMENT
        segments = (*self.segments, *[dict[ReplicaId, Clock]()] * (number + 1 - len(self.segments)))
        own = {r: c for r, c in segments[number].items() if r != replica} if clock is None else dict(segments[number])
        if clock is not None:
            own[replica] = clock
        return (*segments[:number], own, *segments[number + 1 :])


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
        combine: ``mean`` weighs each Δ 1/P, so that under plain SGD P of them move A as far as a synchronous update;
            ``sum`` weighs 1. Adam and others that divide a gradient by its size take the same steps under both, so of
            each Δ one that is about as long as a synchronous one.

    Raises:
        InputError: a negative bound.
    """

    bound: int = 3
    combine: Combine = "mean"

    def __post_init__(self) -> None:
        check_int("stale-synchronous:bound", self.bound, least=0)
        check_choice("stale-synchronous:combine", self.combine, get_args(Combine))

    def start(self, replicas: int) -> Clocks:
        return Clocks.at_start(replicas)

    def arrived(self, state: Clocks, arrival: Arrival) -> tuple[Clocks, Decision]:
        replica, moved = arrival.replica, state.moved(arrival.replica)
        # Others that wait may go on only if the slowest has moved.
        if moved.slowest > state.slowest:
            after, free = self._go_on(moved._replace(waiting=moved.waiting.add(replica)))
        elif moved.clock(replica) <= moved.slowest + self.bound:
            after, free = moved, released((replica,))
        else:
            after, free = moved._replace(waiting=moved.waiting.add(replica)), ()
        if arrival.samples == 0:
            return after, (Discard((arrival,)), *free)
        weight = 1.0 / state.replicas if self.combine == "mean" else 1.0
        return after, (Apply(((arrival, weight),)), *free)

    def left(self, state: Clocks, replica: ReplicaId, reason: LeaveReason) -> tuple[Clocks, Decision]:
        del reason
        return self._go_on(state.without(replica))

    def joined(self, state: Clocks, replica: ReplicaId) -> tuple[Clocks, Decision]:
        return state.joined(replica), ()

    def waits_for(self, state: Clocks) -> int:
        del state
        return 1

    def _go_on(self, state: Clocks) -> tuple[Clocks, Decision]:
        """Release those that wait, and are near enough to the slowest."""
        limit = state.slowest + self.bound
        free = tuple(r for r in state.waiting if state.clock(r) <= limit)
        if not free:
            return state, ()
        gone = set(free)
        return state._replace(waiting=Chunked.of(r for r in state.waiting if r not in gone)), released(free)

"""Batches that are dealt out in portions: whoever is free computes the next one (Sandblaster)."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, final

from paceline.aggregation.base import Aggregation, Apply, Arrival, Cancel, Decision, Discard, Portion, Release
from paceline.core.errors import check_int
from paceline.core.registry import register
from paceline.core.types import LeaveReason, ReplicaId


class Dealing(NamedTuple):
    """The state of :class:`Sandblaster`."""

    batch: int
    queue: tuple[int, ...]
    """Portions of the batch that nobody computes, nor has computed."""
    at_work: Mapping[ReplicaId, int] = {}
    """Who computes which portion of it, in the order in which they were given out."""
    results: Mapping[int, Arrival] = {}
    """Δs of its portions that have arrived."""
    idle: frozenset[ReplicaId] = frozenset()
    """Replicas for which there is no portion."""
    homes: Mapping[int, ReplicaId] = {}
    """Who has computed each portion last: its samples may be in that replica's caches."""


@final
@register("sandblaster")
@dataclass(frozen=True)
class Sandblaster(Aggregation[Dealing]):
    """Cut each batch into portions, give the next one to whoever is free, and apply the mean once all are there.

    Dean et al. 2012, section 4.2, with 3 replicas and 8 portions; replica 2 is slow::

        replica 0   |-0-|-3-|-5-|-7-|-6'|-0-      6': again, as nothing else is left; it arrives before 6 and counts
        replica 1   |--1--|--4--|--6''...|-1-     ...: cancelled, for all portions are there
        replica 2   |----2----|----6.....|-2-
                                        | Apply of 0 to 7, as if 8 replicas had computed them in lockstep

    A portion is one batch of the program (with ``accumulate=n`` it is n of them, pushed as one Δ). Each counts once and
    Δs are summed in the order of portions, so A's bits depend neither on who was fast nor on who has died.

    Args:
        portions: of a batch; many more than replicas, so that all end at about the same time. With as many as the
            training set has batches, a batch is all of it, as L-BFGS needs.
        backups: whether a replica for which no portion is left computes one that another has not finished; the first
            result counts.

    Raises:
        InputError: fewer than one portion.
    """

    portions: int = 64
    backups: bool = True

    def __post_init__(self) -> None:
        check_int("sandblaster:portions", self.portions, least=1)

    @property
    def current(self) -> bool:
        return True

    def slots(self, replicas: int) -> int:
        del replicas
        return self.portions + 1  # one replica may compute them all, and one of them that another is faster with

    def start(self, replicas: int) -> Dealing:
        del replicas
        return self._next_batch(0)

    def joined(self, state: Dealing, replica: ReplicaId) -> tuple[Dealing, Decision]:
        return self._deal(state, (replica,))

    def arrived(self, state: Dealing, arrival: Arrival) -> tuple[Dealing, Decision]:
        replica, portion = arrival.replica, state.at_work[arrival.replica]
        at_work = {other: number for other, number in state.at_work.items() if other != replica}
        state = state._replace(at_work=at_work)
        if portion in state.results:
            state, dealt = self._deal(state, (replica,))
            return state, (Discard((arrival,)), *dealt)
        state = state._replace(results={**state.results, portion: arrival}, homes={**state.homes, portion: replica})
        if len(state.results) < self.portions:
            return self._deal(state, (replica,))
        after = self._next_batch(state.batch + 1, state.homes)
        after, dealt = self._deal(after, sorted({replica, *state.idle}), cancel=sorted(at_work))
        return after, (*_applied(state.results), *dealt)

    def left(self, state: Dealing, replica: ReplicaId, reason: LeaveReason) -> tuple[Dealing, Decision]:
        del reason
        at_work = {other: number for other, number in state.at_work.items() if other != replica}
        idle, portion = state.idle - {replica}, state.at_work.get(replica)
        if not (at_work or idle):  # nobody is left
            discarded = (Discard(tuple(state.results.values())),) if state.results else ()
            return self._next_batch(state.batch, state.homes), discarded
        given_up = portion is not None and portion not in {*state.results, *at_work.values()}
        queue = (portion, *state.queue) if portion is not None and given_up else state.queue
        return self._deal(state._replace(queue=queue, at_work=at_work, idle=frozenset()), sorted(idle))

    def waits_for(self, state: Dealing) -> int:
        del state
        return self.portions

    def _next_batch(self, batch: int, homes: Mapping[int, ReplicaId] = {}) -> Dealing:
        return Dealing(batch, tuple(range(self.portions)), homes=homes)

    def _deal(
        self, state: Dealing, free: Iterable[ReplicaId], cancel: Iterable[ReplicaId] = ()
    ) -> tuple[Dealing, Decision]:
        """Give a portion to each of these replicas: free ones, and those that stop what they are at."""
        decision: list[Release | Cancel] = []
        for action, replicas in ((Release, free), (Cancel, cancel)):
            given = dict[ReplicaId, Portion]()
            for replica in replicas:
                number = self._choice(state, replica)
                if number is None:
                    state = state._replace(idle=state.idle | {replica})
                    continue
                given[replica] = Portion(number, state.batch)
                queue = tuple(each for each in state.queue if each != number)
                state = state._replace(queue=queue, at_work={**state.at_work, replica: number})
            if given:
                decision.append(action(tuple(given), tuple(given.values())))
        return state, tuple(decision)

    def _choice(self, state: Dealing, replica: ReplicaId) -> int | None:
        """Return the portion for a replica: its own of the last batch first, then one of who has most of them left."""
        if state.queue:
            homes = [state.homes.get(portion, replica) for portion in state.queue]
            if replica in homes:
                return state.queue[homes.index(replica)]
            slowest, _ = Counter(homes).most_common(1)[0]
            return max(p for p, home in zip(state.queue, homes, strict=True) if home == slowest)
        copies = Counter(portion for portion in state.at_work.values() if portion not in state.results)
        if not (self.backups and copies):
            return None
        return min(copies, key=copies.__getitem__)  # of those with fewest, the one that was begun first


def _applied(results: Mapping[int, Arrival]) -> Decision:
    """Return the update by all portions, in their order."""
    arrivals = [results[portion] for portion in sorted(results)]
    total = sum(arrival.samples for arrival in arrivals)
    if total == 0:
        return (Discard(tuple(arrivals)),)
    return (Apply(tuple((arrival, arrival.samples / total) for arrival in arrivals)),)

"""Rounds of local steps that wait for no straggler: a quorum, a grace window, and replicas that go on meanwhile."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias, final

from paceline.aggregation.base import Action, Aggregation, Arrival, Decision, combined, released
from paceline.aggregation.local_steps import Outer
from paceline.core.delta import Adopt, Change, Delta, Rebase, Replace
from paceline.core.errors import InputError, check_bool, check_int, check_number
from paceline.core.registry import register
from paceline.core.types import LeaveReason, ReplicaId, Seconds

# A share of the replicas that take part, below 1; a number of them; or all.
Quorum: TypeAlias = float | Literal["all"]


class Timing(NamedTuple):
    """How long the Δs of a replica take."""

    began_s: Seconds | None = None
    """When it went on; None: at the start of the run, or as it joined, whose time is not known here."""
    mean_s: Seconds | None = None
    """Mean of its newest Δ and of the mean before; None: not measured."""


class Rounds(NamedTuple):
    """The state of :class:`Decoupled`."""

    replicas: Mapping[ReplicaId, Timing]
    """Those that take part."""
    now_s: Seconds = 0.0
    """Time of the last arrival or tick."""
    open: tuple[Arrival, ...] = ()
    """Δs of the open round."""
    late: tuple[Arrival, ...] = ()
    """Δs for the next round, of replicas that have one in the open round already."""
    waiting: tuple[ReplicaId, ...] = ()
    """Replicas that go on when the open round is merged."""
    closes_s: Seconds = math.inf
    """End of the open round's grace window; infinity: no replica of it is measured."""

    @property
    def sent(self) -> int:
        """Return the number of replicas that take part and have a Δ in the open round."""
        return len(self.replicas.keys() & {arrival.replica for arrival in self.open})

    def go_on(self, replicas: tuple[ReplicaId, ...]) -> "Rounds":
        """Note that replicas go on now."""
        timings = {r: self.replicas[r]._replace(began_s=self.now_s) for r in replicas}
        return self._replace(replicas={**self.replicas, **timings})


@final
@register("decoupled")
@dataclass(frozen=True)
class Decoupled(Aggregation[Rounds]):
    """Merge the changes of those replicas that are in time (Decoupled DiLoCo, arXiv 2604.21428; there: learners).

    Each replica takes ``period`` own steps, sends how far they moved, and goes on at once. A round is merged when all
    replicas have sent, or a ``quorum`` of them and the grace window is over. The window is what the replicas' own steps
    hide: until the first of the round is expected back with its next Δ, and then takes over the new A. With three
    replicas, quorum=2, grace=0.75 (a digit is a Δ that arrives, | a round merged)::

        replica 0   ----0---0---0---0     a Δ takes it 4 s: the round that it joins at 8 s is open until 11 s
        replica 1   -----1----1----1
        replica 2   -------------2--      late for two rounds, in the third by its samples' weight
        merged           |     |   |      no window at 5 s, since nothing is measured; at 15 s all have sent

    The outer optimizer steps on -Σ weight·Δ, weighed by samples, however late a Δ is. A replica that is back before its
    round was merged waits, and its new Δ is for the next round. So of its own Δs the A that it is sent lacks exactly
    the newest, which it adds itself: x becomes A + Δ. Nobody waits for a replica that leaves or dies, and what it has
    sent stays; one that joins takes A.

    From the paper: clocks of their own, quorum, adaptive grace window, weights by what was processed, Nesterov's
    momentum outside. Ours: how long the window is, that x keeps its newest Δ, that a replica waits where its round is
    not merged, ``hold``; and A is sent whole, for fragments in turn need replicas that are all at the same one.

    Args:
        period: own steps between two Δs of a replica.
        quorum: below 1 a share of the replicas that take part, else a number of them, or ``all``.
        grace: how much of the time that a Δ is expected to take (the mean of a replica's newest and of the mean before)
            a round stays open after a replica of it has gone on; the first to be over ends it. 0: no window.
        hold: whether a replica waits until its Δ is merged, and takes A as it is: with quorum=all, DiLoCo.
        outer: None: A += Σ weight·Δ; or the optimizer that takes -Σ weight·Δ for a gradient.

    Raises:
        InputError: an option out of its range, or a quorum of more replicas than there are.
    """

    period: int = 50
    quorum: Quorum = 0.5
    grace: float = 0.75
    hold: bool = False
    outer: Outer | None = field(default_factory=Outer)

    def __post_init__(self) -> None:
        check_int("decoupled:period", self.period, least=1)
        if self.quorum != "all":
            rule = "above 0 and below 1 (a share of the replicas), a whole number of them, or all"
            check_number("decoupled:quorum", self.quorum, rule, _is_quorum, instead=0.5)
        check_number("decoupled:grace", self.grace, "at least 0", lambda grace: grace >= 0, instead=0.75)
        check_bool("decoupled:hold", self.hold)
        if not isinstance(self.outer, Outer | None):
            raise InputError(f"outer={self.outer} is no outer optimizer; write outer=nesterov.")

    @property
    def delta(self) -> Delta:
        return Change(self.period)

    @property
    def adopt(self) -> Adopt:
        return Replace() if self.hold else Rebase()

    def slots(self, replicas: int) -> int:
        del replicas
        # One more than of a replica that stays: one that has died may be back before its Δs are merged.
        return 2 if self.hold else 3

    def resolved(self, *, learning_rate: float | None, replicas: int) -> "Decoupled":
        del learning_rate
        if self.quorum != "all" and self.quorum > replicas:
            raise InputError(
                f"quorum={self.quorum:g} of replicas={replicas} can never have sent; write "
                f"decoupled:quorum={replicas}, or quorum=all."
            )
        return self

    def start(self, replicas: int) -> Rounds:
        return Rounds(dict.fromkeys(range(replicas), Timing()))

    def arrived(self, state: Rounds, arrival: Arrival) -> tuple[Rounds, Decision]:
        replica, now = arrival.replica, arrival.time_s
        state = _measured(state._replace(now_s=now), replica)
        late = not self.hold and any(replica == each.replica for each in state.open)
        if late:
            state = state._replace(late=(*state.late, arrival))
        else:
            state = self._joins(state._replace(open=(*state.open, arrival)), replica)
        if late or self.hold:
            return self._merge_full(state._replace(waiting=(*state.waiting, replica)))
        state, merged = self._merge_full(state.go_on((replica,)))
        return state, (*released((replica,)), *merged)  # the A that lacks this Δ

    def left(self, state: Rounds, replica: ReplicaId, reason: LeaveReason) -> tuple[Rounds, Decision]:
        del reason
        replicas = {r: timing for r, timing in state.replicas.items() if r != replica}
        waiting = tuple(r for r in state.waiting if r != replica)
        return self._merge_full(state._replace(replicas=replicas, waiting=waiting))

    def joined(self, state: Rounds, replica: ReplicaId) -> tuple[Rounds, Decision]:
        return state._replace(replicas={**state.replicas, replica: Timing()}), ()

    def waits_for(self, state: Rounds) -> int:
        present = len(state.replicas)
        if self.quorum == "all":
            return max(1, present)
        # The rounding error of a share, 0.7 * 10 for instance, is no replica.
        count = math.ceil(self.quorum * present - 1e-9) if self.quorum < 1 else int(self.quorum)
        return max(1, min(count, present))

    def deadline(self, state: Rounds) -> Seconds | None:
        if not state.open or state.sent < self.waits_for(state):
            return None
        return state.closes_s if state.closes_s < math.inf else state.now_s

    def tick(self, state: Rounds, time_s: Seconds) -> tuple[Rounds, Decision]:
        state, log = state._replace(now_s=time_s), list[Action]()
        while (deadline := self.deadline(state)) is not None and deadline <= time_s:
            state, merged = self._merge(state)
            log += merged
        state, merged = self._merge_full(state)
        return state, (*log, *merged)

    def _joins(self, state: Rounds, replica: ReplicaId) -> Rounds:
        """Let the open round end before this replica of it, which goes on now, is expected back."""
        timing = state.replicas.get(replica)
        if timing is None or timing.mean_s is None:
            return state
        return state._replace(closes_s=min(state.closes_s, state.now_s + self.grace * timing.mean_s))

    def _merge_full(self, state: Rounds) -> tuple[Rounds, Decision]:
        """Merge rounds in which all replicas that take part have sent."""
        log = list[Action]()
        while state.open and state.sent == len(state.replicas):
            state, merged = self._merge(state)
            log += merged
        return state, tuple(log)

    def _merge(self, state: Rounds) -> tuple[Rounds, Decision]:
        """Merge the open round; the next one has the Δs that were late for it."""
        update = combined(state.open, "mean")
        after = state.go_on(state.waiting)._replace(open=state.late, late=(), waiting=(), closes_s=math.inf)
        for arrival in state.late:
            after = self._joins(after, arrival.replica)
        return after, (*update, *released(state.waiting))


def _measured(state: Rounds, replica: ReplicaId) -> Rounds:
    """Take in how long a replica's Δ has taken."""
    began_s, mean_s = state.replicas[replica]
    if began_s is None:
        return state
    newest_s = state.now_s - began_s
    timing = Timing(began_s, newest_s if mean_s is None else (newest_s + mean_s) / 2)
    return state._replace(replicas={**state.replicas, replica: timing})


def _is_quorum(value: float) -> bool:
    return 0 < value < 1 or (value >= 1 and value == value // 1)

"""F: which Δs are combined, when, with what weights, and who may go on.

A policy is a small frozen value with pure methods. All that changes is an explicit ``state``: every method takes it
and returns the next one beside a :class:`Decision`. No tensor, no process and no clock is in reach of a policy, so one
object runs on every engine, and a test needs nothing but arrivals.

The life of a replica, as a policy sees it::

                 start / joined
                       |
                       v            arrived(Arrival)
                 [ computing ] ------------------------> [ waiting ]
                    ^   |                                   |   |
                    |   +--- Cancel: the attempt is void,   |   |
                    |        it reads the current A <-------+   |  (a Cancel or a Release)
                    +------------ Release ------------------+   |
                                                                v
                 left(replica, "done" | "died" | "cancelled"): P shrinks

A Δ, once arrived, belongs to the policy until it names it in exactly one :class:`Apply` or :class:`Discard`. It stays
good when its replica leaves afterwards. When nobody is left to wait for, nothing may stay behind: with P = 0 a policy
applies or discards all that it holds.

Δs that wait to be applied together, and the replicas that wait with them.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

from paceline.core.delta import Adopt, Delta, Gradient, Replace
from paceline.core.registry import declare, family_of
from paceline.core.text_form import parse_value
from paceline.core.types import Clock, LeaveReason, ReplicaId, Seconds, Version

# ------------------------------------------------------------------------------------------------ what a policy is told

Need: TypeAlias = Literal["loss", "norm", "agreement", "server"]
"""What an engine must observe for a policy; nothing is computed unasked.

``loss``: ``Arrival.loss``; ``norm``: ``observed["norm"]``, the Euclidean norm of Δ; ``agreement``:
``observed["agreement"]``, the cosine between Δ and the last applied Σ weight·Δ; ``server``: ``observed["server"]``, the
fraction of the time since the previous arrival in which the owners were busy.
"""


NOTHING: Mapping[str, float] = MappingProxyType({})
"""What an engine has observed where nothing was asked for."""


class Arrival(NamedTuple):
    """One Δ that has reached the coordinator; (replica, clock) names it."""

    replica: ReplicaId
    version: Version
    """Which A it was computed from."""
    clock: Clock
    """The replica's own count of attempts, this one included; cancelled and discarded ones ticked too."""
    samples: int
    """How many samples it is the mean over; 0 where the data's last round had none for this replica (Δ = 0)."""
    time_s: Seconds
    finite: bool = True
    """Always true where a policy sees it: an engine stops at a Δ that is not finite, or discards it and counts it."""
    loss: float | None = None
    observed: Mapping[str, float] = NOTHING


# ------------------------------------------------------------------------------------------------ what a policy decides


@dataclass(frozen=True, slots=True)
class Apply:
    """One optimizer step on Σ weight·Δ, in ascending replica order, with learning rate · ``rate``; version + 1."""

    deltas: tuple[tuple[Arrival, float], ...]
    rate: float = 1.0

    @property
    def alone(self) -> bool:
        """Whether it is one Δ, of weight 1."""
        return len(self.deltas) == 1 and self.deltas[0][1] == 1.0


@dataclass(frozen=True, slots=True)
class Release:
    """These replicas are sent the A of this point in the log and go on."""

    replicas: tuple[ReplicaId, ...]


@dataclass(frozen=True, slots=True)
class Discard:
    """These Δs are dropped and counted."""

    arrivals: tuple[Arrival, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """These replicas stop computing, take the A of this point in the log and begin anew."""

    replicas: tuple[ReplicaId, ...]


Action: TypeAlias = Apply | Release | Discard | Cancel
Decision: TypeAlias = tuple[Action, ...]
"""An ordered log: owners execute it from left to right, so every part of A goes through the same versions."""

Combine: TypeAlias = Literal["mean", "sum"]

S = TypeVar("S")


@declare("aggregation")
class Aggregation(ABC, Generic[S]):
    """A policy: F of the equation. Subclasses are frozen dataclasses, registered under a name in the text form."""

    @property
    def delta(self) -> Delta:
        """What a replica computes between two pushes."""
        return Gradient()

    @property
    def adopt(self) -> Adopt:
        """What a replica does with the A it is sent."""
        return Replace()

    @property
    def needs(self) -> frozenset[Need]:
        """What the engine must observe."""
        return frozenset()

    def slots(self, replicas: int) -> int:
        """How many Δs of one replica there can be at once, held or under way: 1 where a replica waits for its own."""
        del replicas
        return 1

    def resolved(self, *, learning_rate: float | None, replicas: int) -> "Aggregation[Any]":
        """This policy with what depends on the program and the mesh filled in; raises InputError where they don't fit.

        ``learning_rate`` is that of the optimizer's first group, None where it has none.
        """
        del learning_rate, replicas
        return self

    @abstractmethod
    def start(self, replicas: int) -> S:
        """The state with replicas 0 .. replicas-1 computing from A_0."""

    @abstractmethod
    def arrived(self, state: S, arrival: Arrival) -> tuple[S, Decision]:
        """A Δ has arrived; its replica waits until it is released."""

    @abstractmethod
    def left(self, state: S, replica: ReplicaId, reason: LeaveReason) -> tuple[S, Decision]:
        """A replica takes no further part. What it has sent is still held and still good.

        A replica that is "done" leaves as soon as it would be released (it is then not waiting any more).
        """

    @abstractmethod
    def joined(self, state: S, replica: ReplicaId) -> tuple[S, Decision]:
        """A replica, new or back, begins to compute from the current A (the engine sends it by itself)."""

    @abstractmethod
    def waits_for(self, state: S) -> int:
        """K: how many Δs the next update waits for, as it stands now."""


def parse(text: str) -> Aggregation[Any]:
    """Return the policy that a text says.

    Raises:
        InputError: an unknown policy or option, with the nearest name; a value of the wrong type or out of its range.

    >>> parse("smooth-switch:every=5/lr,combine=sum")
    SmoothSwitch(every=PerLearningRate(multiple=5.0), threshold=None, combine='sum', hold=True, count='received')
    """
    family = family_of(Aggregation)
    assert family is not None
    policy: Aggregation[Any] = parse_value(family, text)
    return policy


def combined(arrivals: tuple[Arrival, ...], combine: Combine, rate: float = 1.0) -> Decision:
    """The Apply of these Δs under ``mean`` (samples / Σ samples) or ``sum`` (1 each); Discard where none has a sample.

    >>> a, b = Arrival(1, 0, 1, 32, 0.0), Arrival(0, 0, 1, 96, 0.0)
    >>> [(d.replica, w) for d, w in combined((a, b), "mean")[0].deltas]
    [(0, 0.75), (1, 0.25)]
    """
    if not arrivals:
        return ()
    if len(arrivals) == 1 and arrivals[0].samples:
        return (Apply(((arrivals[0], 1.0),), rate),)
    total = sum(a.samples for a in arrivals)
    if total == 0:
        return (Discard(arrivals),)
    weigh = (lambda a: a.samples / total) if combine == "mean" else (lambda a: float(a.samples > 0))
    ordered = sorted(arrivals, key=lambda a: (a.replica, a.clock))
    return (Apply(tuple((a, weigh(a)) for a in ordered), rate),)


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

"""F: which Δs are combined, when, with what weights, and which replicas may go on.

A policy is a small frozen value with pure methods. All that changes is an explicit ``state``: every method takes it
and returns the next one together with a :class:`Decision`. No tensor, no process and no clock is in reach
of a policy, so one object runs on every engine, and a test needs nothing but arrivals.

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

Between arrivals a policy may have a timer: at its ``deadline`` the engine calls ``tick``. All times are the run's, in
seconds, as in :attr:`Arrival.time_s`::

    arrived(Δ at 0.7 s)   arrived(Δ at 1.0 s)
            |                     | tick(1.0 s)       the state's deadline is 1.0 s; Δs that are there then come first

A Δ, once arrived, belongs to the policy until it names it in exactly one :class:`Apply` or :class:`Discard`. It stays
good when its replica leaves afterwards. When no replica is left, no Δ may stay behind: with P = 0 a policy
applies or discards all that it holds.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar, final

from paceline.core.delta import Adopt, Delta, Gradient, Replace
from paceline.core.registry import declare, family_of
from paceline.core.text_form import parse_value
from paceline.core.types import Clock, LeaveReason, ReplicaId, Seconds, Version
from paceline.reduction.base import Reducer

# ------------------------------------------------------------------------------------------------ inputs of a policy

# Observations that a policy needs of the engine; nothing else is computed.
#
# loss: Arrival.loss; norm: observed["norm"], the Euclidean norm of Δ; agreement:
# observed["agreement"], the cosine between Δ and the last applied Σ weight·Δ; server: observed["server"], the
# fraction of the time since the previous arrival in which the owners were busy.
Need: TypeAlias = Literal["loss", "norm", "agreement", "server"]


# Observations of an engine if the policy needs none.
NOTHING: Mapping[str, float] = MappingProxyType({})


class Arrival(NamedTuple):
    """One Δ that has reached the coordinator; (replica, clock) names it."""

    replica: ReplicaId
    version: Version
    """Version of A that it was computed from."""
    clock: Clock
    """The replica's own count of attempts, this one included; cancelled and discarded ones ticked too."""
    samples: int
    """Number of samples of its mean; 0 if the data's last round has none for this replica (Δ = 0)."""
    time_s: Seconds
    finite: bool = True
    """Always true where a policy sees it: an engine stops at a Δ that is not finite, or discards it and counts it."""
    loss: float | None = None
    observed: Mapping[str, float] = NOTHING


# ------------------------------------------------------------------------------------------------ decisions of a policy


@dataclass(frozen=True, slots=True)
class Apply:
    """One optimizer step on Σ weight·Δ, summed in the order given, with learning rate · ``rate``; version + 1.

    An order that does not depend on who came first, as that of :func:`combined`, makes runs repeatable to the bit.
    Where the policy has a :attr:`~Aggregation.reducer`, that combines them in place of the sum.
    """

    deltas: tuple[tuple[Arrival, float], ...]
    rate: float = 1.0

    @property
    def alone(self) -> bool:
        """Return whether it is one Δ, of weight 1."""
        return len(self.deltas) == 1 and self.deltas[0][1] == 1.0


class Portion(NamedTuple):
    """The data of a Δ, of a policy that has :attr:`~Aggregation.portions`."""

    number: int
    """Of the portion: 0 to portions - 1."""
    batch: int
    """Number of the batch since the policy started; it may be given to several replicas."""


@dataclass(frozen=True, slots=True)
class Release:
    """Send these replicas the A of this point in the log and let them go on.

    Where the policy has :attr:`~Aggregation.portions` of a batch, each with the portion that it is to compute.
    """

    replicas: tuple[ReplicaId, ...]
    portions: tuple[Portion, ...] = ()


@dataclass(frozen=True, slots=True)
class Discard:
    """Drop and count these Δs."""

    arrivals: tuple[Arrival, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Let these replicas stop computing, take the A of this point in the log and begin anew.

    With the portions that they are to compute then, as in :class:`Release`.
    """

    replicas: tuple[ReplicaId, ...]
    portions: tuple[Portion, ...] = ()


Action: TypeAlias = Apply | Release | Discard | Cancel
# An ordered log: servers execute it from left to right, so every part of A goes through the same versions.
Decision: TypeAlias = tuple[Action, ...]

Combine: TypeAlias = Literal["mean", "sum"]

S = TypeVar("S")
T = TypeVar("T")


@declare("aggregation")
class Aggregation(ABC, Generic[S]):
    """A policy: F of the equation. Subclasses are frozen dataclasses, registered under a name in the text form."""

    @property
    def delta(self) -> Delta:
        """Kind of Δ that a replica computes between two pushes.

        Of a change, a policy's field ``outer``, if it has one, is the optimizer that steps on the negative
        (:class:`paceline.aggregation.local_steps.Outer`).
        """
        return Gradient()

    @property
    def adopt(self) -> Adopt:
        """Way in which a replica adopts the A that it receives."""
        return Replace()

    @property
    def needs(self) -> frozenset[Need]:
        """Observations that the engine must make."""
        return frozenset()

    @property
    def collective(self) -> Combine | None:
        """How one collective of all replicas makes each update; None: it has not the Δs of all of them, made of one A.

        So where replicas hold A themselves, no server is needed.
        """
        return None

    @property
    def current(self) -> bool:
        """Whether all Δs of an update are of the A that it updates."""
        return self.collective is not None

    @property
    def portions(self) -> int | None:
        """Number of portions into which each batch is cut, where the policy says who computes which of them.

        The data are divided as among so many replicas. :meth:`start` is called without replicas; those of the start are
        told to :meth:`joined`, as all others are, which has to release them with their portion.
        None: each replica takes the batches of its own stream.
        """
        return None

    @property
    def reducer(self) -> Reducer | None:
        """How the Δs of an update are combined; None: as Σ weight·Δ."""
        return None

    def slots(self, replicas: int) -> int:
        """Return the most Δs of one replica at once, held or under way: 1 if a replica waits for its own."""
        del replicas
        return 1

    def resolved(self, *, learning_rate: float | None, replicas: int) -> "Aggregation[Any]":
        """Return this policy with all that depends on the program and the mesh; raises InputError if they don't fit.

        ``learning_rate`` is that of the optimizer's first group, None if it has none.
        """
        del learning_rate, replicas
        return self

    @abstractmethod
    def start(self, replicas: int) -> S:
        """Return the state with replicas 0 .. replicas-1 computing from A_0."""

    @abstractmethod
    def arrived(self, state: S, arrival: Arrival) -> tuple[S, Decision]:
        """Take in a Δ; its replica waits until it is released."""

    @abstractmethod
    def left(self, state: S, replica: ReplicaId, reason: LeaveReason) -> tuple[S, Decision]:
        """Take out a replica. The Δs that it has sent are still held and still valid.

        A replica that is "done" leaves as soon as it would be released (it is then not waiting any more).
        """

    @abstractmethod
    def joined(self, state: S, replica: ReplicaId) -> tuple[S, Decision]:
        """Take in a replica, new or back, that computes from the current A (the engine sends it by itself).

        Where the policy has :attr:`portions`, it has to release the replica.
        """

    @abstractmethod
    def waits_for(self, state: S) -> int:
        """Return K, the number of Δs that the next update waits for, as of now."""

    def deadline(self, state: S) -> Seconds | None:
        """Return the time at which :meth:`tick` is to be called; None: there is no timer.

        One that has passed counts as now. A policy with a ``collective`` has no timer, for no server waits.
        """
        del state
        return None

    def tick(self, state: S, time_s: Seconds) -> tuple[S, Decision]:
        """Decide at the deadline, or soon after: ``time_s`` is the time by now.

        The next deadline must be later, and if all replicas wait, some must go on.
        """
        del time_s
        return state, ()


class Unsynchronized(Aggregation[S], ABC):
    """A policy under which no replica ever waits for another, so that joining and leaving change nothing."""

    @final
    def left(self, state: S, replica: ReplicaId, reason: LeaveReason) -> tuple[S, Decision]:
        del replica, reason
        return state, ()

    @final
    def joined(self, state: S, replica: ReplicaId) -> tuple[S, Decision]:
        del replica
        return state, ()

    @final
    def waits_for(self, state: S) -> int:
        del state
        return 1


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


def combined(deltas: Iterable[Arrival], combine: Combine, rate: float = 1.0) -> Decision:
    """Return the Apply of Δs under ``mean`` (samples / Σ samples) or ``sum`` (1 each); Discard if none has a sample.

    >>> a, b = Arrival(1, 0, 1, 32, 0.0), Arrival(0, 0, 1, 96, 0.0)
    >>> [(d.replica, w) for d, w in combined((a, b), "mean")[0].deltas]
    [(0, 0.75), (1, 0.25)]
    """
    arrivals = tuple(deltas)
    if not arrivals:
        return ()
    if len(arrivals) == 1 and arrivals[0].samples:
        return (Apply(((arrivals[0], 1.0),), rate),)
    total = sum(a.samples for a in arrivals)
    if total == 0:
        return (Discard(arrivals),)
    # In ascending replica order, so that every server and rank sums in the same order.
    weigh = (lambda a: a.samples / total) if combine == "mean" else (lambda a: float(a.samples > 0))
    ordered = sorted(arrivals, key=lambda a: (a.replica, a.clock))
    return (Apply(tuple((a, weigh(a)) for a in ordered), rate),)


# Values of a chunk: one value more costs a copy of so many, and rarely one of the chunks.
CHUNK = 64


@dataclass(slots=True, unsafe_hash=True)  # nobody writes it; to make a frozen one takes three times as long
class Chunked(Generic[T]):
    """A sequence that never changes, and grows at its end, at a cost that hardly depends on its length.

    >>> three = Chunked.of((1, 2)).add(3)
    >>> len(three), list(three), bool(Chunked())
    (3, [1, 2, 3], False)
    """

    full: tuple[tuple[T, ...], ...] = ()
    """Chunks of :data:`CHUNK` values each, but for the first."""
    last: tuple[T, ...] = ()
    size: int = 0

    @classmethod
    def of(cls, values: Iterable[T]) -> "Chunked[T]":
        """Return the sequence of these values."""
        first = tuple(values)
        return cls((first,), (), len(first))

    def add(self, value: T) -> "Chunked[T]":
        """Return the sequence with one value more."""
        last = (*self.last, value)
        if len(last) < CHUNK:
            return Chunked(self.full, last, self.size + 1)
        return Chunked((*self.full, last), (), self.size + 1)

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[T]:
        return chain(*self.full, self.last)


class Buffer(NamedTuple):
    """State of every policy with a threshold."""

    alive: frozenset[ReplicaId]
    """Replicas that take part; len(alive) is P."""
    held: Chunked[Arrival] = Chunked()
    """Δs that have arrived and are neither applied nor discarded, also of replicas that have left since."""
    waiting: Chunked[ReplicaId] = Chunked()
    """Replicas of ``alive`` that have arrived and are not released."""

    def add(self, arrival: Arrival) -> "Buffer":
        """Add a Δ, whose replica waits."""
        return Buffer(self.alive, self.held.add(arrival), self.waiting.add(arrival.replica))

    def without(self, replica: ReplicaId) -> "Buffer":
        """Remove a replica; its Δs stay."""
        return Buffer(self.alive - {replica}, self.held, Chunked.of(r for r in self.waiting if r != replica))

    def joined(self, replica: ReplicaId) -> "Buffer":
        """Add a computing replica."""
        return self._replace(alive=self.alive | {replica})

    def settle(self, k: int, combine: Combine, *, hold: bool = True, cancel: bool = False) -> "tuple[Buffer, Decision]":
        """Apply the held Δs once they are enough, and release the replicas that may go on.

        Args:
            k: Δs per update. With ``hold`` Δs of replicas that have left don't count, but are applied with the others:
                so a round is a round of all replicas that take part. Without any, one Δ is enough.
            combine: rule of their weights.
            hold: whether a replica waits until its Δ is applied, or goes on at once.
            cancel: whether an update ends the attempts of those that still compute.
        """
        enough = (self.waiting if hold else self.held).size >= k if self.alive else self.held.size > 0
        if not enough:
            return (self, ()) if hold else (self._replace(waiting=Chunked()), released(self.waiting))
        update = combined(self.held, combine)
        # Without a sample there was no update: the A that the others compute with is still the current one.
        late = sorted(self.alive.difference(self.waiting)) if cancel and updates(update) else []
        cancelled = (Cancel(tuple(late)),) if late else ()
        return Buffer(self.alive), (*update, *cancelled, *released(self.waiting))


def released(waiting: Iterable[ReplicaId]) -> Decision:
    """Release all waiting replicas, in ascending order."""
    replicas = tuple(sorted(waiting))
    return (Release(replicas),) if replicas else ()


def updates(decision: Decision) -> int:
    """Return the number of updates of A in a decision."""
    count = 0
    for action in decision:  # of an arrival, mostly none
        count += type(action) is Apply
    return count

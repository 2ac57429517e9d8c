"""Virtual time: the queue of events, durations of the parts of a step, extra delays of slowed replicas."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from heapq import heappop, heappush
from typing import Any, Generic, Literal, TypeAlias, TypeVar, final, get_args

import numpy as np

from paceline.clock.distributions import Constant, Distribution, finite, number, parse, show
from paceline.clock.network import Network
from paceline.core.errors import InputError, check_choice
from paceline.core.types import ReplicaId, Seconds

Event = TypeVar("Event")


@final
class EventQueue(Generic[Event]):
    """Events in order of time; those of one time in the order in which they were pushed.

    Events themselves are never compared, so any object will do, and the order depends on nothing but the calls.

    >>> queue = EventQueue[str]()
    >>> queue.push(2.0, "late"); queue.push(1.0, "first"); queue.push(1.0, "second")
    >>> [queue.pop() for _ in range(3)], queue.now_s
    (['first', 'second', 'late'], 2.0)
    """

    def __init__(self) -> None:
        self.now_s: Seconds = 0.0
        """The time of the event popped last."""
        self._heap: list[tuple[Seconds, int, Event]] = []
        self._pushed = 0

    def push(self, time_s: Seconds, event: Event) -> None:
        """Schedule ``event`` at ``time_s``, which may be now but never before."""
        assert self.now_s <= time_s < math.inf, f"event at {time_s} s, but it is {self.now_s} s: {event!r}"
        # The running number makes ties first in, first out, and keeps heapq from comparing events.
        heappush(self._heap, (time_s, self._pushed, event))
        self._pushed += 1

    def pop(self) -> Event:
        """Take the next event and move the clock to it; an ``IndexError`` if there is none."""
        self.now_s, _, event = heappop(self._heap)
        return event

    @property
    def next_s(self) -> Seconds:
        """Return when the next event happens; infinity where there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Event]:
        """Yield the events in the order in which they are to happen."""
        return (event for _, _, event in sorted(self._heap, key=lambda entry: entry[:2]))


_CHOICE = int.from_bytes(b"slowed replicas")
_DELAY_DRAWS = int.from_bytes(b"delays")
_DELAY_EXAMPLE = "fraction=0.5 normal:mean=0,std=0.25"


@final
@dataclass(frozen=True)
class Delay:
    """A fixed part of the replicas draws an extra delay for each gradient.

    Which replicas those are depends on the seed and P alone, and the k-th delay of replica r on (seed, r, k) alone: all
    strategies and engines meet the same delays.

    Args:
        distribution: of the delay of one gradient, in seconds.
        fraction: of the replicas, 0 to 1; rounded to whole replicas.

    Raises:
        InputError: a fraction outside 0 to 1.

    >>> delay = Delay.parse("normal:mean=0,std=0.25")
    >>> str(delay)
    'fraction=0.5 normal:mean=0,std=0.25'
    >>> sorted(delay.slowed(replicas=6, seed=0))
    [0, 3, 4]
    """

    distribution: Distribution
    fraction: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= finite(self.fraction, "fraction") <= 1:
            raise InputError(f"fraction={show(self.fraction)} is outside 0 to 1; write fraction=0.5, say.")

    @classmethod
    def parse(cls, text: str) -> "Delay":
        """Return the delay that ``text`` describes: a distribution, and ``fraction=`` if it is not one half.

        Raises:
            InputError: not exactly one distribution, or one of the two is not what it should be.
        """
        words = text.split()
        fractions = [word.removeprefix("fraction=") for word in words if word.startswith("fraction=")]
        others = [word for word in words if not word.startswith("fraction=")]
        if len(others) != 1 or len(fractions) > 1:
            raise InputError(
                f"delay {text!r} must be one distribution and at most one fraction; write {_DELAY_EXAMPLE!r}."
            )
        return cls(parse(others[0]), *(number(fraction, "fraction") for fraction in fractions))

    def __str__(self) -> str:
        return f"fraction={show(self.fraction)} {self.distribution}"

    def slowed(self, replicas: int, seed: int) -> frozenset[ReplicaId]:
        """Return the replicas that draw delays: ``round(fraction * replicas)`` of them."""
        return _first(round(self.fraction * replicas), replicas, seed)

    def stream(self, replica: ReplicaId, replicas: int, seed: int) -> Iterator[Seconds] | None:
        """Return the delays of a replica's gradients, without end; None if it is not slowed."""
        if replica not in self.slowed(replicas, seed):
            return None
        return self.distribution.stream(np.random.default_rng([seed, _DELAY_DRAWS, replica]))


@lru_cache(maxsize=4)
def _first(count: int, replicas: int, seed: int) -> frozenset[ReplicaId]:
    """Return the first replicas of a random order; cached, for each replica asks."""
    return frozenset(np.random.default_rng([seed, _CHOICE, replicas]).permutation(replicas)[:count].tolist())


# Instead of a distribution: the time that computing the gradient really took.
Measured: TypeAlias = Literal["measured"]

_DRAWS = int.from_bytes(b"times")
_Part: TypeAlias = Literal["compute", "transfer", "apply", "gradient"]
_PARTS = get_args(_Part)  # their order is part of the seeds
_STEP, _NOTHING = Constant(0.01), Constant(0.0)
_EXAMPLE = "compute=0.01 transfer=0 apply=0 gradient=0"
_NETWORK_EXAMPLE = "compute=0.01 network=cluster.toml"


@final
@dataclass(frozen=True)
class Times:
    """Seconds of virtual time; an update of K gradients occupies the server for ``apply + K * gradient``.

    ::

        replica   |-- compute --|- delay -|- transfer -|                        |- transfer -|-- compute --
        server                                         |- apply + K * gradient -|

    The k-th draw of each stream depends on the seed, the replica and k alone.

    Args:
        compute: of one Δ; ``"measured"`` takes what it really took, and the run is then not reproducible.
        transfer: of one message, replica to server or back; drawn for each.
        apply: of one update of A.
        gradient: of each gradient that goes into an update.
        network: hosts and links that messages take, instead of ``transfer``; in the text form the file of a cluster,
            ``network=cluster.toml``, relative to the working directory. The n servers of A share an update, which then
            takes (apply + K · gradient) / n. See clock/network.py.

    Written as ``measured`` alone, compute, transfer and apply are all measured, piece by piece, with as many processes
    at work as there will be workers: the result is the duration of a step on this host.

    Raises:
        InputError: transfer or apply is measured, but not all three are; or ``transfer`` is given, and ``network`` too.

    >>> times = Times.parse("transfer=exponential:mean=0.001")
    >>> str(times)
    'compute=0.01 transfer=exponential:mean=0.001 apply=0 gradient=0'
    >>> next(times.stream("apply", seed=0))
    0.0
    """

    compute: Distribution | Measured = _STEP
    transfer: Distribution | Measured = _NOTHING
    apply: Distribution | Measured = _NOTHING
    gradient: Distribution = _NOTHING
    network: Network | None = None

    def __post_init__(self) -> None:
        if self.network is not None and self.transfer != _NOTHING:
            raise InputError(
                f"times={str(self)!r}: the network says how long a message takes, and so does transfer; write "
                f"{_NETWORK_EXAMPLE!r}, or transfer= alone"
            )
        if "measured" in (self.transfer, self.apply) and not self.all_measured:
            raise InputError(
                f"times={str(self)!r}: transfer and apply are measured together with compute; write times='measured'"
            )

    @property
    def all_measured(self) -> bool:
        """Return whether a step is put together of measured pieces."""
        return self.compute == self.transfer == self.apply == "measured"

    @classmethod
    def parse(cls, text: str) -> "Times":
        """Return the times that ``text`` describes; others stay at their default.

        Raises:
            InputError: an unknown name (with the nearest known one), a negative or unreadable value, or ``measured``
                where that can't be.
        """
        if text.strip() == "measured":
            return cls("measured", "measured", "measured")
        if not text.strip():
            raise InputError(f"times={text!r} says nothing; write {_EXAMPLE!r}, or leave it out.")
        values: dict[str, Any] = {}
        for word in text.split():
            key, equals, value = word.partition("=")
            if not equals or not value:
                raise InputError(f"times: {word!r} is not key=value; write {_EXAMPLE!r}.")
            if key in values:
                raise InputError(f"times: {key} is given twice, {values[key]} and {value}; write {key}={value} alone.")
            check_choice("time", key, [each.name for each in fields(cls)])
            values[key] = Network.read(value) if key == "network" else _value(key, value)
        return cls(**values)

    def __str__(self) -> str:
        given = ((each.name, getattr(self, each.name)) for each in fields(self))
        return " ".join(f"{name}={value}" for name, value in given if value is not None)

    def stream(self, part: _Part, seed: int, *replica: ReplicaId) -> Iterator[Seconds]:
        """Return the draws of one part, without end; it must not be measured.

        Args:
            part: ``compute`` of a replica's Δs, ``transfer`` of the messages to and from a replica, ``apply`` of each
                update, whatever it is made of, or ``gradient`` of each gradient of an update.
            seed: of the run.
            replica: for compute and transfer.
        """
        distribution: Distribution | Measured = getattr(self, part)
        assert not isinstance(distribution, str), f"{part} is measured"
        return distribution.stream(np.random.default_rng([seed, _DRAWS, _PARTS.index(part), *replica]))


def _value(key: str, value: str) -> Distribution | Measured:
    if value != "measured":
        try:
            return parse(value, key)
        except InputError as error:
            if str(error).startswith(f"{key}="):
                raise
            raise InputError(f"{key}={value}: {error}") from error
    if key == "gradient":
        raise InputError("gradient=measured, but it is measured with apply; write times='measured'")
    return "measured"

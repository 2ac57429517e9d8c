"""What was measured of one program on one host: numbers with where they come from, ready for a file.

::

    seconds of a unit, b samples      fixed + each · b         launching operators, and what grows with the batch
    bytes that it saves               fixed + each · b

A unit is an operator of the captured model with its loss, or several that can't be cut apart. Nothing here imports
torch: a profile that was saved is planned with as a shape is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from paceline.core.types import Seconds
from paceline.plan.base import Arrangement, Collective, Numerics, Provenance
from paceline.plan.searching.carried import pipelined


@dataclass(frozen=True, slots=True)
class Line:
    """``fixed + each · samples``, neither of them below 0.

    >>> Line.through({8: 3.0, 32: 9.0})
    Line(fixed=1.0, each=0.25)
    >>> Line.through({8: 4.0, 32: 3.0}).of(100)
    3.5
    """

    fixed: float = 0.0
    each: float = 0.0

    @classmethod
    def through(cls, points: Mapping[int, float]) -> "Line":
        """The nearest to some points, by least squares; of one point a line through 0."""
        middle, height = fmean(points), fmean(points.values())
        spread = sum((x - middle) ** 2 for x in points)
        if not spread:
            return cls(0.0, height / middle)
        each = max(0.0, sum((x - middle) * (y - height) for x, y in points.items()) / spread)
        fixed = height - each * middle
        return cls(fixed, each) if fixed >= 0 else cls(0.0, height / middle)

    def of(self, samples: float) -> float:
        """At so many."""
        return self.fixed + self.each * samples

    def times(self, factor: float) -> "Line":
        """So many times as much."""
        return Line(self.fixed * factor, self.each * factor)


@dataclass(frozen=True, slots=True)
class Machine:
    """Where it was measured."""

    processor: str
    cores: int
    memory_bytes: int
    torch: str


@dataclass(frozen=True, slots=True)
class Unit:
    """What a unit is, whoever runs it."""

    name: str
    parameters: int
    """Elements, with those that it shares."""
    saved: Line
    """Bytes kept for backward."""
    output: Line
    """Bytes that go on, where the model is cut behind it."""
    tied: str = ""
    """What it shares with others; empty: nothing."""


@dataclass(frozen=True, slots=True)
class Busy:
    """What units take where so many workers are at work at the same time."""

    workers: int
    threads: int
    """Of each."""
    forward: Sequence[Line]
    """Seconds, by unit."""
    backward: Sequence[Line]
    low: float
    """The 5th of 100 passes of a whole batch, of their median."""
    high: float
    """The 95th."""

    @property
    def spread(self) -> float:
        """How far, relatively, one pass may lie from another."""
        return max(1.0 - self.low, self.high - 1.0)


@dataclass(frozen=True, slots=True)
class Sent:
    """A collective of the shards of a unit; bytes as :class:`~paceline.plan.base.Call` counts them."""

    collective: Collective
    size: Line


@dataclass(frozen=True, slots=True)
class Part:
    """What the largest shard has of a unit."""

    work: float = 1.0
    """Of its seconds."""
    parameters: int = 0
    kept: float = 1.0
    """Of what it saves."""
    forward: tuple[Sent, ...] = ()
    backward: tuple[Sent, ...] = ()


@dataclass(frozen=True, slots=True)
class Division:
    """How units are divided into shards, or why they can't be."""

    shards: int
    parts: Sequence[Part] = ()
    refused: str = ""
    once: tuple[Sent, ...] = ()
    """Of a whole step, not of a micro-batch: gradients that all shards have terms of."""


@dataclass(frozen=True, slots=True)
class Point:
    """A collective of so many bytes among so many workers, all of this host."""

    collective: Collective
    workers: int
    size_bytes: int
    seconds: Seconds


@dataclass(frozen=True, slots=True)
class Pieces:
    """Of one step."""

    compute_s: Seconds
    """Of the workers of a replica, from the first to the last of them."""
    copies_s: Seconds
    """To have A and to give Δ."""
    update_s: Seconds
    low: float
    """The 5th of 100 passes, of their median."""
    high: float
    """The 95th."""

    @property
    def step_s(self) -> Seconds:
        """All of them."""
        return self.compute_s + self.copies_s + self.update_s

    def times(self, factor: float) -> "Pieces":
        """So many times as long."""
        return Pieces(self.compute_s * factor, self.copies_s * factor, self.update_s * factor, self.low, self.high)


@dataclass(frozen=True, slots=True)
class ShortRun:
    """Some steps of the program itself by one kind of worker, beside what was foretold of them."""

    arrangement: Arrangement
    step_s: Seconds
    """As it was run."""
    pieces: Pieces
    closed_s: Seconds
    """A step by closed forms alone."""
    closed_compute_s: Seconds
    """Of that, what the workers of a replica do together."""
    beside_bytes: float
    """What the worker that held most held beside what is counted."""

    @property
    def beside_s(self) -> Seconds:
        """What a step takes beside its pieces."""
        return max(0.0, self.step_s - self.pieces.step_s)

    @property
    def share(self) -> float:
        """Of its pieces that a step takes: less than all where they count something twice or were slowed."""
        return min(1.0, self.step_s / self.pieces.step_s)


@dataclass(frozen=True, slots=True)
class Profile:
    """All of it."""

    program: str
    machine: Machine
    units: Sequence[Unit]
    busy: Sequence[Busy]
    """By workers, ascending."""
    divisions: Sequence[Division]
    uncut: str
    """Why the model can't be cut into stages; empty: it can."""
    points: Sequence[Point]
    numerics: Numerics
    update_s: Seconds
    """Of all parameters, by one worker."""
    base_bytes: int
    """Of a process that has no model."""
    flops: float | None
    """Of one sample, forward and backward."""
    flops_per_s: float
    """Of a product of matrices with the threads of one of many workers."""
    parameters: int
    """Elements of the model."""
    batch: int
    """Samples of one replica in a step, where all is as the program says."""
    runs: Mapping[str, ShortRun] = field(default_factory=dict[str, ShortRun])
    """By kind of worker; none of kinds that the program can't have."""
    provenance: Provenance = field(default_factory=dict[str, str])

    def context_bytes(self, arrangement: Arrangement) -> float:
        """Of a worker beside its own part of the model: of the runtime, and of copies."""
        run = self.runs.get(kind(arrangement))
        return self.base_bytes if run is None else max(0.0, run.beside_bytes)

    def at_work(self, workers: int) -> Busy:
        """What was measured with as many workers, or else with the next more, or with most."""
        return next((each for each in self.busy if each.workers >= workers), self.busy[-1])

    def division(self, shards: int) -> Division:
        """Into so many."""
        found = next((each for each in self.divisions if each.shards == shards), None)
        return found or Division(shards, refused=f"was not profiled for shards={shards}")


def kind(arrangement: Arrangement) -> str:
    """What its workers are to each other.

    >>> kind(Arrangement()), kind(Arrangement(replicas=2)), kind(Arrangement(stages=2, shards=2))
    ('alone', 'replicas', 'shards')
    """
    if arrangement.shards > 1:
        return "shards"
    if pipelined(arrangement):
        return "stages"
    return "replicas" if arrangement.replicas > 1 else "alone"

"""What was measured of one program on one host: numbers with where they come from, ready for a file.

::

    seconds of a unit, b samples      fixed + each · b         launching operators, and what grows with the batch
    bytes that it saves               fixed + each · b

A unit is an operator of the captured model with its loss, or several that can't be cut apart. Nothing here imports
torch: a profile that was saved is planned with as a shape is.

Profiles as JSON files; those of another machine are not mistaken for this one's.
"""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from paceline.core.errors import InputError
from paceline.core.safe_files import replacing
from paceline.core.types import Seconds
from paceline.planner.base import Arrangement, Collective, Numerics, Provenance
from paceline.planner.search.supported import pipelined


@dataclass(frozen=True, slots=True)
class LineFit:
    """``fixed + each · samples``, neither of them below 0.

    >>> LineFit.through({8: 3.0, 32: 9.0})
    LineFit(fixed=1.0, each=0.25)
    >>> LineFit.through({8: 4.0, 32: 3.0}).of(100)
    3.5
    """

    fixed: float = 0.0
    each: float = 0.0

    @classmethod
    def through(cls, points: Mapping[int, float]) -> "LineFit":
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

    def times(self, factor: float) -> "LineFit":
        """So many times as much."""
        return LineFit(self.fixed * factor, self.each * factor)


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
    saved: LineFit
    """Bytes kept for backward."""
    output: LineFit
    """Bytes that go on, where the model is cut behind it."""
    tied: str = ""
    """What it shares with others; empty: nothing."""


@dataclass(frozen=True, slots=True)
class Busy:
    """What units take where so many workers are at work at the same time."""

    workers: int
    threads: int
    """Of each."""
    forward: Sequence[LineFit]
    """Seconds, by unit."""
    backward: Sequence[LineFit]
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
    """A collective of the shards of a unit; bytes as :class:`~paceline.planner.base.Call` counts them."""

    collective: Collective
    size: LineFit


@dataclass(frozen=True, slots=True)
class PipelinePart:
    """What the largest shard has of a unit."""

    work: float = 1.0
    """Of its seconds."""
    parameters: int = 0
    kept: float = 1.0
    """Of what it saves."""
    forward: tuple[Sent, ...] = ()
    backward: tuple[Sent, ...] = ()


@dataclass(frozen=True, slots=True)
class UnitSharding:
    """How units are divided into shards, or why they can't be."""

    shards: int
    parts: Sequence[PipelinePart] = ()
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
    divisions: Sequence[UnitSharding]
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

    def division(self, shards: int) -> UnitSharding:
        """Into so many."""
        found = next((each for each in self.divisions if each.shards == shards), None)
        return found or UnitSharding(shards, refused=f"was not profiled for shards={shards}")


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


FORMAT = 2
"""Counted up where older files can't be read any more."""


def this_machine() -> Machine:
    """The one that this process runs on."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(_processor(), len(os.sched_getaffinity(0)), memory, version("torch"))


def save(profile: Profile, path: str | Path) -> None:
    """Write a profile; the file is whole at every moment.

    Raises:
        InputError: it can't be written there.
    """
    text = json.dumps({"format": FORMAT, **asdict(profile)}, indent=1, ensure_ascii=False)
    try:
        with replacing(path) as file:
            file.write(text + "\n")
    except OSError as error:
        raise InputError(f"{path} can't be written: {error}; write a path below a folder of yours") from error


def load(path: str | Path, *, elsewhere: bool = False) -> Profile:
    """Read a profile.

    Args:
        path: of the file.
        elsewhere: whether one of another machine will do: its provenance then says so.

    Raises:
        InputError: there is none, it is damaged, or it is another machine's.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
        if value.pop("format", None) != FORMAT:
            raise ValueError(f"it is not of format {FORMAT}")
        profile: Profile = _made(Profile, value)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{path} is no profile: {error}; write one with paceline.plan(..., profile=path)") from error
    return _of_here(profile, path, elsewhere=elsewhere)


def _of_here(profile: Profile, path: str | Path, *, elsewhere: bool) -> Profile:
    there, here = profile.machine, this_machine()
    if there == here:
        return profile
    differs = ", ".join(
        f"{each.name}={getattr(there, each.name)!r} (here {getattr(here, each.name)!r})"
        for each in fields(Machine)
        if getattr(there, each.name) != getattr(here, each.name)
    )
    if not elsewhere:
        raise InputError(f"{path} was measured on another machine, {differs}; measure anew: write another file")
    marked = {name: f"{text}; on another machine: {differs}" for name, text in profile.provenance.items()}
    return _made(Profile, asdict(profile) | {"provenance": marked})  # type: ignore[no-any-return]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _made(kind: Any, value: Any) -> Any:
    """A value of a type's, from plain ones."""
    if is_dataclass(kind):
        hints, make = get_type_hints(kind), cast(Any, kind)
        return make(**{each.name: _made(hints[each.name], value[each.name]) for each in fields(kind)})
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (tuple, Sequence):
        return tuple(_made(inner[0], each) for each in value)
    if origin is Mapping:
        return {str(key): _made(inner[1], each) for key, each in value.items()}
    if origin in (Union, UnionType):
        return None if value is None else _made(inner[0], value)
    return _plain(kind, value, origin, inner)


def _plain(kind: Any, value: Any, origin: Any, inner: Sequence[Any]) -> Any:
    if origin is Literal:
        if value not in inner:
            raise ValueError(f"{value!r} is none of {', '.join(map(str, inner))}")
        return value
    if not isinstance(value, (int, float) if kind is float else kind) or isinstance(value, bool) != (kind is bool):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value

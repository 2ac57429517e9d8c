"""The profile of one program on one host: measured numbers with their sources, saved as JSON.

::

    seconds of a unit, b samples      fixed + each · b         launching operators, and what grows with the batch
    bytes that it saves               fixed + each · b

A unit is an operator of the captured model with its loss, or several that can't be cut apart. Nothing here imports
torch: a saved profile is planned with as a shape is. A file of another machine is refused.
"""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
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
    """The line ``fixed + each · samples``, neither coefficient below 0.

    >>> LineFit.through({8: 3.0, 32: 9.0})
    LineFit(fixed=1.0, each=0.25)
    >>> LineFit.through({8: 4.0, 32: 3.0}).of(100)
    3.5
    """

    fixed: float = 0.0
    each: float = 0.0

    @classmethod
    def through(cls, points: Mapping[int, float]) -> "LineFit":
        """Fit a line to points by least squares; through a single point and 0."""
        middle, height = fmean(points), fmean(points.values())
        spread = sum((x - middle) ** 2 for x in points)
        if not spread:
            return cls(0.0, height / middle)
        each = max(0.0, sum((x - middle) * (y - height) for x, y in points.items()) / spread)
        fixed = height - each * middle
        return cls(fixed, each) if fixed >= 0 else cls(0.0, height / middle)

    def of(self, samples: float) -> float:
        """Return the value at a number of samples."""
        return self.fixed + self.each * samples

    def times(self, factor: float) -> "LineFit":
        """Return the line scaled by a factor."""
        return LineFit(self.fixed * factor, self.each * factor)


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine of a measurement."""

    processor: str
    cores: int
    memory_bytes: int
    torch: str


@dataclass(frozen=True, slots=True)
class Unit:
    """The properties of a unit that don't depend on the number of workers."""

    name: str
    parameters: int
    """Elements, including shared ones."""
    saved: LineFit
    """Bytes kept for backward."""
    output: LineFit
    """Bytes sent on, where the model is cut behind the unit."""
    tied: str = ""
    """Name of a parameter shared with other units; empty: none."""


@dataclass(frozen=True, slots=True)
class Busy:
    """Seconds of the units while so many workers run at the same time."""

    workers: int
    threads: int
    """Threads of each worker."""
    forward: Sequence[LineFit]
    """Seconds, by unit."""
    backward: Sequence[LineFit]
    low: float
    """The quantile of 5 % of passes of a whole batch, relative to their median."""
    high: float
    """The quantile of 95 %."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A collective of the shards of a unit; bytes as :class:`~paceline.planner.base.Call` counts them."""

    collective: Collective
    size: LineFit


@dataclass(frozen=True, slots=True)
class PipelinePart:
    """The largest shard's part of a unit."""

    work: float = 1.0
    """Share of the unit's seconds."""
    parameters: int = 0
    kept: float = 1.0
    """Share of the unit's saved bytes."""
    forward: tuple[Sent, ...] = ()
    backward: tuple[Sent, ...] = ()
    passed: float = 1.0
    """Share of the bytes of its inputs and outputs, and of their gradients."""


@dataclass(frozen=True, slots=True)
class UnitSharding:
    """The units' division into shards, or why they can't be divided."""

    shards: int
    parts: Sequence[PipelinePart] = ()
    refused: str = ""
    once: tuple[Sent, ...] = ()
    """Collectives of a whole step, not of a micro-batch: gradients summed over all shards."""


@dataclass(frozen=True, slots=True)
class Point:
    """A measured collective of so many bytes among so many workers, all of this host."""

    collective: Collective
    workers: int
    size_bytes: int
    seconds: Seconds


@dataclass(frozen=True, slots=True)
class Pieces:
    """Measured components of one step."""

    compute_s: Seconds
    """Seconds from the first start to the last end among the workers of a replica."""
    copies_s: Seconds
    """Seconds to pull A and to push Δ."""
    update_s: Seconds
    low: float
    """The quantile of 5 % of passes, relative to their median."""
    high: float
    """The quantile of 95 %."""

    @property
    def step_s(self) -> Seconds:
        """Seconds of all components."""
        return self.compute_s + self.copies_s + self.update_s

    def times(self, factor: float) -> "Pieces":
        """Return the components with their seconds scaled by a factor."""
        return Pieces(self.compute_s * factor, self.copies_s * factor, self.update_s * factor, self.low, self.high)


@dataclass(frozen=True, slots=True)
class ShortRun:
    """Some steps of the program itself by one kind of worker, and their prediction."""

    arrangement: Arrangement
    step_s: Seconds
    """Measured seconds of a step."""
    pieces: Pieces
    closed_s: Seconds
    """Seconds of a step by closed forms alone."""
    closed_compute_s: Seconds
    """The part of ``closed_s`` that the workers of a replica spend together."""
    beside_bytes: float
    """Bytes of the worker with the highest peak in addition to the counted ones."""


@dataclass(frozen=True, slots=True)
class Profile:
    """All measurements of a program on a host."""

    program: str
    machine: Machine
    units: Sequence[Unit]
    busy: Sequence[Busy]
    """Ascending by number of workers."""
    divisions: Sequence[UnitSharding]
    uncut: str
    """Why the model can't be cut into stages; empty: it can."""
    points: Sequence[Point]
    numerics: Numerics
    update_s: Seconds
    """Seconds of one worker to update all parameters."""
    base_bytes: int
    """Bytes of a process without a model."""
    flops: float | None
    """Operations of one sample, forward and backward."""
    flops_per_s: float
    """Rate of a matrix product with the threads of one of many workers."""
    parameters: int
    """Elements of the model."""
    batch: int
    """Samples of one replica in a step, where all is as the program says."""
    runs: Mapping[str, ShortRun] = field(default_factory=dict[str, ShortRun])
    """Short runs by kind of worker; unsupported kinds are absent."""
    provenance: Provenance = field(default_factory=dict[str, str])

    def context_bytes(self, arrangement: Arrangement) -> float:
        """Return the bytes of a worker in addition to its part of the model: runtime and copies."""
        run = self.runs.get(kind(arrangement))
        return self.base_bytes if run is None else max(0.0, run.beside_bytes)

    def at_work(self, workers: int) -> Busy:
        """Return the measurement with as many workers, or else with the next more, or with most."""
        return next((each for each in self.busy if each.workers >= workers), self.busy[-1])

    def division(self, shards: int) -> UnitSharding:
        """Return the division into so many shards."""
        found = next((each for each in self.divisions if each.shards == shards), None)
        return found or UnitSharding(shards, refused=f"was not profiled for shards={shards}")


def kind(arrangement: Arrangement) -> str:
    """Name the kind of an arrangement's workers.

    >>> kind(Arrangement()), kind(Arrangement(replicas=2)), kind(Arrangement(stages=2, shards=2))
    ('alone', 'replicas', 'shards')
    """
    if arrangement.shards > 1:
        return "shards"
    if pipelined(arrangement):
        return "stages"
    return "replicas" if arrangement.replicas > 1 else "alone"


# Incremented whenever older files become unreadable.
FORMAT = 3


def this_machine() -> Machine:
    """Describe the machine of this process."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    processor = platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        processor = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), processor)
    return Machine(processor, len(os.sched_getaffinity(0)), memory, version("torch"))


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


def load(path: str | Path) -> Profile:
    """Read a profile.

    Raises:
        InputError: there is none, it is damaged, or it is another machine's.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
        if value.pop("format", None) != FORMAT:
            raise ValueError(f"it is not of format {FORMAT}")
        profile: Profile = _from_json(Profile, value)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{path} is no profile: {error}; write one with paceline.plan(..., profile=path)") from error
    local, saved = asdict(this_machine()), asdict(profile.machine)
    differs = [f"{name}={value!r} (here {local[name]!r})" for name, value in saved.items() if value != local[name]]
    if differs:
        raise InputError(
            f"{path} was measured on another machine, {', '.join(differs)}; measure anew: write another file"
        )
    return profile


def _from_json(kind: Any, value: Any) -> Any:
    """Build a value of the type from plain JSON values."""
    if is_dataclass(kind):
        hints, make = get_type_hints(kind), cast(Any, kind)
        return make(**{each.name: _from_json(hints[each.name], value[each.name]) for each in fields(kind)})
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (tuple, Sequence):
        return tuple(_from_json(inner[0], each) for each in value)
    if origin is Mapping:
        return {str(key): _from_json(inner[1], each) for key, each in value.items()}
    if origin in (Union, UnionType):
        return None if value is None else _from_json(inner[0], value)
    if origin is Literal:
        if value not in inner:
            raise ValueError(f"{value!r} is none of {', '.join(map(str, inner))}")
        return value
    if not isinstance(value, (int, float) if kind is float else kind) or isinstance(value, bool) != (kind is bool):
        # bool is a subclass of int in Python: true is no number in a file
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value

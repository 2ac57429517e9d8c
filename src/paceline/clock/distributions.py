"""Distributions of durations: constant, drawn at random, or replayed from a file, with their text forms.

==========================================  ================================================================
``0.01`` or ``constant:value=0.01``         always the same
``normal:mean=0,std=0.25``                  below zero: 0 (``negative=clip``) or the magnitude (``negative=abs``)
``exponential:mean=0.1``
``shifted-exponential:shift=0.1,mean=0.2``  ``shift`` plus an exponential of that mean
``pareto:scale=0.1,shape=2``                P(X > x) = (scale / x)^shape for x above scale
``lognormal:median=0.1,sigma=0.5``          log X is normal around log(median) with standard deviation sigma
``trace:path=FILE,column=NAME``             measured values, see :class:`paceline.clock.distributions.Trace`
==========================================  ================================================================

``constant`` prints as the bare number, and a value at its default is not printed.
"""

import csv
import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, cycle, repeat
from pathlib import Path
from statistics import NormalDist
from typing import Any, ClassVar, Literal, TypeAlias, final, get_args

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import InputError, unknown
from paceline.core.types import Seconds


def number(text: str, where: str) -> float:
    """Return the number that ``text`` is.

    Raises:
        InputError: no number, infinite or not a number; ``where`` says which value was meant.
    """
    try:
        value = float(text)
    except ValueError:
        raise InputError(f"{where}={text!r} is no number; write {where}=0.1, say.") from None
    return finite(value, where)


def finite(value: float, where: str) -> float:
    """Return ``value`` if it is finite."""
    if not math.isfinite(value):
        raise InputError(f"{where}={value} is not finite; write {where}=0.1, say.")
    return value


def at_least(least: float, value: float, where: str) -> None:
    """Refuse a value that is not finite or below ``least``."""
    if finite(value, where) < least:
        raise InputError(f"{where}={show(value)}, but it must be {show(least)} or more; write {where}={show(least)}.")


def at_most(most: float, value: float, where: str) -> None:
    """Refuse a value that is not finite or above ``most``."""
    if finite(value, where) > most:
        raise InputError(f"{where}={show(value)}, but it must be {show(most)} or less; write {where}={show(most)}.")


def above(bound: float, value: float, where: str) -> None:
    """Refuse a value that is not finite or not above ``bound``."""
    if finite(value, where) <= bound:
        raise InputError(f"{where}={show(value)}, but it must be above {show(bound)}; write {where}=0.1, say.")


def show(value: float) -> str:
    """Return the shortest text that reads back as ``value``.

    >>> show(2.0), show(0.1)
    ('2', '0.1')
    """
    return repr(float(value)).removesuffix(".0")


def pairs(words: Iterable[str], where: str, example: str) -> dict[str, str]:
    """Return the keys and values of ``key=value`` words.

    >>> pairs(["mean=0", "std=1"], "normal", "normal:mean=0,std=1")
    {'mean': '0', 'std': '1'}
    """
    found: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not value:
            raise InputError(f"{where}: {word!r} is not key=value; write {example}.")
        if key in found:
            raise InputError(f"{where}: {key} is given twice, {found[key]} and {value}; write {key}={value} alone.")
        found[key] = value
    return found


_BLOCK = 256
"""Draws per call of numpy: one at a time costs twenty times as much."""


class Distribution(ABC):
    """Durations in seconds, never negative; a frozen dataclass whose fields are the keys of its text form."""

    name: ClassVar[str]
    example: ClassVar[str]
    """A line to write, for error messages."""

    @property
    @abstractmethod
    def mean_s(self) -> Seconds:
        """The expectation of a draw; infinite for heavy tails."""

    @abstractmethod
    def stream(self, rng: np.random.Generator) -> Iterator[Seconds]:
        """Return endless draws; the k-th depends on k and the state of ``rng`` alone, which the stream then owns."""

    def __str__(self) -> str:
        values = ((each, getattr(self, each.name)) for each in _fields(type(self)))
        words = (f"{each.name}={_show(value)}" for each, value in values if value != each.default)
        return f"{self.name}:{','.join(words)}"


class Drawn(Distribution):
    """A distribution that numpy draws in blocks."""

    @abstractmethod
    def block(self, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
        """Return the next ``count`` draws, none of them negative."""

    @final
    def stream(self, rng: np.random.Generator) -> Iterator[Seconds]:
        while True:
            yield from self.block(rng, _BLOCK).tolist()


def build(kind: type[Distribution], words: list[str]) -> Distribution:
    """Return the distribution of a kind that ``key=value`` words describe.

    Raises:
        InputError: a word that is not ``key=value``, an unknown or missing key, or a value out of its range.
    """
    given = pairs(words, kind.name, kind.example)
    fields = {each.name: each for each in _fields(kind)}
    for key in given:
        if key not in fields:
            raise unknown(f"value of {kind.name}", key, fields)
    missing = [key for key, each in fields.items() if each.default is dataclasses.MISSING and key not in given]
    if missing:
        raise InputError(f"{kind.name} needs {' and '.join(missing)}; write {kind.example}.")
    return kind(**{key: number(value, key) if fields[key].type is float else value for key, value in given.items()})


def _fields(kind: type[Distribution]) -> list["dataclasses.Field[Any]"]:
    assert dataclasses.is_dataclass(kind)
    return [each for each in dataclasses.fields(kind) if each.init]


def _show(value: str | float) -> str:
    return value if isinstance(value, str) else show(value)


@final
@dataclass(frozen=True)
class Trace(Distribution):
    """The seconds in a file, replayed in a circle from a seeded place, so that replicas don't move in step.

    The file holds one number a line; with ``column``, it is a CSV file whose first line names its columns. It is read
    once, here, and its values travel with the object: workers on other hosts need no copy.

    Args:
        path: of the file; a comma or blank in it would break the text form and is refused.
        column: name of the column to read.

    Raises:
        InputError: no such file or column, a line that is no number of at least 0 (with its number), or no line at all.
    """

    name: ClassVar[str] = "trace"
    example: ClassVar[str] = "trace:path=FILE"
    path: str
    column: str = ""
    values: tuple[Seconds, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if "," in self.path or self.path.split() != [self.path]:
            raise InputError(
                f"path={self.path!r} must hold neither a comma nor a blank; rename the file or link to it."
            )
        object.__setattr__(self, "values", tuple(_read(self.path, self.column)))

    @property
    def mean_s(self) -> Seconds:
        return sum(self.values) / len(self.values)

    def stream(self, rng: np.random.Generator) -> Iterator[Seconds]:
        # A place of its own for each replica, so that they do not slow down together.
        start = int(rng.integers(len(self.values)))
        return cycle(chain(self.values[start:], self.values[:start]))


def _read(path: str, column: str) -> list[Seconds]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"trace {path} can't be read: {error}; write trace:path= and a text file.") from error
    cells = _column(lines, path, column) if column else list(enumerate(lines, start=1))
    values = [_value(cell, f"{path}:{line}") for line, cell in cells if cell.strip()]
    if not values:
        raise InputError(f"trace {path} holds no values; write one number of seconds a line.")
    return values


def _column(lines: list[str], path: str, column: str) -> list[tuple[int, str]]:
    rows = csv.DictReader(lines)
    names = rows.fieldnames or []
    if column not in names:
        raise InputError(f"trace {path} has no column {column!r}; write column= and one of: {', '.join(names)}.")
    return [(rows.line_num, row[column] or "") for row in rows]


def _value(cell: str, where: str) -> Seconds:
    value = number(cell, where)
    at_least(0, value, where)
    return value


Negative: TypeAlias = Literal["clip", "abs"]
"""Replacement of a draw below zero: 0, or its magnitude."""


@final
@dataclass(frozen=True)
class Constant(Distribution):
    """Always ``value`` seconds."""

    name: ClassVar[str] = "constant"
    example: ClassVar[str] = "constant:value=0.01"
    value: float

    def __post_init__(self) -> None:
        at_least(0, self.value, "value")

    @property
    def mean_s(self) -> Seconds:
        return self.value

    def stream(self, rng: np.random.Generator) -> Iterator[Seconds]:  # noqa: ARG002 - nothing to draw
        return repeat(float(self.value))

    def __str__(self) -> str:
        return show(self.value)


@final
@dataclass(frozen=True)
class Normal(Drawn):
    """Normal, with what falls below zero clipped or mirrored; ``mean`` and ``std`` in seconds, before that."""

    name: ClassVar[str] = "normal"
    example: ClassVar[str] = "normal:mean=0,std=0.25"
    mean: float
    std: float
    negative: Negative = "clip"

    def __post_init__(self) -> None:
        finite(self.mean, "mean")
        at_least(0, self.std, "std")
        if self.negative not in get_args(Negative):
            raise unknown("value of negative", self.negative, get_args(Negative))

    @property
    def mean_s(self) -> Seconds:
        if self.std == 0:
            return abs(self.mean) if self.negative == "abs" else max(0.0, self.mean)
        # E max(0, X) = μ·Φ(μ/σ) + σ·φ(μ/σ), and E|X| = 2·E max(0, X) - μ.
        unit, ratio = NormalDist(), self.mean / self.std
        clipped = self.mean * unit.cdf(ratio) + self.std * unit.pdf(ratio)
        return clipped if self.negative == "clip" else 2 * clipped - self.mean

    def block(self, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
        drawn = rng.normal(self.mean, self.std, count)
        return np.abs(drawn) if self.negative == "abs" else np.maximum(drawn, 0.0)


@final
@dataclass(frozen=True)
class Exponential(Drawn):
    """Exponential with a mean in seconds."""

    name: ClassVar[str] = "exponential"
    example: ClassVar[str] = "exponential:mean=0.1"
    mean: float

    def __post_init__(self) -> None:
        above(0, self.mean, "mean")

    @property
    def mean_s(self) -> Seconds:
        return self.mean

    def block(self, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
        return rng.exponential(self.mean, count)


@final
@dataclass(frozen=True)
class ShiftedExponential(Drawn):
    """``shift`` seconds that all take, plus an exponential of ``mean`` seconds (Dutta et al., arXiv 1803.01113)."""

    name: ClassVar[str] = "shifted-exponential"
    example: ClassVar[str] = "shifted-exponential:shift=0.1,mean=0.2"
    shift: float
    mean: float

    def __post_init__(self) -> None:
        at_least(0, self.shift, "shift")
        above(0, self.mean, "mean")

    @property
    def mean_s(self) -> Seconds:
        return self.shift + self.mean

    def block(self, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
        return self.shift + rng.exponential(self.mean, count)


@final
@dataclass(frozen=True)
class Pareto(Drawn):
    """Pareto: at least ``scale`` seconds, with a tail of power ``shape``; its mean is infinite for shape <= 1."""

    name: ClassVar[str] = "pareto"
    example: ClassVar[str] = "pareto:scale=0.1,shape=2"
    scale: float
    shape: float

    def __post_init__(self) -> None:
        above(0, self.scale, "scale")
        at_least(0.1, self.shape, "shape")  # a longer tail holds durations that no float does

    @property
    def mean_s(self) -> Seconds:
        return self.scale * self.shape / (self.shape - 1) if self.shape > 1 else math.inf

    def block(self, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
        return self.scale * (1.0 + rng.pareto(self.shape, count))  # numpy's pareto begins at 0


@final
@dataclass(frozen=True)
class Lognormal(Drawn):
    """Lognormal: half of the draws below ``median`` seconds; ``sigma`` is the standard deviation of the logarithm."""

    name: ClassVar[str] = "lognormal"
    example: ClassVar[str] = "lognormal:median=0.1,sigma=0.5"
    median: float
    sigma: float

    def __post_init__(self) -> None:
        above(0, self.median, "median")
        at_least(0, self.sigma, "sigma")
        at_most(10, self.sigma, "sigma")  # likewise

    @property
    def mean_s(self) -> Seconds:
        return self.median * math.exp(self.sigma**2 / 2)

    def block(self, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
        return rng.lognormal(math.log(self.median), self.sigma, count)


DISTRIBUTIONS: dict[str, type[Distribution]] = {
    kind.name: kind for kind in (Constant, Exponential, Lognormal, Normal, Pareto, ShiftedExponential, Trace)
}
"""Every kind by name."""


def parse(text: str) -> Distribution:
    """Return the distribution that ``text`` describes: ``name:key=value,key=value``, or a bare number of seconds.

    Raises:
        InputError: an unknown name or key (with the nearest known one), a missing key, a value out of its range.

    >>> parse("normal:std=0.25,mean=0")
    Normal(mean=0.0, std=0.25, negative='clip')
    >>> str(parse("pareto:scale=1.0,shape=2")), str(parse("5e-3"))
    ('pareto:scale=1,shape=2', '0.005')
    """
    name, colon, values = text.strip().partition(":")
    if name in DISTRIBUTIONS:
        return build(DISTRIBUTIONS[name], values.split(",") if values else [])
    if colon or name[:1].isalpha():
        raise unknown("distribution", name, DISTRIBUTIONS)
    if not name:
        raise InputError(f"an empty text is no distribution; write a number of seconds or {Normal.example}.")
    return Constant(number(name, "value"))

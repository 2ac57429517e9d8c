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

``constant`` prints as the bare number; the others are registered values of ``core/text_form.py``.
"""

import csv
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, cycle, repeat
from pathlib import Path
from statistics import NormalDist
from typing import Literal, TypeAlias, final, get_args

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import InputError, check_choice
from paceline.core.registry import Family, declare, register
from paceline.core.text_form import parse_value, text_of
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


def within(value: float, where: str, *, least: float = -math.inf, most: float = math.inf) -> float:
    """Return ``value`` if it is finite, at least ``least`` and at most ``most``."""
    finite(value, where)
    if value < least:
        raise InputError(f"{where}={show(value)}, but it must be {show(least)} or more; write {where}={show(least)}.")
    if value > most:
        raise InputError(f"{where}={show(value)}, but it must be {show(most)} or less; write {where}={show(most)}.")
    return value


def positive(value: float, where: str) -> None:
    """Refuse a value that is not finite or not above 0."""
    if finite(value, where) <= 0:
        raise InputError(f"{where}={show(value)}, but it must be above 0; write {where}=0.1, say.")


def show(value: float) -> str:
    """Return the shortest text that reads back as ``value``.

    >>> show(2.0), show(0.1)
    ('2', '0.1')
    """
    return repr(float(value)).removesuffix(".0")


# Draws per call of numpy: one at a time costs twenty times as much.
_BLOCK = 256

_FAMILY = Family("distribution")


@declare(_FAMILY)
class Distribution(ABC):
    """Durations in seconds, never negative; a frozen dataclass whose fields are the keys of its text form."""

    @property
    @abstractmethod
    def mean_s(self) -> Seconds:
        """The expectation of a draw; infinite for heavy tails."""

    @abstractmethod
    def stream(self, rng: np.random.Generator) -> Iterator[Seconds]:
        """Return endless draws; the k-th depends on k and the state of ``rng`` alone, which the stream then owns."""

    def __str__(self) -> str:
        return text_of(self)


class Drawn(Distribution):
    """A distribution that numpy draws in blocks."""

    @abstractmethod
    def block(self, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
        """Return the next ``count`` draws, none of them negative."""

    @final
    def stream(self, rng: np.random.Generator) -> Iterator[Seconds]:
        while True:
            yield from self.block(rng, _BLOCK).tolist()


@final
@register("trace")
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
    values = list[Seconds]()
    for line, cell in cells:
        if cell.strip():
            values.append(within(number(cell, f"{path}:{line}"), f"{path}:{line}", least=0))
    if not values:
        raise InputError(f"trace {path} holds no values; write one number of seconds a line.")
    return values


def _column(lines: list[str], path: str, column: str) -> list[tuple[int, str]]:
    rows = csv.DictReader(lines)
    names = rows.fieldnames or []
    if column not in names:
        raise InputError(f"trace {path} has no column {column!r}; write column= and one of: {', '.join(names)}.")
    return [(rows.line_num, row[column] or "") for row in rows]


# Replacement of a draw below zero: 0, or its magnitude.
Negative: TypeAlias = Literal["clip", "abs"]


@final
@register("constant")
@dataclass(frozen=True)
class Constant(Distribution):
    """Always ``value`` seconds."""

    value: float

    def __post_init__(self) -> None:
        within(self.value, "value", least=0)

    @property
    def mean_s(self) -> Seconds:
        return self.value

    def stream(self, rng: np.random.Generator) -> Iterator[Seconds]:  # noqa: ARG002 - nothing to draw
        return repeat(float(self.value))

    def __str__(self) -> str:
        return show(self.value)


@final
@register("normal")
@dataclass(frozen=True)
class Normal(Drawn):
    """Normal, with what falls below zero clipped or mirrored; ``mean`` and ``std`` in seconds, before that."""

    mean: float
    std: float
    negative: Negative = "clip"

    def __post_init__(self) -> None:
        finite(self.mean, "mean")
        within(self.std, "std", least=0)
        check_choice("value of negative", self.negative, get_args(Negative))

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
@register("exponential")
@dataclass(frozen=True)
class Exponential(Drawn):
    """Exponential with a mean in seconds."""

    mean: float

    def __post_init__(self) -> None:
        positive(self.mean, "mean")

    @property
    def mean_s(self) -> Seconds:
        return self.mean

    def block(self, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
        return rng.exponential(self.mean, count)


@final
@register("shifted-exponential")
@dataclass(frozen=True)
class ShiftedExponential(Drawn):
    """``shift`` seconds that all take, plus an exponential of ``mean`` seconds (Dutta et al., arXiv 1803.01113)."""

    shift: float
    mean: float

    def __post_init__(self) -> None:
        within(self.shift, "shift", least=0)
        positive(self.mean, "mean")

    @property
    def mean_s(self) -> Seconds:
        return self.shift + self.mean

    def block(self, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
        return self.shift + rng.exponential(self.mean, count)


@final
@register("pareto")
@dataclass(frozen=True)
class Pareto(Drawn):
    """Pareto: at least ``scale`` seconds, with a tail of power ``shape``; its mean is infinite for shape <= 1."""

    scale: float
    shape: float

    def __post_init__(self) -> None:
        positive(self.scale, "scale")
        within(self.shape, "shape", least=0.1)  # a longer tail holds durations that no float does

    @property
    def mean_s(self) -> Seconds:
        return self.scale * self.shape / (self.shape - 1) if self.shape > 1 else math.inf

    def block(self, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
        return self.scale * (1.0 + rng.pareto(self.shape, count))  # numpy's pareto begins at 0


@final
@register("lognormal")
@dataclass(frozen=True)
class Lognormal(Drawn):
    """Lognormal: half of the draws below ``median`` seconds; ``sigma`` is the standard deviation of the logarithm."""

    median: float
    sigma: float

    def __post_init__(self) -> None:
        positive(self.median, "median")
        within(self.sigma, "sigma", least=0, most=10)  # likewise

    @property
    def mean_s(self) -> Seconds:
        return self.median * math.exp(self.sigma**2 / 2)

    def block(self, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
        return rng.lognormal(math.log(self.median), self.sigma, count)


def parse(text: str, where: str = "value") -> Distribution:
    """Return the distribution that ``text`` describes: ``name:key=value,key=value``, or a bare number of seconds.

    Args:
        text: of it.
        where: what a bare number stands for, for messages.

    Raises:
        InputError: an unknown name or key (with the nearest known one), a missing key, a value out of its range.

    >>> parse("normal:std=0.25,mean=0")
    Normal(mean=0.0, std=0.25, negative='clip')
    >>> str(parse("pareto:scale=1.0,shape=2")), str(parse("5e-3"))
    ('pareto:scale=1,shape=2', '0.005')
    """
    text = text.strip()
    if not text:
        raise InputError("an empty text is no distribution; write a number of seconds or normal:mean=0,std=0.25.")
    if ":" in text or text[0].isalpha():
        distribution: Distribution = parse_value(_FAMILY, text)
        return distribution
    return Constant(within(number(text, where), where, least=0))

"""Durations drawn at random, and how each is written.

==========================================  ================================================================
``0.01`` or ``constant:value=0.01``         always the same
``normal:mean=0,std=0.25``                  below zero: 0 (``negative=clip``) or the magnitude (``negative=abs``)
``exponential:mean=0.1``
``shifted-exponential:shift=0.1,mean=0.2``  ``shift`` plus an exponential of that mean
``pareto:scale=0.1,shape=2``                P(X > x) = (scale / x)^shape for x above scale
``lognormal:median=0.1,sigma=0.5``          log X is normal around log(median) with standard deviation sigma
``trace:path=FILE,column=NAME``             measured values, see :class:`paceline.clock.replay.Trace`
==========================================  ================================================================

``constant`` prints as the bare number, and a value at its default is not printed.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from statistics import NormalDist
from typing import ClassVar, Literal, TypeAlias, final, get_args

import numpy as np
from numpy.typing import NDArray

from paceline.clock.base import Distribution, Drawn, build
from paceline.clock.replay import Trace
from paceline.clock.text import above, at_least, at_most, finite, number, show
from paceline.core.errors import InputError, unknown
from paceline.core.types import Seconds

Negative: TypeAlias = Literal["clip", "abs"]
"""What a draw below zero becomes: 0, or its magnitude."""


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
"""Every kind, by the name it is written with."""


def parse(text: str) -> Distribution:
    """The distribution that ``text`` describes: ``name:key=value,key=value``, or a bare number of seconds.

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

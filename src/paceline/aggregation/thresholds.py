"""Thresholds as values: K, the number of Δs that an update waits for, as training goes on.

All are unclipped, as functions of u; the policy that uses one keeps K within [1, P], P being the replicas that
take part::

    K                      exponential    ________ P
    |                   ___.--'''''''''''
    |           ___---'''       step: +1 every so many Δs
    |   ____----
    1___
        0        every      2·every            u
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, final

from paceline.aggregation.base import Arrival, Combine, Need
from paceline.core.errors import InputError, check_number, check_positive
from paceline.core.registry import declare, register
from paceline.core.text_form import format_number, option_type

M = TypeVar("M")


@option_type("a number before /lr")
@dataclass(frozen=True)
class PerLearningRate:
    """A number of Δs in multiples of 1 / learning rate, as the Smooth Switch paper chooses its steps: ``5/lr``.

    >>> PerLearningRate(5), str(PerLearningRate(5)), PerLearningRate(5).over(0.01)
    (PerLearningRate(multiple=5), '5/lr', 500.0)
    """

    multiple: float

    def __post_init__(self) -> None:
        check_positive("multiple", self.multiple, instead=5)

    def __str__(self) -> str:
        return f"{format_number(self.multiple)}/lr"

    @classmethod
    def parse(cls, text: str) -> "PerLearningRate":
        """Return the value that prints as ``text``; ValueError if none does."""
        multiple, slash, rate = text.partition("/")
        if (slash, rate) != ("/", "lr"):
            raise ValueError(text)
        return cls(float(multiple))

    def over(self, learning_rate: float | None) -> float:
        """Return the number for one learning rate."""
        if learning_rate is None or not learning_rate > 0:
            raise InputError(
                f"every={self} needs a learning rate above 0, but the optimizer's is {learning_rate}; write every=500."
            )
        # 0.3 / 0.1 is not quite 3, and a step of K must not come one Δ late for that.
        return round(self.multiple / learning_rate, 9)


@declare("threshold")
class Threshold(ABC, Generic[M]):
    """K as a function of u and of a memory of what has arrived."""

    @property
    def needs(self) -> frozenset[Need]:
        """Observations that the engine must make for it."""
        return frozenset()

    def resolved(self, *, learning_rate: float | None, combine: Combine, replicas: int) -> "Threshold[Any]":
        """Return it with all that depends on the program, the policy and the mesh."""
        del learning_rate, combine, replicas
        return self

    @abstractmethod
    def start(self) -> M:
        """Return the memory before the first Δ."""

    @abstractmethod
    def observe(self, memory: M, arrival: Arrival) -> M:
        """Return the memory after one more Δ."""

    @abstractmethod
    def at(self, memory: M, u: int) -> float:
        """Return K, unclipped; a fraction is rounded down."""


class Curve(Threshold[None], ABC):
    """A threshold that depends on u alone."""

    @final
    def start(self) -> None:
        return None

    @final
    def observe(self, memory: None, arrival: Arrival) -> None:
        del memory, arrival

    @final
    def at(self, memory: None, u: int) -> float:
        del memory
        return self.of(u)

    @abstractmethod
    def of(self, u: int) -> float:
        """Return K(u)."""


class Searched(Threshold[M], ABC):
    """A threshold that looks for its K between 1 and ``largest``, which is P if it is None."""

    largest: int | None

    @final
    def resolved(self, *, learning_rate: float | None, combine: Combine, replicas: int) -> "Threshold[Any]":
        del learning_rate, combine
        bounded: Threshold[Any] = replace(self, largest=self.largest or replicas)  # type: ignore[type-var]
        return bounded

    @property
    def last(self) -> int:
        """The largest K; 25, the paper's P, by default."""
        return self.largest or 25


@final
@register("step")
@dataclass(frozen=True)
class Step(Curve):
    """K = initial + increment · ⌊u/every⌋, at most ``cap``: by default the paper's step function, 1 + ⌊u/every⌋.

    Args:
        every: Δs between two steps; a number or a multiple of 1 / learning rate.
        initial: K at the start.
        increment: what a step adds.
        cap: the largest K; None: P.
    """

    every: float | PerLearningRate = 500
    initial: float = 1
    increment: float = 1
    cap: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.every, PerLearningRate):
            check_positive("every", self.every, instead=500)
        check_positive("step:initial", self.initial, instead=1)
        check_number("step:increment", self.increment, "of at least 0", lambda increment: increment >= 0, instead=1)
        if self.cap is not None:
            check_positive("step:cap", self.cap, instead=25)

    @property
    def plain(self) -> bool:
        """Return whether ``every`` says all."""
        return self == Step(self.every)

    def resolved(self, *, learning_rate: float | None, combine: Combine, replicas: int) -> "Step":
        del combine, replicas
        return replace(self, every=self.every.over(learning_rate)) if isinstance(self.every, PerLearningRate) else self

    def of(self, u: int) -> float:
        if isinstance(self.every, PerLearningRate):
            return self.every.over(None)
        k = self.initial + self.increment * (u // self.every)
        return k if self.cap is None else min(k, self.cap)


@final
@register("linear")
@dataclass(frozen=True)
class Linear(Curve):
    """K = ⌊initial + slope·u⌋.

    Args:
        slope: Δs per Δ received; 0 for a constant K.
        initial: K at the start.
    """

    slope: float = 0.002
    initial: float = 1

    def __post_init__(self) -> None:
        check_number("linear:slope", self.slope, "of at least 0", lambda slope: slope >= 0, instead=0.002)
        check_positive("linear:initial", self.initial, instead=1)

    def of(self, u: int) -> float:
        return self.initial + self.slope * u


@final
@register("exponential")
@dataclass(frozen=True)
class Exponential(Curve):
    """K = ⌊initial · 2^(u/doubling)⌋.

    Args:
        doubling: Δs in which K doubles.
        initial: K at the start.
    """

    doubling: float = 1000
    initial: float = 1

    def __post_init__(self) -> None:
        check_positive("exponential:doubling", self.doubling, instead=1000)
        check_positive("exponential:initial", self.initial, instead=1)

    def of(self, u: int) -> float:
        # More doublings than a float can hold are as good as 1,000, which is far above any P.
        return self.initial * math.exp2(min(u / self.doubling, 1000))


@final
@dataclass(frozen=True)
class Function(Curve):
    """K = function(u), for a function of the user's own; has no text form."""

    function: Callable[[int], float]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise InputError(f"threshold={self.function} is no function of u; write threshold=lambda u: 1 + u // 500.")
        self.of(0)

    @property
    def __name__(self) -> str:
        """The function's own name, with which the text form prints it."""
        return getattr(self.function, "__name__", type(self.function).__name__).strip("<>")

    def of(self, u: int) -> float:
        k = self.function(u)
        if not isinstance(k, int | float) or math.isnan(k):
            raise InputError(f"the threshold gave {k!r} for u={u}, but K is a number; write lambda u: 1 + u // 500.")
        return k

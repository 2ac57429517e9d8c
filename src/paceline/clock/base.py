"""What a distribution of durations is."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray

from paceline.clock.text import number, pairs, show
from paceline.core.errors import InputError, unknown
from paceline.core.types import Seconds

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
        """Endless draws; the k-th depends on k and the state of ``rng`` alone. ``rng`` then belongs to the stream."""

    def __str__(self) -> str:
        values = ((each, getattr(self, each.name)) for each in _fields(type(self)))
        words = (f"{each.name}={_show(value)}" for each, value in values if value != each.default)
        return f"{self.name}:{','.join(words)}"


class Drawn(Distribution):
    """Distributions that numpy draws in blocks."""

    @abstractmethod
    def block(self, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
        """The next ``count`` draws, none of them negative."""

    @final
    def stream(self, rng: np.random.Generator) -> Iterator[Seconds]:
        while True:
            yield from self.block(rng, _BLOCK).tolist()


def build(kind: type[Distribution], words: list[str]) -> Distribution:
    """The distribution of a kind that ``key=value`` words describe.

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

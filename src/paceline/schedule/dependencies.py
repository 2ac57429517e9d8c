"""Dependencies between the parts of a model: a chain, or parallel branches.

::

    a chain       0 - 1 - 2 - 3
    branches      0 - 1 ----- 3       parts 1 and 2 are independent
                  `-- 2 -----'
"""

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.errors import InputError

_FORM = re.compile(r"(\d+)([->])(\d+)")


class Need(NamedTuple):
    """A value that goes from one part to a later one."""

    source: int
    consumer: int
    """A part after ``source``."""
    gradient: bool = True
    """Whether a gradient goes back: a size or a mask has none."""


@dataclass(frozen=True)
class Dependencies:
    """Dependencies between the parts of one model.

    Args:
        parts: their number.
        needs: each once.

    Raises:
        InputError: a part that needs a later one, or one that does not exist.

    >>> str(Dependencies(4, frozenset({Need(0, 1), Need(0, 2), Need(1, 3), Need(2, 3), Need(0, 3, False)})))
    '0-1 0-2 0>3 1-3 2-3'
    """

    parts: int
    needs: frozenset[Need]

    def __post_init__(self) -> None:
        for need in sorted(self.needs):
            if not 0 <= need.source < need.consumer < self.parts:
                raise InputError(
                    f"part {need.consumer} of {self.parts} can't need part {need.source}; write parts from 0 to "
                    f"{self.parts - 1}, the one that is needed first"
                )

    @classmethod
    def chain(cls, parts: int) -> "Dependencies":
        """Return those of a chain: each part needs the one before it.

        >>> str(Dependencies.chain(3))
        '0-1 1-2'
        """
        return cls(parts, frozenset(Need(part, part + 1) for part in range(parts - 1)))

    @classmethod
    def of(cls, parts: int, needs: Iterable[Need]) -> "Dependencies":
        """Merge all values that cross: if one of two parts' values has a gradient, backward waits for it."""
        merged: dict[tuple[int, int], bool] = {}
        for source, consumer, gradient in needs:
            merged[source, consumer] = merged.get((source, consumer), False) or gradient
        return cls(parts, frozenset(Need(*ends, gradient) for ends, gradient in merged.items()))

    @classmethod
    def parse(cls, parts: int, text: str) -> "Dependencies":
        """Return those that are printed so.

        >>> Dependencies.parse(3, "0-1 1>2") == Dependencies(3, frozenset({Need(0, 1), Need(1, 2, False)}))
        True
        """
        matches = [_FORM.fullmatch(word) for word in text.split()]
        if None in matches:
            raise InputError(f"{text!r} does not say which parts need which; write 0-1 1>2, say")
        return cls(parts, frozenset(Need(int(m[1]), int(m[3]), m[2] == "-") for m in matches if m))

    def __str__(self) -> str:
        """``0-1``: a value goes from 0 to 1, and its gradient back; ``0>1``: no gradient."""
        return " ".join(f"{n.source}{'-' if n.gradient else '>'}{n.consumer}" for n in sorted(self.needs))

    def sources(self, part: int) -> tuple[int, ...]:
        """Return the parts whose values the forward of a part needs, ascending."""
        return self._table[0][part]

    def consumers(self, part: int) -> tuple[int, ...]:
        """Return the parts that need its values."""
        return self._table[1][part]

    def returning(self, part: int) -> tuple[int, ...]:
        """Return the parts whose gradients the backward of a part needs."""
        return self._table[2][part]

    def returned(self, part: int) -> tuple[int, ...]:
        """Return the parts to which its backward sends gradients."""
        return self._table[3][part]

    @functools.cached_property
    def _table(self) -> tuple[list[tuple[int, ...]], ...]:
        """Return for each of the four methods above its result for every part."""

        def others(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, ...]]:
            of: list[list[int]] = [[] for _ in range(self.parts)]
            for part, other in sorted(pairs):
                of[part].append(other)
            return list(map(tuple, of))

        back = [need for need in self.needs if need.gradient]
        return (
            others((need.consumer, need.source) for need in self.needs),
            others((need.source, need.consumer) for need in self.needs),
            others((need.source, need.consumer) for need in back),
            others((need.consumer, need.source) for need in back),
        )

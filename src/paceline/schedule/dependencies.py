"""Which parts of a model need which: a chain, or branches side by side.

::

    a chain       0 - 1 - 2 - 3
    branches      0 - 1 ----- 3       parts 1 and 2 need nothing of each other
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
    """A part needs what another makes."""

    source: int
    consumer: int
    """A later part."""
    gradient: bool = True
    """Whether one goes back: there is none of a size, or of a mask."""


@dataclass(frozen=True)
class Dependencies:
    """Of the parts of one model.

    Args:
        parts: how many.
        needs: of the parts, each once.

    Raises:
        InputError: a part that needs a later one, or one that there is not.

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
        """Each part needs the one before it.

        >>> str(Dependencies.chain(3))
        '0-1 1-2'
        """
        return cls(parts, frozenset(Need(part, part + 1) for part in range(parts - 1)))

    @classmethod
    def of(cls, parts: int, needs: Iterable[Need]) -> "Dependencies":
        """Of all that crosses: one gradient that goes back is enough to be waited for."""
        found: dict[tuple[int, int], bool] = {}
        for source, consumer, gradient in needs:
            found[source, consumer] = found.get((source, consumer), False) or gradient
        return cls(parts, frozenset(Need(*ends, gradient) for ends, gradient in found.items()))

    @classmethod
    def parse(cls, parts: int, text: str) -> "Dependencies":
        """Those that are printed so.

        >>> Dependencies.parse(3, "0-1 1>2") == Dependencies(3, frozenset({Need(0, 1), Need(1, 2, False)}))
        True
        """
        found = [_FORM.fullmatch(word) for word in text.split()]
        if None in found:
            raise InputError(f"{text!r} does not say which parts need which; write 0-1 1>2, say")
        return cls(parts, frozenset(Need(int(m[1]), int(m[3]), m[2] == "-") for m in found if m))

    def __str__(self) -> str:
        """``0-1``: a value goes from 0 to 1, and its gradient back; ``0>1``: no gradient."""
        return " ".join(f"{n.source}{'-' if n.gradient else '>'}{n.consumer}" for n in sorted(self.needs))

    def sources(self, part: int) -> tuple[int, ...]:
        """Those whose values the forward of a part needs, ascending."""
        return self._table[0][part]

    def consumers(self, part: int) -> tuple[int, ...]:
        """Those that need its values."""
        return self._table[1][part]

    def returning(self, part: int) -> tuple[int, ...]:
        """Those whose gradients the backward of a part needs."""
        return self._table[2][part]

    def returned(self, part: int) -> tuple[int, ...]:
        """Those to which its backward gives gradients."""
        return self._table[3][part]

    @functools.cached_property
    def _table(self) -> tuple[list[tuple[int, ...]], ...]:
        back = [need for need in self.needs if need.gradient]
        return (
            self._ends((need.consumer, need.source) for need in self.needs),
            self._ends((need.source, need.consumer) for need in self.needs),
            self._ends((need.source, need.consumer) for need in back),
            self._ends((need.consumer, need.source) for need in back),
        )

    def _ends(self, pairs: Iterable[tuple[int, int]]) -> list[tuple[int, ...]]:
        """Of each part, with which others it makes a pair."""
        found: list[list[int]] = [[] for _ in range(self.parts)]
        for part, other in sorted(pairs):
            found[part].append(other)
        return list(map(tuple, found))

"""The columns of a pipeline: who takes turns at the micro-batches of a stage that several work on.

::

    copies (2, 1)    column   stage  copy   micro-batches
                     0        0      0      0, 2, 4, ...
                     1        0      1      1, 3, 5, ...
                     2        1      0      all
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple


class Column(NamedTuple):
    """A stage as one of those has it who take turns at it: one worker, or the shards of one."""

    stage: int
    copy: int


@dataclass(frozen=True, slots=True)
class Columns:
    """Those of one replica, numbered stage by stage.

    Args:
        copies: n_s, how many columns each stage has.
    """

    copies: tuple[int, ...]

    def __len__(self) -> int:
        return sum(self.copies)

    def __iter__(self) -> Iterator[Column]:
        return (Column(stage, copy) for stage, count in enumerate(self.copies) for copy in range(count))

    def number(self, column: Column) -> int:
        """Which one it is.

        >>> list(map(Columns((2, 1)).number, Columns((2, 1))))
        [0, 1, 2]
        """
        return sum(self.copies[: column.stage]) + column.copy

    def column(self, number: int) -> Column:
        """That of a number.

        >>> Columns((3, 1)).column(2), Columns((3, 1)).column(3)
        (Column(stage=0, copy=2), Column(stage=1, copy=0))
        """
        ends = list(accumulate(self.copies))
        stage = next(s for s, end in enumerate(ends) if number < end)
        return Column(stage, number - (ends[stage] - self.copies[stage]))

    def of(self, stage: int, micro_batch: int) -> int:
        """Who of a stage does a micro-batch: they take turns.

        >>> [Columns((3, 1)).of(0, i) for i in range(5)], Columns((3, 1)).of(1, 4)
        ([0, 1, 2, 0, 1], 3)
        """
        return self.number(Column(stage, micro_batch % self.copies[stage]))

    def same(self, stage: int) -> range:
        """The numbers of all columns of a stage."""
        first = self.number(Column(stage, 0))
        return range(first, first + self.copies[stage])

    def turn(self, column: Column, other: int) -> Column:
        """With which column of another stage a column shares what all columns of a stage have.

        >>> Columns((3, 2)).turn(Column(0, 2), 1)
        Column(stage=1, copy=0)
        """
        return Column(other, column.copy % self.copies[other])

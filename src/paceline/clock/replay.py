"""Measured durations, read from a file and played again."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, cycle
from pathlib import Path
from typing import ClassVar, final

import numpy as np

from paceline.clock.base import Distribution
from paceline.clock.text import at_least, number
from paceline.core.errors import InputError
from paceline.core.types import Seconds


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

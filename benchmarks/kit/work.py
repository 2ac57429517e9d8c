"""Cells of a table, measured one after the other: a bar on stderr, each row on the disk as it comes."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kit.crew import RankError
from kit.sheet import Sheet
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from paceline.core.errors import InputError

STOPPED = 130
"""Exit code after Ctrl-C."""


@dataclass(frozen=True)
class Begun:
    """Told by rank 0 before it measures a cell; main only counts cells."""

    cell: str


@dataclass(frozen=True)
class Measured:
    """Told by rank 0 after it: the rows of this one cell."""

    rows: list[dict[str, Any]]


def record(words: Iterator[Any], sheet: Sheet, bar: Progress, show: Callable[[dict[str, Any]], str]) -> None:
    """Put the rows that ranks tell into a sheet.

    Raises:
        RankError: a rank failed, with the cell at which it did.
    """
    task, cell = bar.task_ids[0], "the first cell"
    try:
        for word in words:
            if isinstance(word, Begun):
                cell = word.cell
                bar.update(task, description=cell)
                continue
            for row in word.rows:
                sheet.put(row)
                bar.console.print(show(row), soft_wrap=True, highlight=False, markup=False)
            bar.advance(task)
    except RankError as error:
        raise RankError(f"at {cell}: {error}") from error


def progress(cells: int) -> Progress:
    """A bar over so many cells, on stderr; rows are printed above it. Without a terminal: rows alone."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    bar = Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True),
        redirect_stdout=False,
    )  # fmt: skip
    bar.add_task("starting", total=cells)
    return bar


def guarded(work: Callable[[], None], sheet: str) -> int:
    """Do it; the exit code. What was measured before an error or Ctrl-C is kept."""
    try:
        work()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RankError as error:
        print(f"error: {error}\nRows before it are in {sheet}: the same command goes on from there.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"Stopped. Rows are kept in {sheet}: the same command goes on from there.", file=sys.stderr)
        return STOPPED
    return 0

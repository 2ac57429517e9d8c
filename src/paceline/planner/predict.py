"""Foretell rows of a table from others: ``python -m paceline.plan.predict FILE.csv --calibrate FILE.csv``.

Both files have the columns of :mod:`paceline.planner.calibration.rows`; outcomes in the first are ignored. What is
written to stdout is CSV, one line for each row in its order: ``row_id,step_time_s,mem_gib,status``, where the status is
``oom`` if a worker needs more than ``gpu_mem_gb`` (or, where that is blank, than its device is made with), and else
``ok``. A row without ``gbs`` is taken for a step of one micro-batch of each replica.
"""

import argparse
import csv
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TextIO

from paceline.core.errors import InputError
from paceline.planner.calibration.calibrate import Calibration, calibrated
from paceline.planner.calibration.calibrate_memory import MemoryCalibration, Room, calibrated_memory
from paceline.planner.calibration.rows import GIB, PublishedRow, read
from paceline.planner.devices import SHEETS

OUTCOMES = (
    "step_time_s",
    "samples_per_s",
    "tokens_per_s_per_dev",
    "tflops_per_dev",
    "tflops_def",
    "mfu_pct",
    "mem_gib",
    "mem_def",
    "status",
)
"""Columns that tell what came of it."""


class Line(NamedTuple):
    """Of what is written."""

    row_id: str
    step_time_s: str
    mem_gib: str
    status: str


@dataclass(frozen=True)
class RowPredictor:
    """What rows have taught about time and memory."""

    times: Calibration
    memory: MemoryCalibration

    @classmethod
    def of(cls, rows: Sequence[PublishedRow]) -> "RowPredictor":
        """From rows with outcomes.

        Raises:
            InputError: too few tell a step time.
        """
        return cls(calibrated(rows), calibrated_memory(rows))

    def line(self, row: PublishedRow) -> Line:
        """Of one row; its own outcomes, if there are any, are not looked at."""
        row = blank(row)
        room, step_s = self.memory.forecast(row), self.times.forecast(row).step_s
        return Line(row.name, f"{step_s:.6g}", f"{room.bytes / GIB:.4g}", "ok" if fits(row, room) else "oom")


def blank(row: PublishedRow) -> PublishedRow:
    """Without outcomes."""
    return PublishedRow({column: "" if column in OUTCOMES else text for column, text in row.told.items()})


def fits(row: PublishedRow, room: Room) -> bool:
    """Whether a worker's device has so much; where a row does not tell, only what is surely too much does not fit."""
    told = row.number("gpu_mem_gb")
    return room.bytes <= told * GIB if told else room.low_bytes <= largest_bytes(row)


def largest_bytes(row: PublishedRow) -> float:
    """The most that its device's family is made with.

    >>> largest_bytes(PublishedRow({"hw": "A100"})) / GIB, largest_bytes(PublishedRow({"hw": "?"}))
    (80.0, inf)
    """
    made = [sheet.memory_bytes for name, sheet in SHEETS.items() if name.upper().startswith(row.family or "?")]
    return max(made, default=float("inf"))


def lines(rows: Iterable[PublishedRow], calibration: Sequence[PublishedRow]) -> Iterator[Line]:
    """Of each row, in order."""
    foreteller = RowPredictor.of(calibration)
    return map(foreteller.line, rows)


def write(found: Iterable[Line], to: TextIO) -> None:
    """As CSV."""
    writer = csv.writer(to, lineterminator="\n")
    writer.writerow(Line._fields)
    writer.writerows(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 2 where the files are refused."""
    parser = argparse.ArgumentParser(
        prog="python -m paceline.plan.predict",
        description="Foretell step time and memory of rows of a table from rows that were measured.",
    )
    parser.add_argument("file", type=Path, metavar="FILE.csv", help="rows to foretell; their outcomes may be blank")
    parser.add_argument("--calibrate", type=Path, required=True, metavar="FILE.csv", help="rows that were measured")
    asked = parser.parse_args(arguments)
    try:
        found = list(lines(read(asked.file), read(asked.calibrate)))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    write(found, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Prediction of rows of a table from others: ``python -m paceline.plan.predict FILE.csv --calibrate FILE.csv``.

Both files have the columns of :mod:`paceline.planner.calibration.rows`; outcomes in the first are ignored. The output
is CSV on stdout, one line for each row in its order: ``row_id,step_time_s,mem_gib,status,reason``, where the status
is ``oom`` if a worker needs more than ``gpu_mem_gb`` (or, where that is blank, than its device can have), and else
``ok``. A row that can't be predicted has blanks and a reason; a measured row that can't be used is left out, and stderr
says why. A row without ``gbs`` counts as a step of one micro-batch of each replica.
"""

import argparse
import csv
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import NamedTuple

from paceline.core.errors import InputError
from paceline.planner.calibration import calibrate
from paceline.planner.calibration.refusals import refuse_unpredictable, usable
from paceline.planner.calibration.rows import GIB, PublishedRow, read
from paceline.planner.devices import SHEETS

# Columns with measured outcomes.
OUTCOMES = ("step_time_s", "samples_per_s", "tokens_per_s_per_dev", "tflops_per_dev", "tflops_def", "mfu_pct",
            "mem_gib", "mem_def", "status")  # fmt: skip


class Line(NamedTuple):
    """Line of the output."""

    row_id: str
    step_time_s: str
    mem_gib: str
    status: str
    reason: str = ""
    """Why there is no prediction."""


@dataclass(frozen=True)
class RowPredictor:
    """Predictor of time and memory, calibrated by rows."""

    times: calibrate.Calibration
    memory: calibrate.MemoryCalibration
    models: frozenset[str]
    """Names in lower case of the models that were measured."""
    left_out: Sequence[str] = ()
    """Why measured rows were not used."""

    @classmethod
    def of(cls, rows: Sequence[PublishedRow]) -> "RowPredictor":
        """Calibrate with those rows that have outcomes and can be used.

        Raises:
            InputError: too few have a step time.
        """
        found, reasons = usable(rows)
        models = frozenset(row.model.lower() for row in found if row.step_s)
        return cls(calibrate.calibrated(found), calibrate.calibrated_memory(found), models, reasons)

    def line(self, row: PublishedRow) -> Line:
        """Predict one row; its own outcomes, if there are any, are ignored."""
        row = blank(row)
        try:
            refuse_unpredictable(row, self.models)
        except InputError as error:
            return Line(row.name, "", "", "", str(error))
        room, step_s = self.memory.forecast(row), self.times.forecast(row).step_s
        return Line(row.name, f"{step_s:.6g}", f"{room.bytes / GIB:.4g}", "ok" if fits(row, room) else "oom")


def blank(row: PublishedRow) -> PublishedRow:
    """Return the row without its outcomes."""
    return PublishedRow({column: "" if column in OUTCOMES else text for column, text in row.cells.items()})


def fits(row: PublishedRow, room: calibrate.MemoryPrediction) -> bool:
    """Return True if a worker's device has so much; where a row does not say, False only if it surely has less."""
    size_gib = row.number("gpu_mem_gb")
    if size_gib:
        return room.bytes <= size_gib * GIB
    sizes = [sheet.memory_bytes for name, sheet in SHEETS.items() if name.upper().startswith(row.family or "?")]
    return room.low_bytes <= max(sizes, default=inf)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 2 where the files are refused."""
    parser = argparse.ArgumentParser(
        prog="python -m paceline.plan.predict",
        description="Predict step time and memory of rows of a table from rows that were measured.",
    )
    parser.add_argument("file", type=Path, metavar="FILE.csv", help="rows to predict; their outcomes may be blank")
    parser.add_argument("--calibrate", type=Path, required=True, metavar="FILE.csv", help="rows that were measured")
    options = parser.parse_args(arguments)
    try:
        requested, measured = read(options.file), read(options.calibrate)
        predictor = RowPredictor.of(measured)
        result = list(map(predictor.line, requested))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    for reason in predictor.left_out:
        print(f"left out: {reason}", file=sys.stderr)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(Line._fields)
    writer.writerows(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Operators divided among shards: a training step and the forward pass of one sample, beside one process and DTensor.

    python benchmarks/tensor/measure.py
    python benchmarks/tensor/measure.py --page

Rows lie in results/ as they come; those that are there are not measured again.
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from kit.crew import crew
from kit.sheet import Sheet
from kit.work import guarded, progress, record
from models import ROWS
from page import page
from ranks import measure
from rounds import Cell, Pace
from sides import OURS

from paceline.core.errors import InputError

HERE = Path(__file__).parent

PAIRS = 15
TURN_S = 0.3


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is not there yet, or write the page; returns the exit code."""
    said = parsed(arguments)
    sheet = Sheet(said.out / "results" / "steps.csv", ("row", "shards", "backend", "side"))
    return guarded(lambda: write(said.out, sheet) if said.page else fill(said, sheet), str(sheet.path.parent))


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--page", action="store_true", help="write README.md from what has been measured")
    made.add_argument("--rows", nargs="+", choices=list(ROWS), metavar="ROW", help="; ".join(ROWS))
    made.add_argument("--shards", type=int, nargs="+", default=[2], help="2 by default")
    made.add_argument("--backends", nargs="+", choices=("shm", "gloo"), default=["shm", "gloo"], metavar="BACKEND")
    made.add_argument("--pairs", type=int, default=PAIRS, help=f"turns of each side; {PAIRS} by default")
    made.add_argument(
        "--turn", type=float, default=TURN_S, metavar="S", help=f"seconds of a turn; {TURN_S:g} by default"
    )
    made.add_argument("--again", action="store_true", help="also what has been measured")
    made.add_argument("--out", type=Path, default=HERE, metavar="DIR", help="of results/ and README.md; this folder")
    said = made.parse_args(arguments)
    said.rows = said.rows or [row for row in ROWS if row != "tiny"]
    return said


def fill(said: argparse.Namespace, sheet: Sheet) -> None:
    """The table: all sides of a cell by turns."""

    def missing(shards: int, cell: Cell) -> bool:
        row = sheet.find(cell.row, shards, cell.backend, OURS)
        return said.again or row is None or int(row["pairs"]) < said.pairs

    cells = [Cell(*each) for each in itertools.product(said.rows, said.backends)]
    wanted = {shards: [cell for cell in cells if missing(shards, cell)] for shards in said.shards}
    with progress(sum(map(len, wanted.values()))) as bar:
        for shards, some in wanted.items():
            if some:
                record(crew(measure, shards, some, Pace(said.pairs, said.turn)), sheet, bar, shown)


def shown(row: dict[str, Any]) -> str:
    """A row as it comes."""
    what = f"{row['row']:12} {row['shards']} shards {row['backend']:5} {row['side']:12}"
    step, forward = float(row["step_ms"]), float(row["forward_ms"])
    return f"{what} step {step:8.2f} ms, {row['of_one']} of one; one sample {forward:7.3f} ms, {row['forward_of_one']}"


def write(folder: Path, sheet: Sheet) -> None:
    """The page, of what there is."""
    if not sheet.rows:
        raise InputError(f"nothing has been measured into {sheet.path.parent}; leave out --page first")
    path = folder / "README.md"
    path.write_text(page(sheet.rows), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    sys.exit(main())

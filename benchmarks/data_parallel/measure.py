"""A synchronous step: Paceline's distributed engine beside DDP, Accelerate and Fabric.

    python benchmarks/data_parallel/measure.py
    python benchmarks/data_parallel/measure.py --memory
    python benchmarks/data_parallel/measure.py --divided
    python benchmarks/data_parallel/measure.py --page

Rows lie in results/ as they come; those that are there are not measured again. Accelerate and Fabric are left out where
they are not installed.
"""

import argparse
import itertools
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from kit.crew import crew
from kit.sheet import Sheet
from kit.work import guarded, progress, record
from models import MODELS
from page import page
from ranks import Cell, Pace, divided, measure, memory
from sides import AGAINST, OPTIMIZERS, SIDES, absent

from paceline.core.errors import InputError

HERE = Path(__file__).parent

PAIRS = 9
TURN_S = 0.5

WHOLE = {"models": list(MODELS), "ranks": [1, 2, 4, 8], "batches": [32, 128], "pairs": PAIRS}
QUICK = {"models": ["cnn", "mlp"], "ranks": [2], "batches": [32], "pairs": 3}

ELEMENTS = (10**4, 10**5, 3 * 10**5, 10**6, 4 * 10**6, 2 * 10**7)
"""Sizes of A under --divided."""

BACKENDS = ("shm", "gloo")
"""Under --divided."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is not there yet, or write the page; returns the exit code."""
    said = parsed(arguments)
    folder = said.out / "results"
    steps = Sheet(folder / "data_parallel.csv", ("model", "ranks", "batch", "side"))
    peaks = Sheet(folder / "memory.csv", ("model", "ranks", "batch", "side"))
    parts = Sheet(folder / "divided.csv", ("elements", "optimizer", "ranks", "backend"))

    def work() -> None:
        if min(said.ranks) < 1 + said.divided:
            raise InputError(f"--ranks {min(said.ranks)} are too few; write --ranks 2")
        if said.page:
            write(said.out, steps, peaks, parts)
        elif said.memory:
            fill_memory(said, peaks)
        elif said.divided:
            fill_divided(said, parts)
        else:
            fill_steps(said, steps)

    return guarded(work, str(folder))


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = made.add_mutually_exclusive_group()
    what.add_argument("--memory", action="store_true", help="peak memory, each side in processes of its own")
    what.add_argument("--divided", action="store_true", help="the optimizer's state whole or divided, by the size of A")
    what.add_argument("--page", action="store_true", help="write README.md from what has been measured")
    made.add_argument("--models", nargs="+", choices=list(MODELS), metavar="MODEL", help="; ".join(MODELS))
    made.add_argument("--ranks", type=int, nargs="+", help="1 2 4 8 by default; 2 4 with --divided")
    made.add_argument("--batches", type=int, nargs="+", help="samples of a rank; 32 128 by default")
    made.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES), metavar="SIDE")
    made.add_argument("--elements", type=int, nargs="+", default=list(ELEMENTS), help="of A, with --divided")
    made.add_argument("--pairs", type=int, help=f"turns of each side; {PAIRS} by default")
    made.add_argument("--turn", type=float, default=TURN_S, metavar="S", help="seconds of a turn, about (%(default)g)")
    made.add_argument("--quick", action="store_true", help="two models, 2 ranks, batch 32, 3 turns")
    made.add_argument("--again", action="store_true", help="also what has been measured")
    made.add_argument("--out", type=Path, default=HERE, metavar="DIR", help="of results/ and README.md; this folder")
    said = made.parse_args(arguments)
    usual = QUICK if said.quick else WHOLE | ({"ranks": [2, 4]} if said.divided else {})
    for name, value in usual.items():
        if getattr(said, name) is None:
            setattr(said, name, value)
    return said


def fill_steps(said: argparse.Namespace, sheet: Sheet) -> None:
    """The table of step times: all sides of a cell by turns."""
    sides = list(dict.fromkeys([AGAINST, *present(said.sides)]))

    def missing(ranks: int, cell: Cell) -> bool:
        found = [sheet.find(cell.model, ranks, cell.batch, side) for side in sides]
        return said.again or not all(row is not None and int(row["pairs"]) >= said.pairs for row in found)

    wanted = {ranks: [cell for cell in cells(said) if missing(ranks, cell)] for ranks in said.ranks}
    with progress(sum(map(len, wanted.values()))) as bar:
        for ranks, some in wanted.items():
            if some:
                record(crew(measure, ranks, some, sides, Pace(said.pairs, said.turn)), sheet, bar, shown)


def fill_memory(said: argparse.Namespace, sheet: Sheet) -> None:
    """The column of memory: new processes for each figure."""
    wanted = [
        (ranks, cell, side)
        for ranks, cell, side in itertools.product(said.ranks, cells(said), present(said.sides))
        if said.again or sheet.find(cell.model, ranks, cell.batch, side) is None
    ]
    with progress(len(wanted)) as bar:
        for ranks, cell, side in wanted:
            record(crew(memory, ranks, cell, side), sheet, bar, peak_shown)


def fill_divided(said: argparse.Namespace, sheet: Sheet) -> None:
    """The table of divided optimizers."""

    def missing(ranks: int, cell: Cell, backend: str) -> bool:
        row = sheet.find(cell.model.removeprefix("plain:"), cell.optimizer, ranks, backend)
        return said.again or row is None or int(row["pairs"]) < said.pairs

    every = [Cell(f"plain:{n}", 1, optimizer) for n, optimizer in itertools.product(said.elements, OPTIMIZERS)]
    wanted = {
        ranks: [pair for pair in itertools.product(every, BACKENDS) if missing(ranks, *pair)] for ranks in said.ranks
    }
    with progress(sum(map(len, wanted.values()))) as bar:
        for ranks, some in wanted.items():
            if some:
                record(crew(divided, ranks, some, Pace(said.pairs, said.turn)), sheet, bar, divided_shown)


def cells(said: argparse.Namespace) -> list[Cell]:
    """Of the first two tables."""
    return [Cell(model, batch) for model, batch in itertools.product(said.models, said.batches)]


def present(sides: Iterable[str]) -> list[str]:
    """Those that can be measured here; says why others can't."""
    found = []
    for side in sides:
        if reason := absent(side):
            print(f"{side} is left out: {reason}", file=sys.stderr)
        else:
            found.append(side)
    return found


def shown(row: dict[str, Any]) -> str:
    """A row of step times as it comes."""
    what = f"{row['model']:12} batch {row['batch']:4} {row['ranks']} ranks  {row['side']:22}"
    return f"{what} {float(row['step_ms']):9.2f} ms {float(row['ratio']):6.2f} of {AGAINST}"


def peak_shown(row: dict[str, Any]) -> str:
    """A row of memory as it comes."""
    what = f"{row['model']:12} batch {row['batch']:4} {row['ranks']} ranks  {row['side']:22}"
    return f"{what} {row['peak_mib']:>9} MiB"


def divided_shown(row: dict[str, Any]) -> str:
    """A row of the optimizers as it comes."""
    what = f"{row['elements']:>11,} elements {row['optimizer']:4} {row['ranks']} ranks {row['backend']:4}"
    return f"{what}  whole {row['whole_ms']:>9} ms  divided {row['divided_ms']:>9} ms  {row['ratio']}"


def write(folder: Path, *sheets: Sheet) -> None:
    """The page, of what there is."""
    if not any(sheet.rows for sheet in sheets):
        raise InputError(f"nothing has been measured into {sheets[0].path.parent}; leave out --page first")
    path = folder / "README.md"
    path.write_text(page(*(sheet.rows for sheet in sheets)), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    sys.exit(main())

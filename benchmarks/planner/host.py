"""What is predicted of this host's steps and memory, beside what is measured; the plan's choice beside the best.

    python benchmarks/planner/host.py
    python benchmarks/planner/host.py --page

The first measures into results/ (rows that are there are kept), the second writes host.md.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from host_models import MODELS
from host_page import page
from host_sides import SIDES, Sides
from kit.machine import machine
from kit.sheet import Sheet
from kit.work import guarded, progress
from rich.progress import Progress

from paceline.core.errors import InputError

HERE = Path(__file__).parent

ROUNDS = 9


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is not there yet, or write the page; returns the exit code."""
    said = parsed(arguments)
    folder = said.out / "results"
    predicted = Sheet(folder / "host_predicted.csv", ("model", "side"))
    measured = Sheet(folder / "host_measured.csv", ("model", "side", "round"))

    def work() -> None:
        if said.page:
            write(said.out, predicted, measured)
        else:
            fill(said, predicted, measured)

    return guarded(work, str(folder))


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--page", action="store_true", help="write host.md from what has been measured")
    made.add_argument("--models", nargs="+", choices=list(MODELS), metavar="MODEL", help=", ".join(MODELS))
    made.add_argument("--rounds", type=int, default=ROUNDS, help=f"of all sides by turns; {ROUNDS} by default")
    made.add_argument("--seconds", type=float, default=1.5, help="that a run is to train; 1.5 by default")
    made.add_argument("--out", type=Path, default=HERE, metavar="DIR", help="of results/ and host.md; this folder")
    said = made.parse_args(arguments)
    said.models = said.models or [name for name in MODELS if name != "tiny"]
    return said


def fill(said: argparse.Namespace, predicted: Sheet, measured: Sheet) -> None:
    """Each model: first what is predicted, then rounds of runs by turns."""
    with progress(len(said.models) * said.rounds) as bar:
        for name in said.models:
            sides = Sides(name, MODELS[name].program(name), said.seconds)
            for row in sides.predicted(predicted):
                predicted.put(row)
            for number in range(said.rounds):
                one_round(sides, number, predicted, measured, bar)
                bar.update(bar.task_ids[0], advance=1)


def one_round(sides: Sides, number: int, predicted: Sheet, measured: Sheet, bar: Progress) -> None:
    """Of what has not been measured."""
    for side in list(SIDES)[:: -1 if number % 2 else 1]:
        row = predicted.find(sides.name, side)
        if row is None or measured.find(sides.name, side, number):
            continue
        bar.update(bar.task_ids[0], description=f"{sides.name}, {row['strategy']}, round {number + 1}")
        found: dict[str, Any] = sides.run(row)
        measured.put({"model": sides.name, "side": side, "round": number, **found, **machine()})


def write(folder: Path, predicted: Sheet, measured: Sheet) -> None:
    """The page, of what there is."""
    if not measured.rows:
        raise InputError(f"nothing has been measured into {measured.path.parent}; leave out --page first")
    path = folder / "host.md"
    path.write_text(page(predicted.rows, measured.rows), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    sys.exit(main())

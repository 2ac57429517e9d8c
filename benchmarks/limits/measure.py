"""Where speed on one host has come up against something: every aim, measured, met or not.

    python benchmarks/limits/measure.py
    python benchmarks/limits/measure.py --rows one-replica plans --again
    python benchmarks/limits/measure.py --page

Figures lie in results/limits.csv as they come; those that are there are not measured again.
"""

import argparse
import csv
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from kit.machine import machine
from kit.sheet import Sheet
from kit.work import guarded, progress
from limits import LIMITS, Limit
from page import page

from paceline.core.errors import InputError

HERE = Path(__file__).parent

KEYS = ("row", "label")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is not there yet, or write the page; returns the exit code."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rows", nargs="+", choices=list(LIMITS), default=list(LIMITS), metavar="ROW")
    made.add_argument("--again", action="store_true", help="also what has been measured")
    made.add_argument("--page", action="store_true", help="write README.md from what has been measured")
    made.add_argument("--out", type=Path, default=HERE, metavar="DIR", help="of results/ and README.md; this folder")
    said = made.parse_args(arguments)
    sheet = Sheet(said.out / "results" / "limits.csv", KEYS)
    return guarded(lambda: write(said, sheet) if said.page else fill(said, sheet), str(sheet.path))


def fill(said: argparse.Namespace, sheet: Sheet) -> None:
    """Run the commands of the rows that are wanted, each once."""
    there = {row["row"] for row in sheet.rows}
    wanted = [name for name in said.rows if said.again or name not in there]
    commands = dict.fromkeys(LIMITS[name].command for name in wanted)
    with progress(len(commands)) as bar:
        for command in commands:
            names = [name for name in wanted if LIMITS[name].command == command]
            bar.update(bar.task_ids[0], description=", ".join(names))
            told = run(LIMITS[names[0]])
            for name in names:
                sheet.drop(row=name)  # the worst of several may have been another one
                for figure in LIMITS[name].figures(told):
                    row = {"row": name, "label": figure.label, "value": f"{figure.value:.3f}"}
                    bound = "" if figure.bound is None else f"{figure.bound:.3f}"
                    instead = "" if figure.reached else figure.instead
                    row |= {"bound": bound, "aim": str(figure), "met": str(figure.met), "instead": instead}
                    sheet.put(row | machine())
                    bar.console.print(f"{name}: {figure.label} {figure.value:.3f}", highlight=False, markup=False)
            bar.advance(bar.task_ids[0])


def run(limit: Limit) -> list[Mapping[str, str]]:
    """Run a row's command and return the rows of its table.

    Raises:
        InputError: it failed; what it has said is on stderr.
    """
    script, *words = limit.command
    with tempfile.TemporaryDirectory(prefix="limits-") as folder:
        out = ["--out", folder] if limit.sheet else []
        done = subprocess.run(
            [sys.executable, HERE.parent / script, *words, *out], stdout=subprocess.PIPE, text=True, check=False
        )
        if done.returncode:
            raise InputError(f"{' '.join(limit.command)} ended with {done.returncode}; what it said is above")
        if not limit.sheet:
            return list(printed(done.stdout))
        with (Path(folder) / "results" / limit.sheet).open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))


def printed(text: str) -> Iterator[dict[str, str]]:
    """Yield the rows of a Markdown table.

    >>> list(printed("seconds\\n\\n| a | b |\\n|---|---|\\n| 1 | 2 |\\n"))
    [{'a': '1', 'b': '2'}]
    """
    lines = [line.strip("| \n").split("|") for line in text.splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip() for cell in line] for line in lines]
    for row in rows:
        yield dict(zip(head, row, strict=False))


def write(said: argparse.Namespace, sheet: Sheet) -> None:
    """Write the page."""
    (said.out / "README.md").write_text(page(sheet.rows), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())

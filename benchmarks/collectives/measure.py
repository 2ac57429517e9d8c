"""Backend shm beside Gloo: every collective, from 1 KiB to 100 MiB, results compared with what they must be.

    python benchmarks/collectives/measure.py
    python benchmarks/collectives/measure.py --ranks 2 --calls all_reduce --sizes 1K 256K --again
    python benchmarks/collectives/measure.py --page

Rows lie in results/collectives.csv as they come; those that are there are not measured again.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from calls import BARRIER, CALLS
from kit.crew import crew
from kit.sheet import Sheet
from kit.words import size
from kit.work import guarded, progress, record
from page import page
from ranks import Cell, Pace, measure

from paceline.core.errors import InputError

HERE = Path(__file__).parent

SIZES = ("1K", "4K", "16K", "64K", "256K", "1M", "4M", "16M", "100M")
RANKS = (2, 4, 8)
PAIRS = 9
TURN_S = 0.04

QUICK: dict[str, Any] = {"sizes": [size(text) for text in ("1K", "256K", "4M")], "pairs": 5}
"""What --quick says, where nothing else is said."""

KEYS = ("call", "ranks", "bytes")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is not there yet, or write the page; returns the exit code."""
    said = parsed(arguments)
    sheet = Sheet(said.out / "results" / "collectives.csv", KEYS)
    return guarded(lambda: write(said, sheet) if said.page else fill(said, sheet), str(sheet.path))


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--ranks", type=int, nargs="+", help=f"{' '.join(map(str, RANKS))} by default")
    made.add_argument("--calls", nargs="+", choices=list(CALLS), default=list(CALLS), metavar="CALL")
    made.add_argument("--sizes", type=size, nargs="+", metavar="SIZE", help=f"{' '.join(SIZES)} by default")
    made.add_argument("--pairs", type=int, help=f"of turns; {PAIRS} by default")
    made.add_argument("--turn", type=float, default=TURN_S, metavar="S", help="seconds of a turn, about (%(default)g)")
    made.add_argument("--quick", action="store_true", help="three sizes, 5 pairs: about two minutes")
    made.add_argument("--again", action="store_true", help="also what has been measured")
    made.add_argument("--page", action="store_true", help="write README.md from what has been measured")
    made.add_argument("--out", type=Path, default=HERE, metavar="DIR", help="of results/ and README.md; this folder")
    said = made.parse_args(arguments)
    usual = {"sizes": [size(text) for text in SIZES], "ranks": list(RANKS), "pairs": PAIRS}
    for name, value in (usual | QUICK if said.quick else usual).items():
        if getattr(said, name) is None:
            setattr(said, name, value)
    return said


def fill(said: argparse.Namespace, sheet: Sheet) -> None:
    """Measure, with one crew for each number of ranks."""
    if min(said.ranks) < 2:
        raise InputError(f"--ranks {min(said.ranks)}: one rank has no peer; write --ranks 2")
    missing = {ranks: list(cells(said, sheet, ranks)) for ranks in said.ranks}
    with progress(sum(map(len, missing.values()))) as bar:
        for ranks, wanted in missing.items():
            if wanted:
                record(crew(measure, ranks, wanted, Pace(said.pairs, said.turn)), sheet, bar, shown)


def cells(said: argparse.Namespace, sheet: Sheet, ranks: int) -> Iterator[Cell]:
    """What is to be measured; a row of fewer pairs than are asked for counts for nothing."""
    for call in said.calls:
        for nbytes in [0] if call == BARRIER else said.sizes:
            there = sheet.find(call, ranks, nbytes)
            if said.again or there is None or int(there["pairs"]) < said.pairs:
                yield Cell(call, nbytes)


def shown(row: dict[str, Any]) -> str:
    """A row as it comes."""
    what = f"{row['call']:23}{row['ranks']:2} ranks {row['bytes']:>11,} B"
    return f"{what}  shm {row['shm_us']:>10} µs  gloo {row['gloo_us']:>10} µs  {float(row['ratio']):6.2f} ×"


def write(said: argparse.Namespace, sheet: Sheet) -> None:
    """The page."""
    if not sheet.rows:
        raise InputError(f"nothing has been measured into {sheet.path}; leave out --page first")
    path = said.out / "README.md"
    path.write_text(page(sheet.rows), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    sys.exit(main())

"""A step of a pipeline: Paceline beside torch.distributed.pipelining and beside the ideal, and what stages keep.

    python benchmarks/pipeline/measure.py
    python benchmarks/pipeline/measure.py --memory
    python benchmarks/pipeline/measure.py --swimlane
    python benchmarks/pipeline/measure.py --page

Rows lie in results/ as they come; those that are there are not measured again.
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from figure import draw
from kit.crew import crew
from kit.sheet import Sheet
from kit.work import guarded, progress, record
from lanes import swimlane
from models import LAYERS, SIZES
from page import page
from ranks import measure
from rounds import Cell, Pace
from saved import COUNTS, WAYS, Fill, memory
from sides import OURS, SCHEDULES

from paceline.core.errors import InputError

HERE = Path(__file__).parent

PAIRS = 15
TURN_S = 1.4

WHOLE = {
    "stages": [2, 4], "schedules": list(SCHEDULES), "sizes": ["large", "small"], "backends": ["shm", "gloo"],
    "pairs": PAIRS, "turn": TURN_S, "ways": list(WAYS), "counts": list(COUNTS),
}  # fmt: skip
QUICK = WHOLE | {
    "stages": [2], "schedules": ["gpipe", "1f1b"], "sizes": ["small"], "backends": ["shm"], "pairs": 3, "turn": 0.1,
    "ways": ["gpipe", "1f1b"], "counts": [4, 8],
}  # fmt: skip
MEMORY = {"sizes": ["small"]}
"""Under --memory, where nothing else is said: bytes follow the size of a micro-batch."""

PICTURED = ("1f1b", "zero-bubble")
"""Under --swimlane, where nothing else is said."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is not there yet, or write the page; returns the exit code."""
    said = parsed(arguments)
    folder = said.out / "results"
    steps = Sheet(folder / "steps.csv", ("size", "stages", "backend", "schedule", "side"))
    saved = Sheet(folder / "memory.csv", ("size", "stages", "way", "micro_batches", "stage"))

    def work() -> None:
        refuse_stages(said.stages)
        if said.page:
            write(said.out, steps, saved)
        elif said.memory:
            fill_memory(said, saved)
        elif said.swimlane:
            draw_lanes(said, folder)
        else:
            fill_steps(said, steps)

    return guarded(work, str(folder))


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = made.add_mutually_exclusive_group()
    what.add_argument("--memory", action="store_true", help="what stages keep for backward, against micro-batches")
    what.add_argument("--swimlane", action="store_true", help="draw a step of each schedule beside its ideal")
    what.add_argument("--page", action="store_true", help="write README.md from what has been measured")
    made.add_argument("--stages", type=int, nargs="+", help="2 4 by default")
    made.add_argument("--schedules", nargs="+", choices=SCHEDULES, metavar="SCHEDULE", help="; ".join(SCHEDULES))
    made.add_argument("--sizes", nargs="+", choices=list(SIZES), metavar="SIZE", help="large small by default; tiny")
    made.add_argument("--backends", nargs="+", choices=("shm", "gloo"), metavar="BACKEND", help="shm gloo by default")
    made.add_argument("--ways", nargs="+", choices=list(WAYS), metavar="WAY", help=f"with --memory: {'; '.join(WAYS)}")
    made.add_argument("--counts", type=int, nargs="+", help="of micro-batches, with --memory; 4 8 16 32 64 by default")
    made.add_argument("--pairs", type=int, help=f"turns of each side; {PAIRS} by default")
    made.add_argument("--turn", type=float, metavar="S", help=f"seconds of a turn, about; {TURN_S:g} by default")
    made.add_argument("--quick", action="store_true", help="one size, two schedules, 2 stages, shm, 3 turns")
    made.add_argument("--again", action="store_true", help="also what has been measured")
    made.add_argument("--out", type=Path, default=HERE, metavar="DIR", help="of results/ and README.md; this folder")
    said = made.parse_args(arguments)
    usual = (QUICK if said.quick else WHOLE) | (MEMORY if said.memory or said.swimlane else {})
    if said.swimlane:
        usual |= {"stages": [2], "schedules": list(PICTURED), "backends": ["shm"]}
    for name, value in usual.items():
        if getattr(said, name) is None:
            setattr(said, name, value)
    return said


def refuse_stages(stages: Sequence[int]) -> None:
    """Only equal parts of whole layers can be cut at the same places by all."""
    for count in stages:
        if count < 2 or LAYERS % (2 * count):
            raise InputError(f"--stages {count} can't have {LAYERS} layers in two equal parts each; write --stages 2 4")


def fill_steps(said: argparse.Namespace, sheet: Sheet) -> None:
    """The table of step times: all sides of a cell by turns."""

    def missing(stages: int, cell: Cell) -> bool:
        row = sheet.find(cell.size, stages, cell.backend, cell.schedule, OURS)
        return said.again or row is None or int(row["pairs"]) < said.pairs

    cells = [Cell(*each) for each in itertools.product(said.sizes, said.backends, said.schedules)]
    wanted = {stages: [cell for cell in cells if missing(stages, cell)] for stages in said.stages}
    with progress(sum(map(len, wanted.values()))) as bar:
        for stages, some in wanted.items():
            if some:
                record(crew(measure, stages, some, Pace(said.pairs, said.turn)), sheet, bar, shown)


def fill_memory(said: argparse.Namespace, sheet: Sheet) -> None:
    """The table of memory, and its figure."""

    def missing(stages: int, fill: Fill) -> bool:
        return said.again or sheet.find(fill.size, stages, fill.way, fill.micro_batches, stages - 1) is None

    every = [Fill(*each) for each in itertools.product(said.sizes, said.ways, said.counts)]
    wanted = {stages: [fill for fill in every if missing(stages, fill)] for stages in said.stages}
    with progress(sum(map(len, wanted.values()))) as bar:
        for stages, some in wanted.items():
            if some:
                record(crew(memory, stages, some), sheet, bar, saved_shown)


def draw_lanes(said: argparse.Namespace, folder: Path) -> None:
    """Pictures of single steps."""
    folder.mkdir(parents=True, exist_ok=True)
    for size, stages, name in itertools.product(said.sizes, said.stages, said.schedules):
        (picture,) = crew(swimlane, stages, size, name, said.backends[0])
        path = folder / f"swimlane_{name}_{size}_{stages}.svg"
        path.write_text(picture, encoding="utf-8")
        print(path)


def shown(row: dict[str, Any]) -> str:
    """A row of step times as it comes."""
    what = f"{row['size']:6} {row['stages']} stages {row['backend']:5} {row['schedule']:12} {row['side']:13}"
    return f"{what} {float(row['step_ms']):9.2f} ms {float(row['of_ideal']):6.3f} of the ideal"


def saved_shown(row: dict[str, Any]) -> str:
    """A row of memory as it comes."""
    what = f"{row['size']:6} {row['stages']} stages {row['way']:18} m = {row['micro_batches']:<3} stage {row['stage']}"
    return f"{what} {row['peak_saved_bytes'] / 2**20:9.3f} MiB"


def write(folder: Path, steps: Sheet, saved: Sheet) -> None:
    """Figure and page, of what there is."""
    results = steps.path.parent
    if not (steps.rows or saved.rows):
        raise InputError(f"nothing has been measured into {results}; leave out --page first")
    for size in sorted({row["size"] for row in saved.rows}):
        draw(saved.rows, size, results)
    pictures = sorted([*results.glob("memory_*.png"), *results.glob("swimlane_*.svg")])
    path = folder / "README.md"
    path.write_text(page(steps.rows, saved.rows, pictures), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    sys.exit(main())

"""How far off published runs are predicted from others: models, sources, and drawn runs and models left out at a time.

    python benchmarks/planner/calibration.py

Writes results/calibration.csv, row by row (what is there is not computed again without --again), and calibration.md.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from calibration_page import page
from kit.sheet import Sheet
from kit.work import guarded

from paceline.plan.predict import blank, fits
from paceline.planner.calibration.calibrate import Calibration, MemoryCalibration, calibrated, calibrated_memory
from paceline.planner.calibration.corrections import Case
from paceline.planner.calibration.device_rates import data_sheet_s, taught
from paceline.planner.calibration.rows import GIB, PublishedRow, read

HERE = Path(__file__).parent
DATA = HERE.parents[1].parent / "shared" / "data" / "planner" / "calibration.csv"
WAYS: dict[str, Callable[[PublishedRow], object]] = {"model": lambda row: row.group, "source": lambda row: row.source}
"""What is left out together."""
DRAWN: dict[str, tuple[Callable[[PublishedRow], object], float]] = {
    "runs drawn": (lambda row: row.name, 0.25),
    "models drawn": (lambda row: row.group, 0.2),
}
"""What is drawn, and which part of it."""
DRAWS = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Compute what is missing and write the page; returns the exit code."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--data", type=Path, default=DATA, metavar="FILE", help="of published rows; ../shared/data/…")
    made.add_argument(
        "--out", type=Path, default=HERE, metavar="DIR", help="of results/ and calibration.md; this folder"
    )
    made.add_argument("--again", action="store_true", help="compute all rows anew")
    said = made.parse_args(arguments)
    return guarded(lambda: write(said.data, said.out, again=said.again), str(said.out))


def write(data: Path, out: Path, *, again: bool) -> None:
    """The sheet and the page."""
    rows, sheet = read(data), Sheet(out / "results" / "calibration.csv", ("row_id", "left_out"))
    whole = calibrated(rows)
    for way, own in parts(rows):
        if again or any(sheet.find(row.name, way) is None for row in own):
            for line in left_out(rows, own, way):
                sheet.put(line)
    path = out / "calibration.md"
    path.write_text(page(sheet.rows, rows, whole, alone(rows), taught(rows)), encoding="utf-8")
    print(path)


def parts(rows: Sequence[PublishedRow]) -> Iterator[tuple[str, Sequence[PublishedRow]]]:
    """What is left out, and how that is called: each model, each source, and what is drawn, with a number."""
    for way, key in WAYS.items():
        for left in dict.fromkeys(map(key, rows)):
            yield way, [row for row in rows if key(row) == left]
    for way, (key, part) in DRAWN.items():
        kinds = list(dict.fromkeys(map(key, rows)))
        for draw in range(DRAWS):
            left_out = set(Random(draw).sample(kinds, round(part * len(kinds))))
            yield f"{way} {draw}", [row for row in rows if key(row) in left_out]


def alone(rows: Sequence[PublishedRow]) -> dict[str, float]:
    """Seconds of each with a shape, as of `paceline plan`: data sheets, usual latencies, nothing overlaps."""
    found = {row.name: Case.of(blank(row)) for row in rows}
    return {name: data_sheet_s(case) for name, case in found.items() if case}


def left_out(rows: Sequence[PublishedRow], own: Sequence[PublishedRow], way: str) -> Iterator[dict[str, Any]]:
    """Some of the rows, predicted from all others alone: a fit that began at that of all rows would know of them."""
    others = [row for row in rows if row not in own]
    times = calibrated(others)
    memory = calibrated_memory(others)
    for row in own:
        yield line(row, times, memory, way)


def line(row: PublishedRow, times: Calibration, memory: MemoryCalibration, way: str) -> dict[str, Any]:
    """Predicted and measured."""
    asked = blank(row)
    found, room = times.forecast(asked), memory.forecast(asked)
    return {
        "row_id": row.name,
        "left_out": way,
        "step_s": f"{found.step_s:.6g}",
        "low_s": f"{found.low_s:.6g}",
        "high_s": f"{found.high_s:.6g}",
        "measured_s": f"{row.step_s:.6g}" if row.step_s else "",
        "held_gib": f"{room.bytes / GIB:.5g}",
        "low_gib": f"{room.low_bytes / GIB:.5g}",
        "high_gib": f"{room.high_bytes / GIB:.5g}",
        "measured_gib": f"{row.peak_bytes / GIB:.5g}" if row.peak_bytes else "",
        "fits": "yes" if fits(asked, room) else "no",
    }


if __name__ == "__main__":
    sys.exit(main())

"""Write README.md from results/."""

import csv
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from forms import SIZES, SPLITS, TOLERANCE
from kit.machine import described
from kit.words import bullets, grid

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"

# In place of the split that a run was saved in.
UNCUT = "uncut"

Row = Mapping[str, str]

HEAD = """# Resharding

A run is saved in one split and goes on in another: replicas, stages, shards, ZeRO-1, FSDP2 and hybrids of 1, 2, 3, 4
and 8 workers, under SGD with momentum and AdamW, both with clipping and a cosine schedule.

    python benchmarks/resharding/measure.py

The model is an MLP of eight layers (6-24-16-11-32-13-24-9-3, so that there are eight stages, and widths that 2, 3, 4
and 8 do not divide), an update has 24 samples in any split, an epoch 200. The run is cut after 6 updates, in the middle
of an epoch, and goes on for 50, over five ends of an epoch. One worker is the same in every form, and no hybrid has 2.
"""

READING = """
## What is read

Each checkpoint is read into each split the way a resume does, with all memory set to NaN before; then every rank's
rectangles are compared with the full tensors **bit for bit**, parameters and optimizer state by full name, and the
numbers (steps) by name. What the ranks would write again has to cover each tensor once. And at the cut every checkpoint
has the tensors of one process, but for rounding (1e-9).
"""

GOING_ON = """
## How it goes on

The loss after each of the 50 updates, of all training samples and of a test set, beside that of **one process that
is not cut**: largest relative deviation. To pass: at most 1e-6, and each sample once in each epoch, over the cut. In
float64, because there what another split changes (the order of sums) stays so small that a wrong moment, step count or
sample shows.
"""


def write_page() -> None:
    """Write the page."""
    read, resumed = (_rows(RESULTS / name) for name in ("read.csv", "resumed.csv"))
    double = [row for row in resumed if row["dtype"] == "float64"]
    single = [row for row in resumed if row["dtype"] == "float32" and row["saved"] != UNCUT]
    beside = [row for row in resumed if row["dtype"] == "float32" and row["saved"] == UNCUT]
    bad = [
        f"{row['saved']} → {row['read']}, {row['optimizer']}: {row['differing']}" for row in read if row["differing"]
    ]
    bad += [
        f"{row['saved']} → {row['resumed']}, {row['optimizer']}, {row['dtype']}: {_apart(row):.3g}, each sample once: "
        f"{row['each_sample_once']}"
        for row in resumed
        if _apart(row) > TOLERANCE[row["dtype"]] or row["each_sample_once"] != "True"
    ]
    chunks = sum(int(row["chunks"]) for row in read)
    text = "\n".join(
        [
            HEAD + READING,
            f"{len(read)} readings, {chunks:,} rectangles. Saved in a row's form, read in a column's: readings, and "
            "those with a difference.\n",
            _forms(read, "read", lambda rows: f"{len(rows)}, {sum(bool(r['differing']) for r in rows)}"),
            GOING_ON,
            f"{len(double)} runs in float64. Saved in a row's form, resumed in a column's: runs, and the largest "
            "deviation.\n",
            _forms(double, "resumed", _told),
            "\nThe same by number of workers, saved on a row's, resumed on a column's.\n",
            _sizes(double),
            f"\nIn float32 1e-6 does not hold: {len(single)} runs from 8 workers on 3 are up to "
            f"{_largest(single)} from one process. So are runs that were not cut: {len(beside)} of them, in the same "
            f"splits, up to {_largest(beside)}; a rounding of 6e-8 grows with the updates.\n",
            _forms(single, "resumed", _told),
            "\n## What does not hold\n",
            bullets(bad),
            f"\nMachine: {described(resumed)}.\n",
        ]
    )
    (HERE / "README.md").write_text(text, encoding="utf-8")


def _apart(row: Row) -> float:
    return max(float(row["of_train"]), float(row["of_test"]))


def _largest(rows: Sequence[Row]) -> str:
    return f"{max(map(_apart, rows)):.2g}" if rows else "—"


def _told(rows: Sequence[Row]) -> str:
    return f"{len(rows)}, {_largest(rows)}"


def _forms(rows: Iterable[Row], after: str, cell: Callable[[Sequence[Row]], str]) -> str:
    form = {split.strategy: split.form for split in SPLITS}
    return _grid(rows, lambda row: (form[row["saved"]], form[row[after]]), list(dict.fromkeys(form.values())), cell)


def _sizes(rows: Iterable[Row]) -> str:
    size = {split.strategy: split.workers for split in SPLITS}
    return _grid(rows, lambda row: (size[row["saved"]], size[row["resumed"]]), SIZES, _told)


def _grid(
    rows: Iterable[Row],
    place: Callable[[Row], tuple[object, object]],
    names: Sequence[object],
    cell: Callable[[Sequence[Row]], str],
) -> str:
    found = defaultdict[tuple[object, object], list[Row]](list)
    for row in rows:
        found[place(row)].append(row)
    lines = [(one, *(cell(found[one, other]) if found[one, other] else "—" for other in names)) for one in names]
    return grid(("saved \\ then", *names), lines)


def _rows(path: Path) -> list[Row]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))

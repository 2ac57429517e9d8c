"""What the fullest stage keeps for backward, over the number of micro-batches: PNG to look at, SVG to print."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from kit.sheet import Row
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter
from saved import WAYS

from paceline.plots.curves import PALETTE
from paceline.report.figures import INK

LOOK: Any = {  # matplotlib's type for it lists the names that its newest version knows
    "svg.fonttype": "none",
    "svg.hashsalt": "paceline",  # equal inputs, equal files
    "text.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
}

LINES = dict(zip(WAYS, ("o-", "s-", "D:", "o--", "s--"), strict=True))

COLOURS = dict(zip(WAYS, (PALETTE[i] for i in (0, 1, 2, 0, 1)), strict=True))
"""Recomputation keeps its schedule's colour."""


def draw(rows: Sequence[Row], size: str, folder: Path) -> None:
    """Write memory_SIZE.png and .svg, a panel for each number of stages."""
    mine = [row for row in rows if row["size"] == size]
    counts = sorted({int(row["stages"]) for row in mine})
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(4.6 * len(counts), 3.8), layout="constrained")
        for panel, stages in enumerate(counts):
            axes = figure.add_subplot(1, len(counts), panel + 1)
            _lines(axes, [row for row in mine if int(row["stages"]) == stages])
            axes.set_title(f"{stages} stages", fontsize=10)
            if panel == 0:
                axes.set_ylabel("saved for backward on the fullest stage, MiB")
                axes.legend(fontsize=8, frameon=False)
        for ending, facts in (("png", {}), ("svg", {"Date": None})):
            figure.savefig(folder / f"memory_{size}.{ending}", dpi=150, metadata=facts)


def _lines(axes: Any, rows: Sequence[Row]) -> None:
    for way in WAYS:
        points = fullest(rows, way)
        if points:
            heights = [nbytes / 2**20 for nbytes in points.values()]
            axes.plot(list(points), heights, LINES[way], color=COLOURS[way], label=way, markersize=4)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(sorted({int(row["micro_batches"]) for row in rows}))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(ScalarFormatter())
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("m, micro-batches")


def fullest(rows: Sequence[Row], way: str) -> dict[int, int]:
    """m -> bytes of the stage that keeps most."""
    found: dict[int, int] = {}
    for row in sorted((row for row in rows if row["way"] == way), key=lambda row: int(row["micro_batches"])):
        m = int(row["micro_batches"])
        found[m] = max(found.get(m, 0), int(row["peak_saved_bytes"]))
    return found

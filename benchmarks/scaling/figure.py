"""Efficiency over the number of workers, a line for each policy."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

if TYPE_CHECKING:
    from measure import Row

MARKERS = "osD^v<>Pp*Xh"


def draw(rows: "Sequence[Row]", title: str, path: Path) -> None:
    """Write the picture; the file's ending says whether as PNG or SVG."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    lines: dict[str, list[Row]] = {}
    for row in rows:
        # The one option that changes with the number of workers would make a line of each point.
        lines.setdefault(row.policy.partition(":")[0], []).append(row)
    for i, (name, points) in enumerate(lines.items()):
        counts, heights = [row.workers for row in points], [row.efficiency for row in points]
        axes.plot(counts, heights, label=name, marker=MARKERS[i % len(MARKERS)])
    axes.axhline(1.0, color="grey", linewidth=0.8, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({row.workers for row in rows}))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_ylim(bottom=0)
    axes.set(xlabel="workers, one thread each", ylabel="efficiency = rate(P) / (P · rate(1))")
    axes.set_title(title, fontsize=8)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)

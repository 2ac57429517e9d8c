"""The paper's figures 4 to 10, from the runs of its tables: PNG to look at, SVG to print."""

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from cells import METRICS, Result
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from protocol import ALGORITHMS, TABLES, Configuration, Table
from study import Study

from paceline.plots.curves import PALETTE
from paceline.report.figures import INK, PALE

COLOURS = dict(zip(ALGORITHMS, PALETTE, strict=False))
DASHES: dict[str, Any] = dict(zip(ALGORITHMS, ("-", "--", "-"), strict=True))

SAID = {"test_accuracy": "test accuracy, points", "test_loss": "test loss", "train_loss": "training loss"}
"""Metric -> what an axis or a row calls it."""

CURVES = {4: (1, 300), 5: (1, 500), 6: (2, 300), 7: (2, 500)}
"""Figure -> its table and step size."""

BARS = {8: 3, 9: 4, 10: 5}
"""Figure -> the table whose differences it shows."""

_ACROSS = {3: "batch size", 4: "step size, gradients", 5: "delay: (mean, standard deviation), s"}

LOOK: Any = {  # matplotlib's type for it lists the names that its newest version knows
    "svg.fonttype": "none",
    "svg.hashsalt": "paceline",  # equal inputs, equal files
    "text.color": INK,
    "font.size": 9.5,
    "figure.titlesize": 11.5,
    "figure.titleweight": "bold",
    "axes.edgecolor": "#b5b5b5",
    "axes.labelcolor": "#555555",
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.xmargin": 0.02,
    "grid.color": "#e6e6e6",
    "xtick.color": "#b5b5b5",
    "ytick.color": "#b5b5b5",
    "xtick.labelcolor": "#555555",
    "ytick.labelcolor": "#555555",
    "lines.linewidth": 1.8,
}


def table_of(figure: int) -> Table:
    """The table that has a figure's runs."""
    return TABLES[CURVES[figure][0] if figure in CURVES else BARS[figure]]


def configurations(figure: int) -> tuple[Configuration, ...]:
    """Those whose runs a figure shows."""
    every = CURVES[figure][1] if figure in CURVES else None
    return tuple(c for c in table_of(figure).configurations if every in (None, c.every))


def title(table: Table) -> str:
    """What a table is about; the copy of CIFAR-10 is called what it is."""
    return f"{table.title} (JPEG copy)" if table.configurations[0].dataset == "cifar10" else table.title


def draw(study: Study, figure: int, folder: Path) -> list[Path]:
    """Write ``figure_N.png`` and ``figure_N.svg``."""
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(LOOK):
        made = _curves(study, figure) if figure in CURVES else _differences(study, figure)
        made.suptitle(_caption(study, figure), x=0.01, ha="left")
        paths = [folder / f"figure_{figure}.{kind}" for kind in ("png", "svg")]
        made.savefig(paths[0], dpi=130, metadata={"Software": None})
        made.savefig(paths[1], metadata={"Date": None, "Creator": None})
    return paths


def _caption(study: Study, figure: int) -> str:
    count = study.rounds_of(table_of(figure).configurations[0])
    rounds = f"{count} round{'s' if count > 1 else ''}, {study.engine} engine"
    if figure in BARS:
        return f"Figure {figure}: Smooth Switch minus asynchronous, by {title(table_of(figure))}; {rounds}"
    return f"Figure {figure}: {title(table_of(figure))}, step size {CURVES[figure][1]}; {rounds}"


def _curves(study: Study, number: int) -> Figure:
    """Metrics over time: a row a metric, a column a batch size."""
    columns = configurations(number)
    figure = Figure(figsize=(8.6, 8.4), layout="constrained")
    grid = figure.subplots(len(METRICS), len(columns), sharex=True, sharey="row", squeeze=False)
    for column, configuration in enumerate(columns):
        results = study.results(configuration)
        for row, metric in enumerate(METRICS):
            _over_time(grid[row, column], results, metric)
        grid[0, column].set_title(f"batch size {configuration.batch_size}")
        grid[-1, column].set_xlabel("time, s")
    for row, metric in enumerate(METRICS):
        grid[row, 0].set_ylabel(SAID[metric])
    lines = [Line2D([], [], color=COLOURS[name], linestyle=DASHES[name], label=name) for name in ALGORITHMS]
    figure.legend(handles=lines, loc="outside lower center", ncols=len(lines), frameon=False)
    return figure


def _over_time(axes: Axes, results: dict[str, list[Result]], metric: str) -> None:
    """Each algorithm's mean over rounds, and the range between them; what diverged is left out."""
    for name, runs in results.items():
        curves = [run.curve for run in runs if not run.diverged]
        if not curves:
            continue
        length = min(len(curve["time_s"]) for curve in curves)
        values = np.array([curve[metric][:length] for curve in curves])
        times = np.mean([curve["time_s"][:length] for curve in curves], axis=0)
        axes.fill_between(times, values.min(0), values.max(0), color=COLOURS[name], alpha=0.16, linewidth=0)
        axes.plot(times, values.mean(0), DASHES[name], color=COLOURS[name])


def _differences(study: Study, number: int) -> Figure:
    """Differences against the configuration, ours with intervals beside the paper's: a panel a metric."""
    table = table_of(number)
    entries = study.entries(table)
    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    panels: Sequence[Axes] = figure.subplots(1, len(METRICS))
    for axes, metric in zip(panels, METRICS, strict=True):
        mine = [entry for entry in entries if entry.metric == metric]
        widths = [entry.half_width if isfinite(entry.half_width) else 0.0 for entry in mine]
        places = np.arange(len(mine))
        axes.axhline(0, color=PALE, linewidth=0.8)
        axes.plot(places, [entry.paper for entry in mine], "s--", color=PALE, label="paper")
        ours = [entry.ours if isfinite(entry.ours) else np.nan for entry in mine]
        axes.errorbar(places, ours, widths, fmt="o-", color=COLOURS["smooth-switch"], capsize=3, label="ours, 95 %")
        axes.set_title(SAID[metric])
        axes.margins(x=0.06)
        axes.set_xticks(places, [entry.label for entry in mine])
    panels[len(panels) // 2].set_xlabel(_ACROSS[table.number])
    panels[0].legend(frameon=False)
    return figure

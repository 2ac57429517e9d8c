"""Figures of a report: curves over time, and bars for each strategy, as SVG.

Figures over time: accuracy, losses and K, each strategy's mean over rounds with the range between them.

Figures with a row for each strategy: how stale the gradients were, how busy the workers.
"""

import io
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter
from numpy.typing import NDArray

from paceline.core.records import Record
from paceline.metrics.repeats import mean_summary, weighted_mean
from paceline.report.inputs import StrategyRuns

INK, PALE = "#333333", "#8a8a8a"

_WIDTH_IN = 5.6
_STYLE: Any = {  # matplotlib's type for it lists the names that its newest version knows
    "svg.fonttype": "none",  # text stays text: it can be searched, and the page sets its font
    "svg.hashsalt": "paceline",  # equal inputs, equal pages
    "text.parse_math": False,  # a name may hold a dollar sign
    "font.size": 9.5,
    "text.color": INK,
    "figure.titlesize": 11.5,
    "figure.titleweight": "bold",
    "axes.edgecolor": "#b5b5b5",
    "axes.labelcolor": "#555555",
    "axes.titlesize": 9.5,
    "axes.titlepad": 5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.xmargin": 0.01,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "xtick.color": "#b5b5b5",
    "ytick.color": "#b5b5b5",
    "xtick.labelcolor": "#555555",
    "ytick.labelcolor": "#555555",
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
}


def drawn(draw: Callable[[list[Axes]], None], title: str, *, rows: int = 1, height_in: float = 3.1, says: str) -> str:
    """An SVG element with ``rows`` axes, one below the other, that ``draw`` has filled.

    Args:
        draw: gets the axes, from top to bottom.
        title: what is shown, with its unit.
        rows: how many axes; they share what runs along x.
        height_in: of the whole figure, inches; its width is always the same.
        says: what the figure shows, for those who can't see it.
    """
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH_IN, height_in), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left")
        draw(list(figure.subplots(rows, sharex=True, squeeze=False)[:, 0]))
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _inline(text.getvalue(), says)


def _inline(svg: str, says: str) -> str:
    """The element alone, as wide as the page lets it."""
    element = svg[svg.index("<svg") :]
    element = re.sub(r"<metadata>.*?</metadata>", "", element, count=1, flags=re.DOTALL)
    element = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", element, count=1)
    element = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", element, count=1)
    return element.replace("<svg", f'<svg role="img" aria-label="{says}"', 1)


Numbers = NDArray[np.float64]

_LOG_FROM = 30.0
"""Largest over smallest mean from which a loss is drawn on a logarithmic axis."""


@dataclass(frozen=True, slots=True)
class Band:
    """A figure over time in all rounds at once."""

    times_s: Numbers
    mean: Numbers
    low: Numbers
    high: Numbers


def band(histories: Sequence[Sequence[Record]], key: str, *, steps: bool = False) -> Band | None:
    """Mean, least and largest over the rounds, at every time at which any of them was scored.

    Between its own records a round is taken to run straight (``steps``: to stay as it was). Where rounds ended at
    different times the band ends with the first of them. None where no round has the figure.
    """
    rounds = [points for history in histories if len((points := _points(history, key))[0])]
    if not rounds:
        return None
    start, end = max(times[0] for times, _ in rounds), min(times[-1] for times, _ in rounds)
    times = np.unique(np.concatenate([times for times, _ in rounds]))
    times = times[(times >= start) & (times <= end)]
    if not len(times):
        return None
    values = np.stack([_at(times, *points, steps=steps) for points in rounds])
    return Band(times, values.mean(0), values.min(0), values.max(0))


def curve(groups: Sequence[StrategyRuns], key: str, title: str, *, time: str, scale: float = 1.0) -> str | None:
    """One figure over time as SVG; None where no run has it.

    Args:
        groups: the strategies.
        key: of a history record.
        title: with the unit.
        time: what the time axis is called.
        scale: what to multiply the figure by.
    """
    steps = key == "threshold"
    bands = [(group, band([run.history for run in group.runs], key, steps=steps)) for group in groups]
    if all(found is None for _, found in bands):
        return None

    def draw(axes: list[Axes]) -> None:
        for group, found in bands:
            if found is not None:
                _draw(axes[0], group, found, scale, steps)
        axes[0].set_xlabel(time)
        _scale(axes[0], key, [found for _, found in bands if found is not None])

    return drawn(draw, title, says=f"{title}, over time, for each strategy")


def _points(history: Sequence[Record], key: str) -> tuple[Numbers, Numbers]:
    rows = [record.row() for record in history]
    pairs = [(row["time_s"], row[key]) for row in rows if row.get(key) is not None and math.isfinite(row[key])]
    return np.array([t for t, _ in pairs], dtype=float), np.array([v for _, v in pairs], dtype=float)


def _at(times: Numbers, own: Numbers, values: Numbers, *, steps: bool) -> Numbers:
    if steps:
        return values[np.searchsorted(own, times, side="right") - 1]
    return np.interp(times, own, values)


def _draw(axes: Axes, group: StrategyRuns, found: Band, scale: float, steps: bool) -> None:
    line: dict[str, Any] = {"drawstyle": "steps-post"} if steps else {}
    fill: dict[str, Any] = {"step": "post"} if steps else {}
    if len(group.runs) > 1:
        low, high = scale * found.low, scale * found.high
        axes.fill_between(found.times_s, low, high, color=group.colour, alpha=0.16, linewidth=0, **fill)
    axes.plot(found.times_s, scale * found.mean, group.dash, color=group.colour, **line)


def _scale(axes: Axes, key: str, bands: Sequence[Band]) -> None:
    if key == "threshold":
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    elif key.endswith("_loss"):
        least, most = min(b.low.min() for b in bands), max(b.mean.max() for b in bands)
        if least > 0 and most / least > _LOG_FROM:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
        elif least >= 0:
            axes.set_ylim(bottom=0)


_ROW_IN, _REST_IN = 0.95, 0.8
_BINS = 48
"""Most bars that a histogram has."""

_TOLD_APART = 0.99
"""The share of the gradients that the bars tell apart."""


def staleness(groups: Sequence[StrategyRuns]) -> str | None:
    """Histograms of the staleness of applied Δs, all rounds together, as SVG; None where none was applied."""
    found = {group.strategy: _added(group) for group in groups}
    reach = max((_reach(histogram) for histogram in found.values() if histogram), default=None)
    if reach is None:
        return None
    width = -(-(reach + 1) // _BINS)
    more = any(max(histogram, default=0) > reach for histogram in found.values())

    def row(axes: Axes, group: StrategyRuns) -> None:
        histogram = found[group.strategy]
        if histogram:
            at, shares = _binned(histogram, width, reach)
            axes.bar(at, 100 * shares, width=0.86 * width, color=group.colour)
            mean = weighted_mean(histogram.items())
            axes.set_title(f"mean {mean:.1f}, largest {max(histogram)}", loc="right", color=PALE)

    beyond = f"; the last bar: more than {reach}" if more else ""
    return _rows(groups, row, "Staleness: share of the applied gradients, %", f"updates of A since it was read{beyond}")


def utilisation(groups: Sequence[StrategyRuns]) -> str | None:
    """Busy / total time of each worker, mean over rounds, as SVG; None where it was not measured."""
    found = {group.strategy: _busy(group) for group in groups}
    if not any(found.values()):
        return None

    def row(axes: Axes, group: StrategyRuns) -> None:
        shares = found[group.strategy]
        axes.set(ylim=(0, 100), yticks=(0, 50, 100))
        if shares:
            axes.bar(range(len(shares)), [100 * share for share in shares], width=0.78, color=group.colour)
            axes.set_title(f"mean {fmean(shares):.0%}", loc="right", color=PALE)

    return _rows(groups, row, "Busy time of each worker, %", "worker")


def _busy(group: StrategyRuns) -> list[float]:
    mean = mean_summary([run.summary for run in group.runs]).get("utilisation") or []
    return [0.0 if share is None else share for share in mean]


def _rows(groups: Sequence[StrategyRuns], draw: Callable[[Axes, StrategyRuns], None], title: str, xlabel: str) -> str:
    def all_rows(axes: list[Axes]) -> None:
        for each, group in zip(axes, groups, strict=True):
            each.set_title(group.label, loc="left")
            each.yaxis.set_major_locator(MaxNLocator(3))
            draw(each, group)
        axes[-1].set_xlabel(xlabel)
        axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))

    height_in = _REST_IN + _ROW_IN * len(groups)
    return drawn(all_rows, title, rows=len(groups), height_in=height_in, says=f"{title}, for each strategy")


def _added(group: StrategyRuns) -> dict[int, int]:
    total: Counter[int] = Counter()
    for run in group.runs:
        total.update({int(value): count for value, count in (run.summary.get("staleness") or {}).items()})
    return dict(total)


def _reach(histogram: Mapping[int, int]) -> int:
    """The staleness up to which bars are told apart: a few gradients of a worker that was held up may be far off."""
    total, below = sum(histogram.values()), 0
    for value in sorted(histogram):
        below += histogram[value]
        if below >= _TOLD_APART * total:
            return value
    return 0


def _binned(histogram: Mapping[int, int], width: int, reach: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Middles of the bins, and which share of all fell into each; what lies beyond ``reach`` is in one bin after it."""
    last = reach // width + 1
    counts = np.zeros(last + 1)
    for value, count in histogram.items():
        counts[last if value > reach else value // width] += count
    middles = width * np.arange(len(counts), dtype=np.float64) + (width - 1) / 2
    return middles, counts / counts.sum()

"""Figures of a report as SVG: curves over time, and a row of bars for each strategy.

Curves show each strategy's mean over rounds with the range between them; bars show how stale the gradients were and
how busy the workers.
"""

import io
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
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


Numbers = NDArray[np.float64]

# Ratio of the largest mean to the smallest from which a loss is drawn on a logarithmic axis.
_LOG_FROM = 30.0

# Heights in inches: of one row of bars, and of title and axis together.
_ROW_IN, _REST_IN = 0.95, 0.8

# Largest number of bars of a histogram.
_BINS = 48

# Fraction of the gradients that have bars of their own.
_BINNED = 0.99


def drawn(draw: Callable[[list[Axes]], None], title: str, *, rows: int = 1, height_in: float = 3.1, says: str) -> str:
    """Return an SVG element with ``rows`` axes, one below the other, that ``draw`` has filled.

    Args:
        draw: function of the axes, from top to bottom.
        title: title with the unit.
        rows: number of axes; they share the x axis.
        height_in: height of the whole figure in inches; its width is always the same.
        says: description of the figure, for readers who can't see it.
    """
    with mpl.rc_context(fname=Path(__file__).parent / "figures.mplstyle"):
        figure = Figure(figsize=(_WIDTH_IN, height_in), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left")
        draw(list(figure.subplots(rows, sharex=True, squeeze=False)[:, 0]))
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    # Keep the element alone, without its size: the page sets the width.
    text = file.getvalue()
    element = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], count=1, flags=re.DOTALL)
    element = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", element, count=1)
    element = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", element, count=1)
    return element.replace("<svg", f'<svg role="img" aria-label="{says}"', 1)


@dataclass(frozen=True, slots=True)
class Band:
    """A figure over time in all rounds at once."""

    times_s: Numbers
    mean: Numbers
    low: Numbers
    high: Numbers


def band(histories: Sequence[Sequence[Record]], key: str, *, steps: bool = False) -> Band | None:
    """Return mean, least and largest over the rounds, at every time at which any of them was scored.

    Between its own records a round is interpolated linearly (``steps``: stays constant). If rounds ended at different
    times, the band ends with the first of them.

    Returns:
        The band; None if no round has the figure.
    """
    rounds: list[tuple[Numbers, Numbers]] = []
    for history in histories:
        rows = [record.row() for record in history]
        points = [(row["time_s"], row[key]) for row in rows if row.get(key) is not None and math.isfinite(row[key])]
        if points:
            rounds.append((np.array([t for t, _ in points], float), np.array([v for _, v in points], float)))
    if not rounds:
        return None
    start, end = max(times[0] for times, _ in rounds), min(times[-1] for times, _ in rounds)
    times = np.unique(np.concatenate([times for times, _ in rounds]))
    times = times[(times >= start) & (times <= end)]
    if not len(times):
        return None
    # A step curve has at each time the value of the newest record; a time is never before the first one here.
    values: list[Numbers] = []
    for own_times, own in rounds:
        newest = np.searchsorted(own_times, times, side="right") - 1
        values.append(own[newest] if steps else np.interp(times, own_times, own))
    mean, low, high = np.mean(values, 0), np.min(values, 0), np.max(values, 0)
    return Band(times, mean, low, high)


def curve(groups: Sequence[StrategyRuns], key: str, title: str, *, time: str, scale: float = 1.0) -> str | None:
    """Return one figure over time as SVG; None if no run has it.

    Args:
        groups: the strategies.
        key: key of a history record.
        title: title with the unit.
        time: label of the time axis.
        scale: factor of the figure.
    """
    steps = key == "threshold"
    every = [(group, band([run.history for run in group.runs], key, steps=steps)) for group in groups]
    bands = [(group, each) for group, each in every if each is not None]
    if not bands:
        return None

    def draw(rows: list[Axes]) -> None:
        axes = rows[0]
        line: dict[str, Any] = {"drawstyle": "steps-post"} if steps else {}
        fill: dict[str, Any] = {"step": "post"} if steps else {}
        for group, each in bands:
            if len(group.runs) > 1:
                low, high = scale * each.low, scale * each.high
                axes.fill_between(each.times_s, low, high, color=group.colour, alpha=0.16, linewidth=0, **fill)
            axes.plot(each.times_s, scale * each.mean, group.dash, color=group.colour, **line)
        axes.set_xlabel(time)
        # K counts gradients, and its axis starts at 0; losses over orders of magnitude need a logarithm.
        if key == "threshold":
            axes.set_ylim(bottom=0)
            axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        elif key.endswith("_loss"):
            least, most = min(each.low.min() for _, each in bands), max(each.mean.max() for _, each in bands)
            if least > 0 and most / least > _LOG_FROM:
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter("{x:g}")
                axes.yaxis.set_minor_formatter(NullFormatter())
            elif least >= 0:
                axes.set_ylim(bottom=0)

    return drawn(draw, title, says=f"{title}, over time, for each strategy")


def staleness(groups: Sequence[StrategyRuns]) -> str | None:
    """Return histograms of the staleness of applied Δs, all rounds together, as SVG; None if none was applied."""
    histograms: dict[str, Counter[int]] = {}
    for group in groups:
        histogram = histograms[group.strategy] = Counter[int]()
        for run in group.runs:
            histogram.update({int(value): count for value, count in (run.summary.get("staleness") or {}).items()})
    last = max((reach(histogram) for histogram in histograms.values() if histogram), default=None)
    if last is None:
        return None
    # Bins of whole numbers, the same for all strategies.
    width = -(-(last + 1) // _BINS)

    def row(axes: Axes, group: StrategyRuns) -> None:
        histogram = histograms[group.strategy]
        if histogram:
            middles, shares = binned(histogram, width, last)
            axes.bar(middles, 100 * shares, width=0.86 * width, color=group.colour)
            mean = weighted_mean(histogram.items())
            axes.set_title(f"mean {mean:.1f}, largest {max(histogram)}", loc="right", color=PALE)

    more = any(max(histogram, default=0) > last for histogram in histograms.values())
    beyond = f"; the last bar: more than {last}" if more else ""
    return _rows(groups, row, "Staleness: share of the applied gradients, %", f"updates of A since it was read{beyond}")


def reach(histogram: Mapping[int, int]) -> int:
    """Return the staleness up to which bars are drawn: a few gradients of a delayed worker may be far off."""
    total, below = sum(histogram.values()), 0
    for value in sorted(histogram):
        below += histogram[value]
        if below >= _BINNED * total:
            return value
    return 0


def binned(histogram: Mapping[int, int], width: int, reach: int) -> tuple[Numbers, Numbers]:
    """Return the middles of the bins and the fraction in each; values beyond ``reach`` are in one bin after it."""
    last = reach // width + 1
    counts = np.zeros(last + 1)
    for value, count in histogram.items():
        counts[last if value > reach else value // width] += count
    return width * np.arange(last + 1, dtype=np.float64) + (width - 1) / 2, counts / counts.sum()


def utilisation(groups: Sequence[StrategyRuns]) -> str | None:
    """Return busy / total time of each worker, mean over rounds, as SVG; None if it was not measured."""
    busy = {g.strategy: mean_summary([run.summary for run in g.runs]).get("utilisation") or [] for g in groups}
    if not any(busy.values()):
        return None

    def row(axes: Axes, group: StrategyRuns) -> None:
        shares = [0.0 if share is None else share for share in busy[group.strategy]]
        axes.set(ylim=(0, 100), yticks=(0, 50, 100))
        if shares:
            axes.bar(range(len(shares)), [100 * share for share in shares], width=0.78, color=group.colour)
            axes.set_title(f"mean {fmean(shares):.0%}", loc="right", color=PALE)

    return _rows(groups, row, "Busy time of each worker, %", "worker")


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

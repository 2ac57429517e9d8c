"""Figures of a report as SVG: curves over time, and a row of bars for each strategy.

Curves show each strategy's mean over rounds with the range between them; bars show how stale the gradients were and
how busy the workers.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from paceline.metrics.repeats import mean_summary, weighted_mean
from paceline.plots.curves import Numbers, band, draw, style, svg
from paceline.report.inputs import StrategyRuns

INK, PALE = "#333333", "#8a8a8a"

_WIDTH_IN = 5.6

# Heights in inches: of one row of bars, and of title and axis together.
_ROW_IN, _REST_IN = 0.95, 0.8

# Largest number of bars of a histogram.
_BINS = 48

# Fraction of the gradients that have bars of their own.
_BINNED = 0.99


def drawn(fill: Callable[[list[Axes]], None], title: str, *, rows: int = 1, height_in: float = 3.1, says: str) -> str:
    """Return an SVG element with ``rows`` axes, one below the other, that ``fill`` has filled.

    Args:
        fill: function of the axes, from top to bottom.
        title: title with the unit.
        rows: number of axes; they share the x axis.
        height_in: height of the whole figure in inches; its width is always the same.
        says: description of the figure, for readers who can't see it.
    """
    with style():
        figure = Figure(figsize=(_WIDTH_IN, height_in), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left")
        fill(list(figure.subplots(rows, sharex=True, squeeze=False)[:, 0]))
    return svg(figure, says)


def curve(groups: Sequence[StrategyRuns], key: str, title: str, *, time: str, scale: float = 1.0) -> str | None:
    """Return one figure over time as SVG; None if no run has it.

    Args:
        groups: the strategies.
        key: key of a history record.
        title: title with the unit.
        time: label of the time axis.
        scale: factor of the figure.
    """
    curves = [group.curve for group in groups]
    if not any(band(each.histories, key) for each in curves):
        return None

    def fill(rows: list[Axes]) -> None:
        draw(rows[0], curves, key, scale=scale)
        rows[0].set_xlabel(time)

    return drawn(fill, title, says=f"{title}, over time, for each strategy")


def lines(curves: Sequence[tuple[str, Sequence[float], Sequence[float], str, str]], title: str, xlabel: str) -> str:
    """Return one figure of several curves as SVG.

    Args:
        curves: label, x, y, colour and dash of each; labels are left out where there is one curve.
        title: title with the unit.
        xlabel: label of the other axis.
    """

    def draw(rows: list[Axes]) -> None:
        axes = rows[0]
        for label, x, y, colour, dash in curves:
            axes.plot(x, y, dash, color=colour, label=label)
        axes.set_xlabel(xlabel)
        if len(curves) > 1:
            axes.legend(fontsize="small")

    return drawn(draw, title, says=f"{title}, over {xlabel}")


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
    """Return busy / total time of each worker, mean over rounds, as SVG; None if it was measured of no worker."""
    busy = {g.strategy: mean_summary([run.summary for run in g.runs]).get("utilisation") or [] for g in groups}
    if all(share is None for shares in busy.values() for share in shares):
        return None

    def row(axes: Axes, group: StrategyRuns) -> None:
        shares = {worker: share for worker, share in enumerate(busy[group.strategy]) if share is not None}
        axes.set(ylim=(0, 100), yticks=(0, 50, 100))
        if shares:
            axes.bar(list(shares), [100 * share for share in shares.values()], width=0.78, color=group.colour)
        mean = f"mean {fmean(shares.values()):.0%}" if shares else "not measured"
        axes.set_title(mean, loc="right", color=PALE)

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

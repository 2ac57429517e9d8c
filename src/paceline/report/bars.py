"""Figures with a row for each strategy: how stale the gradients were, how busy the workers."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from paceline.metrics.averages import weighted_mean
from paceline.metrics.rounds import mean_summary
from paceline.report.figures import PALE, drawn
from paceline.report.sources import Group

_ROW_IN, _REST_IN = 0.95, 0.8
_BINS = 48
"""Most bars that a histogram has."""

_TOLD_APART = 0.99
"""The share of the gradients that the bars tell apart."""


def staleness(groups: Sequence[Group]) -> str | None:
    """Histograms of the staleness of applied Δs, all rounds together, as SVG; None where none was applied."""
    found = {group.strategy: _added(group) for group in groups}
    reach = max((_reach(histogram) for histogram in found.values() if histogram), default=None)
    if reach is None:
        return None
    width = -(-(reach + 1) // _BINS)
    more = any(max(histogram, default=0) > reach for histogram in found.values())

    def row(axes: Axes, group: Group) -> None:
        histogram = found[group.strategy]
        if histogram:
            at, shares = _binned(histogram, width, reach)
            axes.bar(at, 100 * shares, width=0.86 * width, color=group.colour)
            mean = weighted_mean(histogram.items())
            axes.set_title(f"mean {mean:.1f}, largest {max(histogram)}", loc="right", color=PALE)

    beyond = f"; the last bar: more than {reach}" if more else ""
    return _rows(groups, row, "Staleness: share of the applied gradients, %", f"updates of A since it was read{beyond}")


def utilisation(groups: Sequence[Group]) -> str | None:
    """Busy / total time of each worker, mean over rounds, as SVG; None where it was not measured."""
    found = {group.strategy: _busy(group) for group in groups}
    if not any(found.values()):
        return None

    def row(axes: Axes, group: Group) -> None:
        shares = found[group.strategy]
        axes.set(ylim=(0, 100), yticks=(0, 50, 100))
        if shares:
            axes.bar(range(len(shares)), [100 * share for share in shares], width=0.78, color=group.colour)
            axes.set_title(f"mean {fmean(shares):.0%}", loc="right", color=PALE)

    return _rows(groups, row, "Busy time of each worker, %", "worker")


def _busy(group: Group) -> list[float]:
    mean = mean_summary([run.summary for run in group.runs]).get("utilisation") or []
    return [0.0 if share is None else share for share in mean]


def _rows(groups: Sequence[Group], draw: Callable[[Axes, Group], None], title: str, xlabel: str) -> str:
    def all_rows(axes: list[Axes]) -> None:
        for each, group in zip(axes, groups, strict=True):
            each.set_title(group.label, loc="left")
            each.yaxis.set_major_locator(MaxNLocator(3))
            draw(each, group)
        axes[-1].set_xlabel(xlabel)
        axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))

    height_in = _REST_IN + _ROW_IN * len(groups)
    return drawn(all_rows, title, rows=len(groups), height_in=height_in, says=f"{title}, for each strategy")


def _added(group: Group) -> dict[int, int]:
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

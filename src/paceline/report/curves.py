"""Figures over time: accuracy, losses and K, each strategy's mean over rounds with the range between them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, NullFormatter
from numpy.typing import NDArray

from paceline.core.records import Record
from paceline.report.figures import drawn
from paceline.report.sources import Group

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


def curve(groups: Sequence[Group], key: str, title: str, *, time: str, scale: float = 1.0) -> str | None:
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


def _draw(axes: Axes, group: Group, found: Band, scale: float, steps: bool) -> None:
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

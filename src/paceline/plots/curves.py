"""Curves of losses and accuracy: a strategy's mean over rounds, with the range between them, over time and updates."""

import io
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal, TypeAlias

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter
from numpy.typing import NDArray

from paceline.core.records import Record

Numbers: TypeAlias = NDArray[np.float64]

# The x axis: seconds of training, or updates of A.
Axis: TypeAlias = Literal["time_s", "updates"]

# Okabe and Ito's colours, for readers who see few: blue, vermilion, green, purple, orange, sky blue, black.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#AA4499", "#E69F00", "#56B4E9", "#333333")
# Line styles: if there are more strategies than colours, colours are repeated with broken lines.
DASHES = ("-", "--", ":")

# Ratio of the largest mean to the smallest from which a loss is drawn on a logarithmic axis.
_LOG_FROM = 30.0

# Key of a record, title, factor.
_SCORES = (
    ("test_accuracy", "Test accuracy, %", 100.0),
    ("test_loss", "Test loss", 1.0),
    ("train_loss", "Training loss", 1.0),
)

# Inches: width of a column of axes, height of a row, height of title and legend.
_COLUMN_IN, _ROW_IN, _REST_IN = 4.2, 2.1, 0.7


@dataclass(frozen=True, slots=True)
class Curve:
    """One strategy: its look, and the records of each of its rounds."""

    label: str
    colour: str
    dash: str
    histories: Sequence[Sequence[Record]]


def look(number: int) -> tuple[str, str]:
    """Return colour and line style of the strategy of that number: 21 can be distinguished.

    >>> look(0), look(7)
    (('#0072B2', '-'), ('#0072B2', '--'))
    """
    return PALETTE[number % len(PALETTE)], DASHES[number // len(PALETTE) % len(DASHES)]


def curves_of(histories: Mapping[str, Sequence[Sequence[Record]]]) -> list[Curve]:
    """Return a curve for each label, every one with a look of its own."""
    return [Curve(label, *look(number), rounds) for number, (label, rounds) in enumerate(histories.items())]


@dataclass(frozen=True, slots=True)
class Band:
    """A figure over time, or over updates, in all rounds at once."""

    x: Numbers
    mean: Numbers
    low: Numbers
    high: Numbers


def band(histories: Sequence[Sequence[Record]], key: str, *, steps: bool = False, axis: Axis = "time_s") -> Band | None:
    """Return mean, least and largest over the rounds, at every x at which any of them was scored.

    Between its own records a round is interpolated linearly (``steps``: stays constant). If rounds ended at different
    x, the band ends with the first of them.

    Returns:
        The band; None if no round has the figure.
    """
    rounds: list[tuple[Numbers, Numbers]] = []
    for history in histories:
        rows = [record.row() for record in history]
        points = [(row[axis], row[key]) for row in rows if row.get(key) is not None and math.isfinite(row[key])]
        if points:
            rounds.append((np.array([x for x, _ in points], float), np.array([v for _, v in points], float)))
    if not rounds:
        return None
    start, end = max(places[0] for places, _ in rounds), min(places[-1] for places, _ in rounds)
    x = np.unique(np.concatenate([places for places, _ in rounds]))
    x = x[(x >= start) & (x <= end)]
    if not len(x):
        return None
    # A step curve has at each x the value of the newest record; an x is never before the first one here.
    values: list[Numbers] = []
    for places, own in rounds:
        newest = np.searchsorted(places, x, side="right") - 1
        values.append(own[newest] if steps else np.interp(x, places, own))
    mean, low, high = np.mean(values, 0), np.min(values, 0), np.max(values, 0)
    return Band(x, mean, low, high)


def draw(axes: Axes, curves: Sequence[Curve], key: str, *, scale: float = 1.0, axis: Axis = "time_s") -> bool:
    """Draw one figure of all curves, each with the range over its rounds; return whether any has it.

    Args:
        axes: to draw into.
        curves: the strategies.
        key: key of a history record.
        scale: factor of the figure.
        axis: the x axis.
    """
    steps = key == "threshold"
    every = [(curve, band(curve.histories, key, steps=steps, axis=axis)) for curve in curves]
    bands = [(curve, each) for curve, each in every if each is not None]
    line: dict[str, Any] = {"drawstyle": "steps-post"} if steps else {}
    fill: dict[str, Any] = {"step": "post"} if steps else {}
    for curve, each in bands:
        if len(curve.histories) > 1:
            low, high = scale * each.low, scale * each.high
            axes.fill_between(each.x, low, high, color=curve.colour, alpha=0.16, linewidth=0, **fill)
        axes.plot(each.x, scale * each.mean, curve.dash, color=curve.colour, label=curve.label, **line)
    if bands:
        _fit_y(axes, key, [each for _, each in bands])
    return bool(bands)


def _fit_y(axes: Axes, key: str, bands: Sequence[Band]) -> None:
    """Begin the axis of K, which counts gradients, and of losses at 0; losses over orders of magnitude need a log."""
    if key == "threshold":
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    elif key.endswith("_loss"):
        least, most = min(each.low.min() for each in bands), max(each.mean.max() for each in bands)
        if least > 0 and most / least > _LOG_FROM:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
        elif least >= 0:
            axes.set_ylim(bottom=0)


class Plot(Figure):
    """A figure that a notebook shows, whether or not pyplot was imported; no window has it, and none is opened."""

    def _repr_svg_(self) -> str:
        return svg(self)


def style() -> AbstractContextManager[None]:
    """Return the context in which figures look as in a report."""
    return mpl.rc_context(fname=Path(__file__).parent / "figures.mplstyle")


def plot(curves: Sequence[Curve], title: str, *, virtual: bool, over: Sequence[Axis] = ("time_s", "updates")) -> Plot:
    """Return a figure of accuracy and losses: a row for each that was scored, a column for each x axis.

    Args:
        curves: the strategies.
        title: of the figure.
        virtual: whether time is simulated.
        over: the x axes.
    """
    scored = [score for score in _SCORES if any(band(curve.histories, score[0]) for curve in curves)]
    names: dict[Axis, str] = {"time_s": "virtual time, s" if virtual else "training time, s", "updates": "updates of A"}
    columns = [(axis, names[axis]) for axis in over]
    with style():
        size = len(columns) * _COLUMN_IN, max(1, len(scored)) * _ROW_IN + _REST_IN
        figure = Plot(figsize=size, layout="constrained")
        figure.suptitle(title, x=0.01, ha="left")
        grid = figure.subplots(max(1, len(scored)), len(columns), sharex="col", sharey="row", squeeze=False)
        for row, (key, name, scale) in zip(grid, scored, strict=False):
            row[0].set_ylabel(name)
            for axes, (axis, _) in zip(row, columns, strict=True):
                draw(axes, curves, key, scale=scale, axis=axis)
        for axes, (_, label) in zip(grid[-1], columns, strict=True):
            axes.set_xlabel(label)
        if len(curves) > 1 and scored:
            handles, labels = grid[0][0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower left", ncols=2, frameon=False)
    return figure


def svg(figure: Figure, says: str = "") -> str:
    """Return a figure as an SVG element without its size: the page sets the width.

    Args:
        figure: that was drawn.
        says: description of the figure, for readers who can't see it; empty: its title.
    """
    file = io.StringIO()
    with style():
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    element = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], count=1, flags=re.DOTALL)
    element = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", element, count=1)
    element = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", element, count=1)
    return element.replace("<svg", f'<svg role="img" aria-label="{escape(says or figure.get_suptitle())}"', 1)

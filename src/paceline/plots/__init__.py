"""Curves of runs. Importing this imports no matplotlib: that is an extra, and needed once a figure is asked for."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeAlias

from paceline.core.records import Record

if TYPE_CHECKING:
    from paceline.plots.curves import Plot


# Label of a line -> the records of its rounds: the line is their mean, with the range between them.
Histories: TypeAlias = Mapping[str, Sequence[Sequence[Record]]]


def plot(histories: Histories, title: str, *, virtual: bool) -> "Plot":
    """Return a figure of accuracy and losses, a row each that was scored, over training time and over updates.

    Args:
        histories: of the lines.
        title: of the figure.
        virtual: whether time is simulated.
    """
    from paceline.plots import curves

    return curves.plot(curves.curves_of(histories), title, virtual=virtual)


def plot_svg(histories: Histories, *, virtual: bool) -> str:
    """Return accuracy and losses over time as an SVG element; empty where matplotlib is absent or a line has no length.

    Args:
        histories: of the lines.
        virtual: whether time is simulated.
    """
    if find_spec("matplotlib") is None or not any(len(each) > 1 for rounds in histories.values() for each in rounds):
        return ""
    from paceline.plots import curves

    # Half of the axes of plot(), since a notebook draws it whether or not anybody looks.
    figure = curves.plot(curves.curves_of(histories), "", virtual=virtual, over=("time_s",))
    return curves.svg(figure, "Accuracy and losses over time")

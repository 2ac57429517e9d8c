"""How figures look, and how they become SVG that lies within a page."""

import io
import re
from collections.abc import Callable
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

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

"""Short forms of results: figures of a summary as words, lines for ``repr``, tables of HTML for notebooks."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from paceline.core.formatting import seconds_text

# Label, key in a summary, format.
_FIGURES = (
    ("updates", "updates", "{:,.0f}"),
    ("seconds", "seconds", "{:,.2f}"),
    ("test accuracy", "test_accuracy", "{:.2%}"),
    ("test loss", "test_loss", "{:.4f}"),
    ("training loss", "train_loss", "{:.4f}"),
)

_CELL = 'style="text-align:left"'


def figures(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return updates, seconds and scores of a summary as text by label; what was not measured is left out.

    >>> figures({"updates": 1200, "seconds": 3.0, "test_accuracy": 0.971, "test_loss": None})
    {'updates': '1,200', 'seconds': '3.00', 'test accuracy': '97.10%'}
    """
    known = ((label, form, summary.get(key)) for label, key, form in _FIGURES)
    return {label: form.format(value) for label, form, value in known if value is not None}


def sentence(summary: Mapping[str, Any]) -> str:
    """Return updates, seconds and scores of a summary in one line.

    >>> sentence({"updates": 1200, "seconds": 3.0, "test_accuracy": 0.971, "interrupted": True})
    '1,200 updates in 3 s, test accuracy 97.10%, interrupted'
    """
    words = figures(summary)
    seconds = summary.get("seconds")
    spent = "" if seconds is None else f" in {seconds_text(seconds)}"
    start = [f"{words.pop('updates', '0')} updates{spent}"]
    words.pop("seconds", None)
    scores = [f"{label} {value}" for label, value in words.items()]
    return ", ".join([*start, *scores, *(["interrupted"] if summary.get("interrupted") else [])])


def html_table(caption: str, rows: Sequence[Sequence[str]], *, titles: Sequence[str] = (), drawing: str = "") -> str:
    """Return a table as HTML, all of its text escaped.

    Args:
        caption: text above the table.
        rows: cells, as many in each row.
        titles: of the columns; empty: the first cell of each row is its title.
        drawing: an SVG element to show below it.
    """
    head = "".join(f"<th {_CELL}>{escape(title)}</th>" for title in titles)
    lines = [f"<thead><tr>{head}</tr></thead>"] if titles else []
    for first, *rest in rows:
        name = f"<td {_CELL}>{escape(first)}</td>" if titles else f"<th {_CELL}>{escape(first)}</th>"
        cells = "".join(f"<td {_CELL}>{escape(cell)}</td>" for cell in rest)
        lines.append(f"<tr>{name}{cells}</tr>")
    top = f'<caption style="caption-side:top;text-align:left">{escape(caption)}</caption>'
    below = f'<div style="max-width:56em">{drawing}</div>' if drawing else ""
    return f"<table>{top}{''.join(lines)}</table>{below}"

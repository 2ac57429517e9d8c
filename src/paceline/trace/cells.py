"""Time cut into the characters of a line of text."""

from collections.abc import Iterable

from paceline.core.types import Nanoseconds
from paceline.trace.lanes import Stretch, dominant
from paceline.trace.spans import Action, Span

LETTERS: dict[Action, str] = {
    "compute": "C",
    "forward": "F",
    "backward": "B",
    "backward_input": "I",
    "backward_weight": "W",
    "recompute": "R",
    "send": "s",
    "receive": "r",
    "all_reduce": "=",
    "pull": "v",
    "push": "^",
    "apply": "A",
    "wait": ".",
    "delay": "~",
    "evaluate": "E",
}
"""How each action is drawn in a line of text."""


def cells(spans: Iterable[Span], shown: Stretch, width: int) -> list[Span | None]:
    """What each of ``width`` characters of a lane shows: a span of the action that took most of its time, the longest
    there; None where nothing was done."""
    found: list[dict[Span, Nanoseconds]] = [{} for _ in range(width)]
    for span in spans:
        if (cut := shown.cut(span)) is not None:
            _fill(found, span, *cut, shown.length_ns)
    return [_shown(cell) for cell in found]


def _fill(
    found: list[dict[Span, Nanoseconds]], span: Span, start: Nanoseconds, end: Nanoseconds, length: Nanoseconds
) -> None:
    """Add a span's time to the cells it meets; in units of 1/width nanoseconds, so that all stays whole."""
    width = len(found)
    for index in range(start * width // length, min(width, -(-end * width // length))):
        inside = min(end * width, (index + 1) * length) - max(start * width, index * length)
        found[index][span] = found[index].get(span, 0) + inside


def _shown(cell: dict[Span, Nanoseconds]) -> Span | None:
    if not cell:
        return None
    totals: dict[Action, Nanoseconds] = {}
    for span, inside in cell.items():
        totals[span.action] = totals.get(span.action, 0) + inside
    action = dominant(totals)
    return max((span for span in cell if span.action == action), key=cell.__getitem__)

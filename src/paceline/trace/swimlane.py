"""Swimlanes: a lane per worker, time from left to right, what each did and how long it waited.

:func:`text` draws them with characters, :func:`svg` as a picture.
"""

from collections.abc import Iterable

from paceline.core.errors import InputError
from paceline.core.types import Seconds
from paceline.trace.cells import LETTERS, cells
from paceline.trace.lanes import Lane, Stretch, duration, lanes, present, stretch
from paceline.trace.picture import svg
from paceline.trace.spans import Span

__all__ = ["LETTERS", "svg", "text"]

_LEAST_WIDTH = 10


def text(spans: Iterable[Span], width: int = 80, start_s: Seconds | None = None, end_s: Seconds | None = None) -> str:
    """Swimlanes as lines of text; a character shows the action that took most of its time, a blank nothing at all.

    Args:
        spans: of one run.
        width: characters of a lane, its label not counted.
        start_s: where to begin, in seconds since the first span; by default there.
        end_s: where to end; by default with the last span.

    Raises:
        InputError: a width below 10, or a stretch that shows nothing.

    >>> print(text([Span(0, 0, 0, "forward", 1, 0, 0, 4000, 0), Span(0, 0, 0, "wait", 1, 0, 6000, 10000, 0)], 10))
              0     10 µs
    replica 0 |FFFF  ....|
    one character = 1 µs   F forward   . wait
    """
    if width < _LEAST_WIDTH:
        raise InputError(f"width={width} leaves no room for a lane; write width={_LEAST_WIDTH} or more.")
    spans = list(spans)
    if not spans:
        return "no spans\n"
    shown, drawn = stretch(spans, start_s, end_s), lanes(spans)
    gutter = max(len(lane.label) for lane in drawn)
    rows = [f"{lane.label:<{gutter}} |{_row(lane, shown, width)}|" for lane in drawn]
    legend = [f"{LETTERS[action]} {action}" for action in present(drawn, shown)]
    footer = "   ".join([f"one character = {duration(shown.length_ns / width)}", *legend])
    return "\n".join([" " * (gutter + 1) + _header(shown, width), *rows, footer]) + "\n"


def _header(shown: Stretch, width: int) -> str:
    first, last = duration(shown.start_ns) if shown.start_ns > 0 else "0", duration(shown.end_ns)
    return f"{first}{last:>{width + 2 - len(first)}}"


def _row(lane: Lane, shown: Stretch, width: int) -> str:
    return "".join(LETTERS[span.action] if span else " " for span in cells(lane.spans, shown, width))

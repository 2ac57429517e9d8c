"""Swimlanes: a lane for each worker, time from left to right, with its actions and its waiting.

:func:`text` draws them with characters, :func:`svg` as an SVG that needs no style sheet, script or font.

::

      [] forward  [] backward  [] wait            legend
    replica 0  |####==..####==..|
    replica 1  |######==######==|                 lanes
    server     |     =   =   =  |
               0 ms            20 ms              axis
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from paceline.core.errors import InputError
from paceline.core.types import Nanoseconds, Seconds
from paceline.trace.lanes import Lane, Stretch, dominant, duration, lanes, present, stretch
from paceline.trace.spans import Action, Span
from paceline.trace.svg import (
    AXIS,
    CHARACTER,
    MARGIN,
    SvgLayout,
    all_lanes,
    axis,
    head,
    labels,
    legend,
    legend_height,
    legend_places,
    words,
)

__all__ = [
    "LETTERS",
    "svg",
    "text",
]


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
"""Character of each action in a line of text."""


def cells(spans: Iterable[Span], shown: Stretch, width: int) -> list[Span | None]:
    """Return the span that each of ``width`` characters of a lane shows: of the action that took most of its time, the
    longest; None if the worker was idle."""
    found: list[dict[Span, Nanoseconds]] = [{} for _ in range(width)]
    for span, part in innermost(spans):
        if (cut := shown.cut(part)) is not None:
            _fill(found, span, *cut, shown.length_ns)
    return [_shown(cell) for cell in found]


def innermost(spans: Iterable[Span]) -> Iterator[tuple[Span, Span]]:
    """Yield each span with its pieces in which no span is under way that has begun later.

    ::

        forward      |---------------|          forward      |--|    |-------|
        all_reduce      |----|                  all_reduce      |----|
    """
    under_way: list[tuple[Span, Nanoseconds]] = []  # each with the time up to which it has been yielded
    for span in sorted(spans, key=lambda each: (each.start_ns, -each.end_ns)):
        yield from _ended(under_way, span.start_ns)
        if under_way:
            outer, since = under_way[-1]
            if span.start_ns > since:
                yield outer, replace(outer, start_ns=since, end_ns=span.start_ns)
        under_way.append((span, span.start_ns))
    while under_way:
        yield from _ended(under_way, under_way[-1][0].end_ns)


def _ended(under_way: list[tuple[Span, Nanoseconds]], now: Nanoseconds) -> Iterator[tuple[Span, Span]]:
    """Remove the spans that have ended by then, the last one first, and yield their remaining pieces."""
    while under_way and under_way[-1][0].end_ns <= now:
        span, since = under_way.pop()
        if span.end_ns > since or span.duration_ns == 0:
            yield span, replace(span, start_ns=since, end_ns=span.end_ns)
        if under_way:
            outer, begun = under_way[-1]
            under_way[-1] = outer, max(begun, since, span.end_ns)


def _fill(
    found: list[dict[Span, Nanoseconds]], span: Span, start: Nanoseconds, end: Nanoseconds, length: Nanoseconds
) -> None:
    """Add a span's time to the cells it meets; in units of 1/width nanoseconds, so that all stays whole."""
    width = len(found)  # a cell is length / width long: times · width are whole numbers
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


_TALLEST, _PITCHES = 1200.0, (3.0, 24.0)
"""Height that many lanes share, and the least and largest distance from one lane to the next."""


def svg(spans: Iterable[Span], start_s: Seconds | None = None, end_s: Seconds | None = None) -> str:
    """Return swimlanes as a self-contained SVG; a box has a tooltip with its action, step and duration.

    Neighbours too narrow to be distinguished are drawn as one box in the colour of the action that took most of its
    time, so the size follows the width of the picture, not the number of spans.

    Args:
        spans: of one run.
        start_s: where to begin, in seconds since the first span; by default there.
        end_s: where to end; by default with the last span.

    Raises:
        InputError: a stretch that shows nothing.
    """
    spans = list(spans)
    if not spans:
        return head(40) + words(MARGIN, 24, "no spans") + "</svg>\n"
    shown, drawn = stretch(spans, start_s, end_s), lanes(spans)
    places = legend_places(present(drawn, shown))
    left = 2 * MARGIN + CHARACTER * max(len(lane.label) for lane in drawn)
    pitch = min(max(_TALLEST / len(drawn), _PITCHES[0]), _PITCHES[1])
    layout = SvgLayout(left, legend_height(places) + 6, pitch, shown, tuple(drawn))
    parts = (legend(places), axis(layout), labels(layout), all_lanes(layout))
    return head(round(layout.bottom + AXIS)) + "".join(piece for part in parts for piece in part) + "</svg>\n"


_LEAST_WIDTH = 10


def text(spans: Iterable[Span], width: int = 80, start_s: Seconds | None = None, end_s: Seconds | None = None) -> str:
    """Return swimlanes as lines of text; a character shows the action that took most of its time, a blank none.

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

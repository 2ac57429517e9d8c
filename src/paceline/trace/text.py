"""Swimlanes and panels as lines of text: a lane for each worker, time from left to right.

Panels are steps of a pipeline one above the other, to one scale: the measured one and ideal ones.

::

    measured, step 7: 12 ms
    stage 0 |F0F1F2....B0--B1--B2--A|       F1--  forward of micro-batch 1, as long as that took
    stage 1 |..F0F1F2B0--B1--B2--..A|
    ideal: 10 ms
    stage 0 |F0F1F2..B0--B1--B2--|          ends here: the rest, up to the end above, is lost
    stage 1 |..F0F1B0--F2B1--B2--|
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from paceline.core.errors import InputError
from paceline.core.types import Nanoseconds, Seconds
from paceline.trace.lanes import LOOKS, Panel, Stretch, dominant, duration, panel_lanes, window_lanes
from paceline.trace.spans import PASSES, Action, Span

_LEAST_WIDTH = 10


def swimlanes_text(
    spans: Iterable[Span], width: int = 80, start_s: Seconds | None = None, end_s: Seconds | None = None
) -> str:
    """Return swimlanes as lines of text; a character shows the action that took most of its time, a blank none.

    Args:
        spans: of one run.
        width: characters of a lane, its label not counted.
        start_s: where to begin, in seconds since the first span; by default there.
        end_s: where to end; by default with the last span.

    Raises:
        InputError: a width below 10, or a stretch that shows nothing.

    >>> spans = [Span(0, 0, 0, "forward", 1, 0, 0, 4000, 0), Span(0, 0, 0, "wait", 1, 0, 6000, 10000, 0)]
    >>> print(swimlanes_text(spans, 10))
              0     10 µs
    replica 0 |FFFF  ....|
    one character = 1 µs   F forward   . wait
    """
    if width < _LEAST_WIDTH:
        raise InputError(f"width={width} leaves no room for a lane; write width={_LEAST_WIDTH} or more.")
    spans = list(spans)
    if not spans:
        return "no spans\n"
    shown, drawn, actions = window_lanes(spans, start_s, end_s)
    gutter = max(len(lane.label) for lane in drawn)
    rows = []
    for lane in drawn:
        row = "".join(LOOKS[span.action].letter if span else " " for span in cells(lane.spans, shown, width))
        rows.append(f"{lane.label:<{gutter}} |{row}|")
    return _page(rows, gutter, shown, width, actions)


def panels_text(panels: Sequence[Panel], width: int) -> str:
    """Return panels as lines of text.

    If there is room a box begins with the letter of its action and the number of its micro-batch.

    Args:
        panels: at least one.
        width: characters of the longest panel's lanes, their labels not counted.

    >>> spans = [Span(0, 0, 0, "forward", 1, 0, 0, 4000, 0), Span(0, 0, 0, "forward", 1, 1, 4000, 5000, 0)]
    >>> print(panels_text([Panel("measured: 10 µs", spans, 10000), Panel("ideal: 5 µs", spans, 5000)], 10))
            0     10 µs
    measured: 10 µs
    stage 0 |F0--F     |
    ideal: 5 µs
    stage 0 |F0--F|
    one character = 1 µs   F forward
    """
    shown, lanes, actions = panel_lanes(panels)
    gutter = max(len(lane.label) for own in lanes for lane in own)
    rows = []
    for panel, own in zip(panels, lanes, strict=True):
        rows.append(panel.title)
        # Rounded up: the last span is seen however short it is.
        end = -(-panel.length_ns * width // shown.length_ns)
        for lane in own:
            boxes = groupby(cells(lane.spans, shown, width)[:end])
            row = "".join(_box(span, len(list(run))) for span, run in boxes)
            rows.append(f"{lane.label:<{gutter}} |{row}|")
    return _page(rows, gutter, shown, width, actions)


def _page(rows: Sequence[str], gutter: int, shown: Stretch, width: int, actions: Iterable[Action]) -> str:
    """Return rows below a time axis and above a legend; ``gutter``: width of the labels."""
    first, last = duration(shown.start_ns) if shown.start_ns > 0 else "0", duration(shown.end_ns)
    axis = f"{' ' * (gutter + 1)}{first}{last:>{width + 2 - len(first)}}"
    legend = [f"{LOOKS[action].letter} {action}" for action in actions]
    footer = "   ".join([f"one character = {duration(shown.length_ns / width)}", *legend])
    return "\n".join([axis, *rows, footer]) + "\n"


def _box(span: Span | None, width: int) -> str:
    """Return the text of a box of so many characters.

    >>> [_box(Span(0, 0, 0, "forward", 1, 12, 0, 1, 0), width) for width in (1, 2, 3, 5)]
    ['F', 'F-', 'F12', 'F12--']
    """
    if span is None:
        return " " * width
    letter = LOOKS[span.action].letter
    if span.action not in PASSES:
        return letter * width
    named = f"{letter}{span.micro_batch}"
    return (named if len(named) <= width else letter).ljust(width, "-")


def cells(spans: Iterable[Span], shown: Stretch, width: int) -> list[Span | None]:
    """Return the span that each of ``width`` characters of a lane shows: of the action that took most of its time, the
    longest; None if the worker was idle."""
    # Times in units of 1/width nanoseconds: a cell is length / width long, so all of them are whole numbers.
    length, inside = shown.length_ns, list[dict[Span, Nanoseconds]]({} for _ in range(width))
    for span, part in innermost(spans):
        if (cut := shown.cut(part)) is not None:
            start, end = cut[0] * width, cut[1] * width
            for index in range(start // length, min(width, -(-end // length))):
                time = min(end, (index + 1) * length) - max(start, index * length)
                inside[index][span] = inside[index].get(span, 0) + time
    result: list[Span | None] = []
    for cell in inside:
        totals: dict[Action, Nanoseconds] = {}
        for span, time in cell.items():
            totals[span.action] = totals.get(span.action, 0) + time
        action = dominant(totals) if cell else None
        result.append(max((span for span in cell if span.action == action), key=cell.__getitem__, default=None))
    return result


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

"""Time cut into the characters of a line of text."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

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
    for span, part in innermost(spans):
        if (cut := shown.cut(part)) is not None:
            _fill(found, span, *cut, shown.length_ns)
    return [_shown(cell) for cell in found]


def innermost(spans: Iterable[Span]) -> Iterator[tuple[Span, Span]]:
    """Each span with the pieces of it in which no other one is under way that has begun later.

    ::

        forward      |---------------|          forward      |--|    |-------|
        all_reduce      |----|                  all_reduce      |----|
    """
    under_way: list[tuple[Span, Nanoseconds]] = []  # and from when on each has not been given yet
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
    """Take off those that have ended by then, the last one first, and give what is left of them."""
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

"""Steps of a pipeline one above the other, to one scale: what happened, and what might have.

::

    measured, step 7: 12 ms
    stage 0 |F0F1F2....B0--B1--B2--A|       F1--  forward of micro-batch 1, as long as that took
    stage 1 |..F0F1F2B0--B1--B2--..A|
    ideal: 10 ms
    stage 0 |F0F1F2..B0--B1--B2--|          ends here: what is missing up to the end above is lost
    stage 1 |..F0F1B0--F2B1--B2--|
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from paceline.core.types import Nanoseconds
from paceline.trace.cells import LETTERS, cells
from paceline.trace.lanes import Lane, Stretch, duration, lanes, present
from paceline.trace.spans import PASSES, Action, Span


@dataclass(frozen=True)
class Panel:
    """One step."""

    title: str
    spans: Sequence[Span]
    """Of one replica; its times begin with 0."""
    length_ns: Nanoseconds

    def lanes(self) -> list[Lane]:
        """One for each worker."""
        split = any(span.shard for span in self.spans)
        found = lanes(self.spans)
        names = ((lane.spans[0].stage, lane.spans[0].shard) for lane in found)
        labels = (f"stage {stage}.{shard}" if split else f"stage {stage}" for stage, shard in names)
        return [Lane(label, lane.server, lane.spans) for label, lane in zip(labels, found, strict=True)]


def common(panels: Iterable[Panel]) -> Stretch:
    """The stretch that holds all of them."""
    return Stretch(0, 0, max(1, *(panel.length_ns for panel in panels)))


def shown_actions(panels: Iterable[Panel], shown: Stretch) -> list[Action]:
    """Those of any panel, in the order of legends."""
    return present((lane for panel in panels for lane in panel.lanes()), shown)


def panels_text(panels: Sequence[Panel], width: int) -> str:
    """Panels as lines of text.

    Where there is room a box begins with the letter of its action and the number of its micro-batch.

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
    shown = common(panels)
    gutter = max(len(lane.label) for panel in panels for lane in panel.lanes())
    axis = " " * (gutter + 1) + "0" + duration(shown.length_ns).rjust(width + 1)
    rows = [line for panel in panels for line in _lines(panel, shown, width, gutter)]
    legend = [f"{LETTERS[action]} {action}" for action in shown_actions(panels, shown)]
    footer = "   ".join([f"one character = {duration(shown.length_ns / width)}", *legend])
    return "\n".join([axis, *rows, footer]) + "\n"


def _lines(panel: Panel, shown: Stretch, width: int, gutter: int) -> Iterator[str]:
    yield panel.title
    end = -(-panel.length_ns * width // shown.length_ns)
    for lane in panel.lanes():
        row = "".join(_boxes(cells(lane.spans, shown, width)[:end]))
        yield f"{lane.label:<{gutter}} |{row}|"


def _boxes(row: Iterable[Span | None]) -> Iterator[str]:
    for span, run in groupby(row):
        yield _box(span, len(list(run)))


def _box(span: Span | None, width: int) -> str:
    """What fills a box of so many characters.

    >>> [_box(Span(0, 0, 0, "forward", 1, 12, 0, 1, 0), width) for width in (1, 2, 3, 5)]
    ['F', 'F-', 'F12', 'F12--']
    """
    if span is None:
        return " " * width
    letter = LETTERS[span.action]
    if span.action not in PASSES:
        return letter * width
    named = f"{letter}{span.micro_batch}"
    return (named if len(named) <= width else letter).ljust(width, "-")

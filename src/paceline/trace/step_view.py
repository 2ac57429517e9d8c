"""Steps of a pipeline one above the other, to one scale: the measured one and ideal ones.

::

    measured, step 7: 12 ms
    stage 0 |F0F1F2....B0--B1--B2--A|       F1--  forward of micro-batch 1, as long as that took
    stage 1 |..F0F1F2B0--B1--B2--..A|
    ideal: 10 ms
    stage 0 |F0F1F2..B0--B1--B2--|          ends here: the rest, up to the end above, is lost
    stage 1 |..F0F1B0--F2B1--B2--|

Panels as one SVG, with the figures of each stage below them.

::

      [] forward  [] backward  [] wait                     legend
    measured, step 7: 12 ms
    stage 0  |[0][1][2]    [ 0  ][ 1  ][ 2  ][update]|     a panel; the line at its right is its end
    stage 1  |   [0][ 0  ][1][ 1  ][2][ 2  ] [update]|
    ideal: 10 ms
    ...                                       |            to the same scale
             0 ms                              10 ms       axis
    step time, ...                                         a sentence
    stage   utilisation   bubble                           figures
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby

from paceline.core.types import Nanoseconds
from paceline.trace.lanes import Lane, Stretch, duration, lanes, present
from paceline.trace.spans import PASSES, Action, Span
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
from paceline.trace.swimlane import LETTERS, cells


@dataclass(frozen=True)
class Panel:
    """One step."""

    title: str
    spans: Sequence[Span]
    """Spans of one replica, whose times begin with 0."""
    length_ns: Nanoseconds

    def lanes(self) -> list[Lane]:
        """Return one for each worker."""
        split = any(span.shard for span in self.spans)
        workers = lanes(self.spans)
        names = ((lane.spans[0].stage, lane.spans[0].shard) for lane in workers)
        labels = (f"stage {stage}.{shard}" if split else f"stage {stage}" for stage, shard in names)
        return [Lane(label, lane.server, lane.spans) for label, lane in zip(labels, workers, strict=True)]


def common(panels: Iterable[Panel]) -> Stretch:
    """Return the time window that holds all of them."""
    return Stretch(0, 0, max(1, *(panel.length_ns for panel in panels)))


def shown_actions(panels: Iterable[Panel], shown: Stretch) -> list[Action]:
    """Return the actions of all panels, in the order of legends."""
    return present((lane for panel in panels for lane in panel.lanes()), shown)


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
    shown = common(panels)
    gutter = max(len(lane.label) for panel in panels for lane in panel.lanes())
    axis = " " * (gutter + 1) + "0" + duration(shown.length_ns).rjust(width + 1)
    rows = []
    for panel in panels:
        rows.append(panel.title)
        end = -(-panel.length_ns * width // shown.length_ns)
        for lane in panel.lanes():
            boxes = groupby(cells(lane.spans, shown, width)[:end])
            row = "".join(_box(span, len(list(run))) for span, run in boxes)
            rows.append(f"{lane.label:<{gutter}} |{row}|")
    legend = [f"{LETTERS[action]} {action}" for action in shown_actions(panels, shown)]
    footer = "   ".join([f"one character = {duration(shown.length_ns / width)}", *legend])
    return "\n".join([axis, *rows, footer]) + "\n"


def _box(span: Span | None, width: int) -> str:
    """Return the text of a box of so many characters.

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


_PITCH, _TITLE, _BETWEEN, _ROW = 26.0, 22.0, 10.0, 19.0
_COLUMN_GAP = 28.0
_BOLD, _BOLDER = 'font-weight="600"', 1.1
"""Bold text, and its width relative to normal text."""


def panels_svg(panels: Sequence[Panel], sentence: str, table: Sequence[Sequence[str]]) -> str:
    """Return panels as a self-contained SVG; boxes show their micro-batch, and a title with all else.

    Args:
        panels: at least one.
        sentence: below them.
        table: lines of cells, the first with titles.
    """
    shown = common(panels)
    places = legend_places(shown_actions(panels, shown))
    rows = [tuple(panel.lanes()) for panel in panels]
    left = 2 * MARGIN + CHARACTER * max(len(lane.label) for row in rows for lane in row)
    layouts = [SvgLayout(left, legend_height(places) + _TITLE, _PITCH, shown, rows[0])]
    for row in rows[1:]:
        layouts.append(replace(layouts[0], top=layouts[-1].bottom + _BETWEEN + _TITLE, lanes=row))
    lowest = layouts[-1]
    parts = chain(
        legend(places),
        axis(lowest, layouts[0].top),
        *(_panel(panel, layout) for panel, layout in zip(panels, layouts, strict=True)),
        [words(MARGIN, lowest.bottom + AXIS + _ROW, sentence)],
        _table(table, lowest.bottom + AXIS + 2.5 * _ROW),
    )
    height = lowest.bottom + AXIS + _ROW * (len(table) + 1.5) + MARGIN
    return head(round(height), "; ".join(panel.title for panel in panels)) + "".join(parts) + "</svg>\n"


def _panel(panel: Panel, layout: SvgLayout) -> Iterator[str]:
    yield words(MARGIN, layout.top - 7, panel.title, _BOLD)
    yield from labels(layout)
    yield from all_lanes(layout, numbered=True)
    x = layout.x(panel.length_ns)
    yield f'<path d="M{x:.1f} {layout.top:.1f}V{layout.bottom:.1f}" stroke="#222" fill="none"/>\n'


def _table(table: Sequence[Sequence[str]], top: float) -> Iterator[str]:
    """Yield columns as wide as their longest cell."""
    x = MARGIN
    for column in zip(*table, strict=True):
        x += _BOLDER * CHARACTER * max(map(len, column))
        for row, cell in enumerate(column):
            yield words(x, top + row * _ROW, cell, f'text-anchor="end" {_BOLD if row == 0 else ""}'.rstrip())
        x += _COLUMN_GAP

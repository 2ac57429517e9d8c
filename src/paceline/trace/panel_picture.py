"""Panels as one SVG, with the figures of each stage below them.

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

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from paceline.trace.drawing import (
    AXIS,
    CHARACTER,
    MARGIN,
    Layout,
    all_lanes,
    axis,
    head,
    labels,
    legend,
    legend_height,
    legend_places,
    words,
)
from paceline.trace.panels import Panel, common, shown_actions

_PITCH, _TITLE, _BETWEEN, _ROW = 26.0, 22.0, 10.0, 19.0
_COLUMN_GAP = 28.0
_BOLD, _BOLDER = 'font-weight="600"', 1.1
"""And how much wider it is."""


def panels_svg(panels: Sequence[Panel], sentence: str, table: Sequence[Sequence[str]]) -> str:
    """Panels as a self-contained SVG; boxes show their micro-batch, and all else when they are pointed at.

    Args:
        panels: at least one.
        sentence: what is said below them.
        table: lines of cells, the first with titles.
    """
    shown = common(panels)
    places = legend_places(shown_actions(panels, shown))
    layouts = _layouts(panels, legend_height(places))
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


def _layouts(panels: Sequence[Panel], top: float) -> list[Layout]:
    shown = common(panels)
    rows = [tuple(panel.lanes()) for panel in panels]
    left = 2 * MARGIN + CHARACTER * max(len(lane.label) for lanes in rows for lane in lanes)
    first = Layout(left, top + _TITLE, _PITCH, shown, rows[0])
    layouts = [first]
    for lanes in rows[1:]:
        layouts.append(replace(first, top=layouts[-1].bottom + _BETWEEN + _TITLE, lanes=lanes))
    return layouts


def _panel(panel: Panel, layout: Layout) -> Iterator[str]:
    yield words(MARGIN, layout.top - 7, panel.title, _BOLD)
    yield from labels(layout)
    yield from all_lanes(layout, numbered=True)
    x = layout.x(panel.length_ns)
    yield f'<path d="M{x:.1f} {layout.top:.1f}V{layout.bottom:.1f}" stroke="#222" fill="none"/>\n'


def _table(table: Sequence[Sequence[str]], top: float) -> Iterator[str]:
    """Columns that end where their longest cell does."""
    x = MARGIN
    for column in zip(*table, strict=True):
        x += _BOLDER * CHARACTER * max(map(len, column))
        for row, cell in enumerate(column):
            yield words(x, top + row * _ROW, cell, f'text-anchor="end" {_BOLD if row == 0 else ""}'.rstrip())
        x += _COLUMN_GAP

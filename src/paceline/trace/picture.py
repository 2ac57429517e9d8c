"""Swimlanes as one SVG that needs nothing else: no style sheet, no script, no font.

::

      [] forward  [] backward  [] wait            legend
    replica 0  |####==..####==..|
    replica 1  |######==######==|                 lanes
    server     |     =   =   =  |
               0 ms            20 ms              axis
"""

from collections.abc import Iterable

from paceline.core.types import Seconds
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
from paceline.trace.lanes import lanes, present, stretch
from paceline.trace.spans import Span

_TALLEST, _PITCHES = 1200.0, (3.0, 24.0)
"""Height that many lanes share, and the least and largest distance from one lane to the next."""


def svg(spans: Iterable[Span], start_s: Seconds | None = None, end_s: Seconds | None = None) -> str:
    """Swimlanes as a self-contained SVG; pointing at a box shows its action, step and duration.

    Neighbours too narrow to be told apart are drawn as one box with the colour of what took most of its time, so the
    size follows the width of the picture, not the number of spans.

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
    layout = Layout(left, legend_height(places) + 6, pitch, shown, tuple(drawn))
    parts = (legend(places), axis(layout), labels(layout), all_lanes(layout))
    return head(round(layout.bottom + AXIS)) + "".join(piece for part in parts for piece in part) + "</svg>\n"

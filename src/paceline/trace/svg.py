"""Swimlanes and panels as SVG, which needs no style sheet, script or font.

::

      [] forward  [] backward  [] wait            legend
    replica 0  |####==..####==..|
    replica 1  |######==######==|                 lanes
    server     |     =   =   =  |
               0 ms            20 ms              axis

Panels are steps of a pipeline one above the other, with the figures of each stage below them::

      [] forward  [] backward  [] wait                     legend
    measured, step 7: 12 ms
    stage 0  |[0][1][2]    [ 0  ][ 1  ][ 2  ][update]|     a panel; the line at its right is its end
    stage 1  |   [0][ 0  ][1][ 1  ][2][ 2  ] [update]|
    ideal: 10 ms
    ...                                       |            to the same scale
             0 ms                              10 ms       axis
    step time, ...                                         a sentence
    stage   utilisation   bubble                           figures

With a box for each span the picture of a long run would be large and mostly invisible::

    spans   |#########|=|#|=|#|=|#|....|.|.|      narrow ones (= # .) meet in cells as wide as the least width,
    boxes   |#########|==========|.........|      then equal neighbours that touch become one
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from paceline.core.types import Nanoseconds, Seconds
from paceline.trace.lanes import LOOKS, Lane, Panel, Stretch, dominant, duration, panel_lanes, ticks, window_lanes
from paceline.trace.spans import PASSES, Action, Span

# Number of actions that the title of a merged box names.
_LISTED = 4


@dataclass(frozen=True, slots=True)
class Box:
    """One rectangle of a lane; times are nanoseconds since the start of the stretch."""

    start_ns: Nanoseconds
    end_ns: Nanoseconds
    totals: dict[Action, Nanoseconds]
    """Duration of each action."""
    first: Span
    spans: int
    narrow: bool
    """Made of spans that were too narrow to be seen."""

    @property
    def action(self) -> Action:
        """The action that took most of the time."""
        return dominant(self.totals)

    def title(self, *, numbered: bool = False) -> str:
        """Return the tooltip; ``numbered``: it names micro-batch 0, too."""
        if self.spans == 1:
            span = self.first
            words = [span.action, f"step {span.step}"]
            if span.micro_batch or (numbered and span.action in PASSES):
                words.append(f"micro-batch {span.micro_batch}")
            words += [f"{span.bytes:,} bytes"] if span.bytes else []
            return " · ".join([*words, duration(span.duration_ns)])
        length = max(1, self.end_ns - self.start_ns)
        largest = sorted(self.totals, key=lambda action: -self.totals[action])[:_LISTED]
        shares = ", ".join(f"{action} {self.totals[action] / length:.0%}" for action in largest)
        return f"{self.spans} spans in {duration(self.end_ns - self.start_ns)}: {shares}"


def boxes(spans: Iterable[Span], shown: Stretch, narrow_ns: float) -> list[Box]:
    """Return the boxes of one lane.

    Args:
        spans: of the lane, by their start.
        shown: spans outside it are left out.
        narrow_ns: spans shorter than this are merged.
    """
    cells: list[Box] = []
    for span in spans:
        if (cut := shown.cut(span)) is None:
            continue
        start, end = cut
        box = Box(start, end, {span.action: end - start}, span, 1, end - start < narrow_ns)
        last = cells[-1] if cells else None
        if last is not None and last.narrow and box.narrow and box.end_ns - last.start_ns <= narrow_ns:
            cells[-1] = _merged(last, box)
        else:
            cells.append(box)
    # Join neighbouring cells that touch and have the same longest action.
    joined: list[Box] = []
    for cell in cells:
        last = joined[-1] if joined and joined[-1].narrow and cell.narrow else None
        if last is not None and cell.start_ns - last.end_ns <= narrow_ns / 3 and last.action == cell.action:
            joined[-1] = _merged(last, cell)
        else:
            joined.append(cell)
    return joined


def _merged(first: Box, second: Box) -> Box:
    totals = dict(first.totals)
    for action, total in second.totals.items():
        totals[action] = totals.get(action, 0) + total
    end = max(first.end_ns, second.end_ns)
    return Box(first.start_ns, end, totals, first.first, first.spans + second.spans, narrow=True)


_WIDTH, _MARGIN, _FONT = 1200.0, 12.0, 12.0
# Width of a character at 12 px, generously: there is no font to measure.
_CHARACTER = 6.9
_LEGEND_ROW, _AXIS, _TICKS = 22.0, 30.0, 9
# Colour of text, and of numbers in boxes in which it would be illegible.
_INK, _INKS = "#222", {"forward": "#fff"}
_LABEL_PITCH = 13.0
# Pixels between neighbours that are wide enough, and the width below which spans are merged.
_GAP, _MERGED = 0.5, 0.75
# Width in pixels from which a box has a title.
_POINTABLE = 1.5
# Height in pixels from which a box has room for a number, and the space to its sides.
_NUMBER_FROM, _NUMBER_PADDING = 11.0, 3.0
# Height that many lanes share, and the least and largest distance from one lane to the next.
_TALLEST, _PITCHES = 1200.0, (3.0, 24.0)
# Of panels: distance of lanes, height of a title, space between two panels, line and column spacing of the table.
_PANEL_PITCH, _TITLE, _BETWEEN, _ROW, _COLUMN_GAP = 26.0, 22.0, 10.0, 19.0, 28.0
# Bold text, and its width relative to normal text.
_BOLD, _BOLDER = 'font-weight="600"', 1.1

_HEAD = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" '
    'style="max-width:100%;height:auto" role="img" aria-label="{says}" '
    'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="{font:g}" fill="#222">\n'
    '<defs><pattern id="paceline-delay" width="5" height="5" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="5" height="5" fill="#fbe3de"/>'
    '<rect width="1.2" height="5" fill="#e0907f"/></pattern></defs>\n'
    '<rect width="100%" height="100%" fill="#fff"/>\n'
)


@dataclass(frozen=True, slots=True)
class SvgLayout:
    """Positions of the lanes of one window, in pixels."""

    left: float
    top: float
    pitch: float
    shown: Stretch
    lanes: Sequence[Lane]

    @property
    def scale(self) -> float:
        """Pixels per nanosecond."""
        return (_WIDTH - _MARGIN - self.left) / self.shown.length_ns

    @property
    def bottom(self) -> float:
        return self.lane_top(len(self.lanes) - 1) + self.pitch

    def lane_top(self, index: int) -> float:
        """Return the upper edge of a lane; the server stands a little apart."""
        return self.top + index * self.pitch + (8.0 if self.lanes[index].server and index else 0.0)


def swimlanes_svg(spans: Iterable[Span], start_s: Seconds | None = None, end_s: Seconds | None = None) -> str:
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
        return _picture(40, [_words(_MARGIN, 24, "no spans")])
    shown, drawn, actions = window_lanes(spans, start_s, end_s)
    legend, below = _legend(actions)
    left = 2 * _MARGIN + _CHARACTER * max(len(lane.label) for lane in drawn)
    pitch = min(max(_TALLEST / len(drawn), _PITCHES[0]), _PITCHES[1])
    layout = SvgLayout(left, below + 6, pitch, shown, drawn)
    return _picture(round(layout.bottom + _AXIS), chain(legend, _axis(layout, layout.top), _lanes(layout)))


def panels_svg(panels: Sequence[Panel], sentence: str, table: Sequence[Sequence[str]]) -> str:
    """Return panels as a self-contained SVG; boxes show their micro-batch, and a title with all else.

    Args:
        panels: at least one.
        sentence: below them.
        table: lines of cells, the first with titles.
    """
    shown, rows, actions = panel_lanes(panels)
    legend, below = _legend(actions)
    left = 2 * _MARGIN + _CHARACTER * max(len(lane.label) for row in rows for lane in row)
    # All panels share left edge and scale, so that equal lengths are equal times.
    layout = SvgLayout(left, below + _TITLE, _PANEL_PITCH, shown, rows[0])
    top, drawn = layout.top, list[str]()
    for panel, row in zip(panels, rows, strict=True):
        if drawn:
            layout = replace(layout, top=layout.bottom + _BETWEEN + _TITLE, lanes=row)
        x = left + panel.length_ns * layout.scale
        drawn.append(_words(_MARGIN, layout.top - 7, panel.title, _BOLD))
        drawn += _lanes(layout, numbered=True)
        drawn.append(f'<path d="M{x:.1f} {layout.top:.1f}V{layout.bottom:.1f}" stroke="#222" fill="none"/>\n')
    # The axis and all that is below it belong to the last layout.
    below = layout.bottom + _AXIS
    drawn.append(_words(_MARGIN, below + _ROW, sentence))
    x = _MARGIN
    for column in zip(*table, strict=True):  # as wide as its longest cell
        x += _BOLDER * _CHARACTER * max(map(len, column))
        for number, cell in enumerate(column):
            style = f'text-anchor="end" {"" if number else _BOLD}'.rstrip()
            drawn.append(_words(x, below + (2.5 + number) * _ROW, cell, style))
        x += _COLUMN_GAP
    height = round(below + _ROW * (len(table) + 1.5) + _MARGIN)
    return _picture(height, chain(legend, _axis(layout, top), drawn), "; ".join(panel.title for panel in panels))


def _picture(height: float, parts: Iterable[str], says: str = "Swimlanes: what each worker did, over time") -> str:
    """Return an SVG element of a height in pixels; ``says``: description for screen readers."""
    return _HEAD.format(width=_WIDTH, height=height, font=_FONT, says=says) + "".join(parts) + "</svg>\n"


def _legend(actions: Iterable[Action]) -> tuple[list[str], float]:
    """Return a square in its colour and a name for each action, and the y of the lower edge of the legend."""
    drawn, x, y = list[str](), _MARGIN, _MARGIN
    for action in actions:
        needed = 34 + _CHARACTER * len(action)
        if x + needed > _WIDTH:
            x, y = _MARGIN, y + _LEGEND_ROW
        drawn.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="12" height="12" rx="2" fill="{LOOKS[action].colour}"/>')
        drawn.append(_words(x + 17, y + 10, action.replace("_", " ")))
        x += needed
    return drawn, y + _LEGEND_ROW


def _axis(layout: SvgLayout, top: float) -> Iterator[str]:
    """Yield round times below a layout, with a line for each from ``top`` down."""
    times = [(layout.left + since * layout.scale, label) for since, label in ticks(layout.shown, _TICKS)]
    lines = "".join(f"M{x:.1f} {top - 4:.1f}V{layout.bottom + 4:.1f}" for x, _ in times)
    yield f'<path d="{lines}" stroke="#e4e4e4" fill="none"/>\n'
    for x, label in times:
        half = _CHARACTER * len(label) / 2
        x = min(max(x, half), _WIDTH - half - 2)
        yield _words(x, layout.bottom + 20, label, 'text-anchor="middle" fill="#555"')


def _lanes(layout: SvgLayout, *, numbered: bool = False) -> Iterator[str]:
    """Yield names and boxes of the lanes; ``numbered`` boxes show their micro-batch if there is room."""
    # Every lane has its name if there is room for it, otherwise every second, fifth, ... and always the server.
    every = next(each for each in (1, 2, 5) if each * layout.pitch >= _LABEL_PITCH)
    for index, lane in enumerate(layout.lanes):
        if index % every == 0 or lane.server:
            y = layout.lane_top(index) + layout.pitch / 2 + _FONT * 0.35
            yield _words(layout.left - _MARGIN, y, lane.label, 'text-anchor="end"')
    height = layout.pitch * 0.8
    for index, lane in enumerate(layout.lanes):
        merged = boxes(lane.spans, layout.shown, _MERGED / layout.scale)
        yield f'<g transform="translate({layout.left:.1f} {layout.lane_top(index) + layout.pitch * 0.1:.1f})">\n'
        yield from _colours(merged, layout.scale, height, numbered=numbered)
        yield from _numbers(merged, layout.scale, height) if numbered and height >= _NUMBER_FROM else ()
        yield "</g>\n"


def _colours(lane: list[Box], scale: float, height: float, *, numbered: bool) -> Iterator[str]:
    """Yield the boxes of a lane, colour by colour; those too thin for a title are one path, a tenth of the size."""
    for action, look in LOOKS.items():
        thin, wide = list[str](), list[str]()
        for box in lane:
            if box.action != action:
                continue
            # A little narrower than its time if possible, so that neighbours stay apart.
            x, width = box.start_ns * scale, (box.end_ns - box.start_ns) * scale
            width = width - _GAP if width > 4 * _GAP else max(width, _GAP)
            if width < _POINTABLE:
                thin.append(f"M{x:.1f} 0h{width:.1f}v{height:.1f}h-{width:.1f}z")
            else:
                title = f"<title>{box.title(numbered=numbered)}</title>"
                wide.append(f'<rect x="{x:.1f}" width="{width:.1f}" height="{height:.1f}">{title}</rect>\n')
        if thin or wide:
            path = f'<path d="{"".join(thin)}"/>' if thin else ""
            yield f'<g fill="{look.colour}">{path}{"".join(wide)}</g>\n'


def _numbers(lane: Iterable[Box], scale: float, height: float) -> Iterator[str]:
    """Yield the micro-batches of a lane's boxes, in those that have room."""
    for box in lane:
        number, width = str(box.first.micro_batch), (box.end_ns - box.start_ns) * scale
        if box.spans == 1 and box.action in PASSES and width >= _CHARACTER * len(number) + _NUMBER_PADDING:
            ink = f'text-anchor="middle" pointer-events="none" fill="{_INKS.get(box.action, _INK)}"'
            yield _words(box.start_ns * scale + width / 2, height / 2 + _FONT * 0.35, number, ink)


def _words(x: float, y: float, text: str, attributes: str = "") -> str:
    """Return a line of text, from ``x`` on, on the base line ``y``."""
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{text}</text>\n'.replace(" >", ">")

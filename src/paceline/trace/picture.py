"""Swimlanes as one SVG that needs nothing else: no style sheet, no script, no font.

::

      [] forward  [] backward  [] wait            legend
    replica 0  |####==..####==..|
    replica 1  |######==######==|                 lanes
    server     |     =   =   =  |
               0 ms            20 ms              axis
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from paceline.core.types import Nanoseconds, Seconds
from paceline.trace.boxes import Box, boxes
from paceline.trace.lanes import Lane, Stretch, lanes, present, stretch, ticks
from paceline.trace.spans import Action, Span

_HATCH = "url(#paceline-delay)"

# Blue and orange, as far apart as colours get for those who see few of them (after Okabe and Ito, 2008): shades of one
# hue belong together, what is no work is pale.
COLOURS: dict[Action, str] = {
    "compute": "#4464ad",
    "forward": "#2f7fc1",
    "backward": "#e58a1f",
    "backward_input": "#c8651b",
    "backward_weight": "#f3b765",
    "recompute": "#8fc3e8",
    "send": "#b183b8",
    "receive": "#d3b3d8",
    "all_reduce": "#7b4f8c",
    "pull": "#7cc5ad",
    "push": "#27937a",
    "apply": "#33415c",
    "wait": "#e2e2e2",
    "delay": _HATCH,
    "evaluate": "#e3cf3a",
}

_WIDTH, _MARGIN, _FONT = 1200.0, 12.0, 12.0
_CHARACTER = 6.9
"""Width of a character at 12 px, generously: there is no font to measure."""
_LEGEND_ROW, _AXIS, _TICKS = 22.0, 30.0, 9
_TALLEST, _PITCHES = 1200.0, (3.0, 24.0)
"""Height that many lanes share, and the least and largest distance from one lane to the next."""
_LABEL_PITCH = 13.0
_GAP, _MERGED = 0.5, 0.75
"""Pixels between neighbours wide enough to bear it, and the width below which spans are merged."""
_POINTABLE = 1.5
"""Pixels from which a box has a title."""

_HEAD = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" '
    'style="max-width:100%;height:auto" role="img" aria-label="Swimlanes: what each worker did, over time" '
    'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="{font:g}" fill="#222">\n'
    '<defs><pattern id="paceline-delay" width="5" height="5" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="5" height="5" fill="#fbe3de"/>'
    '<rect width="1.2" height="5" fill="#e0907f"/></pattern></defs>\n'
    '<rect width="100%" height="100%" fill="#fff"/>\n'
)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where things are, in pixels."""

    left: float
    top: float
    pitch: float
    shown: Stretch
    lanes: tuple[Lane, ...]

    @property
    def scale(self) -> float:
        """Pixels per nanosecond."""
        return (_WIDTH - _MARGIN - self.left) / self.shown.length_ns

    @property
    def bottom(self) -> float:
        return self.lane_top(len(self.lanes) - 1) + self.pitch

    def x(self, since_start_ns: Nanoseconds) -> float:
        return self.left + since_start_ns * self.scale

    def lane_top(self, index: int) -> float:
        """The server stands a little apart."""
        return self.top + index * self.pitch + (8.0 if self.lanes[index].server and index else 0.0)


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
        return _HEAD.format(width=_WIDTH, height=40, font=_FONT) + _text(_MARGIN, 24, "no spans") + "</svg>\n"
    shown, drawn = stretch(spans, start_s, end_s), lanes(spans)
    places = list(_legend_places(present(drawn, shown)))
    legend_rows = 1 + max((row for _, _, row in places), default=0)
    left = 2 * _MARGIN + _CHARACTER * max(len(lane.label) for lane in drawn)
    pitch = min(max(_TALLEST / len(drawn), _PITCHES[0]), _PITCHES[1])
    layout = _Layout(left, _MARGIN + _LEGEND_ROW * legend_rows + 6, pitch, shown, tuple(drawn))
    head = _HEAD.format(width=_WIDTH, height=round(layout.bottom + _AXIS), font=_FONT)
    return "".join([head, *_legend(places), *_axis(layout), *_labels(layout), *_all_lanes(layout), "</svg>\n"])


def _legend_places(actions: Iterable[Action]) -> Iterator[tuple[Action, float, int]]:
    x, row = _MARGIN, 0
    for action in actions:
        needed = 34 + _CHARACTER * len(action)
        if x + needed > _WIDTH:
            x, row = _MARGIN, row + 1
        yield action, x, row
        x += needed


def _legend(places: Iterable[tuple[Action, float, int]]) -> Iterator[str]:
    for action, x, row in places:
        y = _MARGIN + row * _LEGEND_ROW
        yield f'<rect x="{x:.1f}" y="{y:.1f}" width="12" height="12" rx="2" fill="{COLOURS[action]}"/>'
        yield _text(x + 17, y + 10, action.replace("_", " "))


def _axis(layout: _Layout) -> Iterator[str]:
    at = [(layout.x(since), label) for since, label in ticks(layout.shown, _TICKS)]
    lines = "".join(f"M{x:.1f} {layout.top - 4:.1f}V{layout.bottom + 4:.1f}" for x, _ in at)
    yield f'<path d="{lines}" stroke="#e4e4e4" fill="none"/>\n'
    for x, label in at:
        half = _CHARACTER * len(label) / 2
        yield _text(min(max(x, half), _WIDTH - half - 2), layout.bottom + 20, label, 'text-anchor="middle" fill="#555"')


def _labels(layout: _Layout) -> Iterator[str]:
    """Every lane's name where there is room for it, otherwise every second, fifth, ... and always the server's."""
    every = next(each for each in (1, 2, 5) if each * layout.pitch >= _LABEL_PITCH)
    for index, lane in enumerate(layout.lanes):
        if index % every == 0 or lane.server:
            y = layout.lane_top(index) + layout.pitch / 2 + _FONT * 0.35
            yield _text(layout.left - _MARGIN, y, lane.label, 'text-anchor="end"')


def _all_lanes(layout: _Layout) -> Iterator[str]:
    for index, lane in enumerate(layout.lanes):
        found = boxes(lane.spans, layout.shown, _MERGED / layout.scale)
        yield f'<g transform="translate({layout.left:.1f} {layout.lane_top(index) + layout.pitch * 0.1:.1f})">\n'
        yield from _colours(found, layout.scale, layout.pitch * 0.8)
        yield "</g>\n"


def _colours(found: list[Box], scale: float, height: float) -> Iterator[str]:
    """The boxes of a lane, colour by colour; those too thin to be pointed at are one path, a tenth of the size."""
    for action in COLOURS:
        placed = [(box, box.start_ns * scale, _visible(box, scale)) for box in found if box.action == action]
        thin = "".join(f"M{x:.1f} 0h{w:.1f}v{height:.1f}h-{w:.1f}z" for _, x, w in placed if w < _POINTABLE)
        if placed:
            yield f'<g fill="{COLOURS[action]}">' + (f'<path d="{thin}"/>' if thin else "")
            yield from (_rect(box, x, w, height) for box, x, w in placed if w >= _POINTABLE)
            yield "</g>\n"


def _visible(box: Box, scale: float) -> float:
    """The width of a box in pixels: a little less than its time where it can be, so that neighbours stay apart."""
    width = (box.end_ns - box.start_ns) * scale
    return width - _GAP if width > 4 * _GAP else max(width, _GAP)


def _rect(box: Box, x: float, width: float, height: float) -> str:
    return f'<rect x="{x:.1f}" width="{width:.1f}" height="{height:.1f}"><title>{box.title}</title></rect>\n'


def _text(x: float, y: float, words: str, attributes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{words}</text>\n'.replace(" >", ">")

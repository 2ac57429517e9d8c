"""Spans made into boxes that can be seen: those too narrow are merged with their neighbours.

With a box for each span the picture of a long run would be large and mostly invisible::

    spans   |#########|=|#|=|#|=|#|....|.|.|      narrow ones (= # .) meet in cells as wide as the least width,
    boxes   |#########|==========|.........|      then equal neighbours that touch become one

The elements of pictures of swimlanes follow, in pixels: colours, legend, axis, labels, lanes.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from paceline.core.types import Nanoseconds
from paceline.trace.lanes import Lane, Stretch, dominant, duration, ticks
from paceline.trace.spans import PASSES, Action, Span

_LISTED = 4
"""Number of actions that the title of a merged box names."""


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
        if cells and _mergeable(cells[-1], box) and box.end_ns - cells[-1].start_ns <= narrow_ns:
            cells[-1] = _merged(cells[-1], box)
        else:
            cells.append(box)
    # Join neighbouring cells that touch and have the same longest action.
    joined: list[Box] = []
    for cell in cells:
        last = joined[-1] if joined else None
        touches = last is not None and _mergeable(last, cell) and cell.start_ns - last.end_ns <= narrow_ns / 3
        if last is not None and touches and last.action == cell.action:
            joined[-1] = _merged(last, cell)
        else:
            joined.append(cell)
    return joined


def _mergeable(first: Box, second: Box) -> bool:
    return first.narrow and second.narrow


def _merged(first: Box, second: Box) -> Box:
    totals = dict(first.totals)
    for action, total in second.totals.items():
        totals[action] = totals.get(action, 0) + total
    end = max(first.end_ns, second.end_ns)
    return Box(first.start_ns, end, totals, first.first, first.spans + second.spans, narrow=True)


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
    "delay": "url(#paceline-delay)",
    "evaluate": "#e3cf3a",
}

WIDTH, MARGIN, FONT = 1200.0, 12.0, 12.0
CHARACTER = 6.9
"""Width of a character at 12 px, generously: there is no font to measure."""
LEGEND_ROW, AXIS, _TICKS = 22.0, 30.0, 9
INK, _INKS = "#222", {"forward": "#fff"}
"""Colour of text, and of numbers in boxes in which it would be illegible."""
_LABEL_PITCH = 13.0
_GAP, _MERGED = 0.5, 0.75
"""Pixels between neighbours that are wide enough, and the width below which spans are merged."""
_POINTABLE = 1.5
"""Width in pixels from which a box has a title."""
_NUMBER_FROM, _NUMBER_PADDING = 11.0, 3.0
"""Height in pixels from which a box has room for a number, and the space to its sides."""

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
    lanes: tuple[Lane, ...]

    @property
    def scale(self) -> float:
        """Pixels per nanosecond."""
        return (WIDTH - MARGIN - self.left) / self.shown.length_ns

    @property
    def bottom(self) -> float:
        return self.lane_top(len(self.lanes) - 1) + self.pitch

    def x(self, since_start_ns: Nanoseconds) -> float:
        return self.left + since_start_ns * self.scale

    def lane_top(self, index: int) -> float:
        """Return the server stands a little apart."""
        return self.top + index * self.pitch + (8.0 if self.lanes[index].server and index else 0.0)


def head(height: float, says: str = "Swimlanes: what each worker did, over time") -> str:
    """Return the beginning of a picture, up to its background.

    Args:
        height: in pixels.
        says: description for screen readers.
    """
    return _HEAD.format(width=WIDTH, height=height, font=FONT, says=says)


def legend_places(actions: Iterable[Action]) -> list[tuple[Action, float, int]]:
    """Return the x and the row of each action of a legend."""
    places, x, row = list[tuple[Action, float, int]](), MARGIN, 0
    for action in actions:
        needed = 34 + CHARACTER * len(action)
        if x + needed > WIDTH:
            x, row = MARGIN, row + 1
        places.append((action, x, row))
        x += needed
    return places


def legend_height(places: Sequence[tuple[Action, float, int]]) -> float:
    """Return the height from the upper edge of the picture to the lower one of its legend."""
    return MARGIN + LEGEND_ROW * (1 + max((row for _, _, row in places), default=0))


def legend(places: Iterable[tuple[Action, float, int]]) -> Iterator[str]:
    """Yield a square in its colour and a name for each action."""
    for action, x, row in places:
        y = MARGIN + row * LEGEND_ROW
        yield f'<rect x="{x:.1f}" y="{y:.1f}" width="12" height="12" rx="2" fill="{COLOURS[action]}"/>'
        yield words(x + 17, y + 10, action.replace("_", " "))


def axis(layout: SvgLayout, top: float | None = None) -> Iterator[str]:
    """Yield round times below a layout, with a line for each from ``top`` down; by default from its own upper edge."""
    top = layout.top if top is None else top
    at = [(layout.x(since), label) for since, label in ticks(layout.shown, _TICKS)]
    lines = "".join(f"M{x:.1f} {top - 4:.1f}V{layout.bottom + 4:.1f}" for x, _ in at)
    yield f'<path d="{lines}" stroke="#e4e4e4" fill="none"/>\n'
    for x, label in at:
        half = CHARACTER * len(label) / 2
        yield words(min(max(x, half), WIDTH - half - 2), layout.bottom + 20, label, 'text-anchor="middle" fill="#555"')


def labels(layout: SvgLayout) -> Iterator[str]:
    """Yield every lane's name if there is room for it, otherwise every second, fifth, ... and always the server's."""
    every = next(each for each in (1, 2, 5) if each * layout.pitch >= _LABEL_PITCH)
    for index, lane in enumerate(layout.lanes):
        if index % every == 0 or lane.server:
            y = layout.lane_top(index) + layout.pitch / 2 + FONT * 0.35
            yield words(layout.left - MARGIN, y, lane.label, 'text-anchor="end"')


def all_lanes(layout: SvgLayout, *, numbered: bool = False) -> Iterator[str]:
    """Yield the boxes; ``numbered`` ones show their micro-batch if there is room."""
    for index, lane in enumerate(layout.lanes):
        merged = boxes(lane.spans, layout.shown, _MERGED / layout.scale)
        yield f'<g transform="translate({layout.left:.1f} {layout.lane_top(index) + layout.pitch * 0.1:.1f})">\n'
        yield from _colours(merged, layout.scale, layout.pitch * 0.8, numbered=numbered)
        yield from _numbers(merged, layout.scale, layout.pitch * 0.8) if numbered else ()
        yield "</g>\n"


def _colours(lane: list[Box], scale: float, height: float, *, numbered: bool) -> Iterator[str]:
    """Yield the boxes of a lane, colour by colour; those too thin for a title are one path, a tenth of the size."""
    for action in COLOURS:
        placed = [(box, box.start_ns * scale, _visible(box, scale)) for box in lane if box.action == action]
        thin = "".join(f"M{x:.1f} 0h{w:.1f}v{height:.1f}h-{w:.1f}z" for _, x, w in placed if w < _POINTABLE)
        if placed:
            yield f'<g fill="{COLOURS[action]}">' + (f'<path d="{thin}"/>' if thin else "")
            yield from (_rect(box.title(numbered=numbered), x, w, height) for box, x, w in placed if w >= _POINTABLE)
            yield "</g>\n"


def _visible(box: Box, scale: float) -> float:
    """Return the width of a box in pixels: a little less than its time if possible, so that neighbours stay apart."""
    width = (box.end_ns - box.start_ns) * scale
    return width - _GAP if width > 4 * _GAP else max(width, _GAP)


def _rect(title: str, x: float, width: float, height: float) -> str:
    return f'<rect x="{x:.1f}" width="{width:.1f}" height="{height:.1f}"><title>{title}</title></rect>\n'


def _numbers(lane: Iterable[Box], scale: float, height: float) -> Iterator[str]:
    """Yield the micro-batches of a lane's boxes, in those that have room."""
    if height < _NUMBER_FROM:
        return
    for box in lane:
        number, width = str(box.first.micro_batch), (box.end_ns - box.start_ns) * scale
        if box.spans == 1 and box.action in PASSES and width >= CHARACTER * len(number) + _NUMBER_PADDING:
            ink = f'text-anchor="middle" pointer-events="none" fill="{_INKS.get(box.action, INK)}"'
            yield words(box.start_ns * scale + width / 2, height / 2 + FONT * 0.35, number, ink)


def words(x: float, y: float, said: str, attributes: str = "") -> str:
    """Return a line of text, from ``x`` on, on the base line ``y``."""
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{said}</text>\n'.replace(" >", ">")

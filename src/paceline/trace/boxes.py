"""Spans made into boxes that can be seen: those too narrow are merged with their neighbours.

With a box for each span the picture of a long run would be large and mostly invisible::

    spans   |#########|=|#|=|#|=|#|....|.|.|      narrow ones (= # .) meet in cells as wide as the least width,
    boxes   |#########|==========|.........|      then equal neighbours that touch become one
"""

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.core.types import Nanoseconds
from paceline.trace.lanes import Stretch, dominant, duration
from paceline.trace.spans import PASSES, Action, Span

_LISTED = 4
"""How many actions the title of a merged box names."""


@dataclass(frozen=True, slots=True)
class Box:
    """One rectangle of a lane; times are nanoseconds since the start of the stretch."""

    start_ns: Nanoseconds
    end_ns: Nanoseconds
    totals: dict[Action, Nanoseconds]
    """How long each action was going on."""
    first: Span
    spans: int
    narrow: bool
    """Made of spans that were too narrow to be seen."""

    @property
    def action(self) -> Action:
        """What took most of the time."""
        return dominant(self.totals)

    def title(self, *, numbered: bool = False) -> str:
        """What to write where someone points at it; ``numbered``: a micro-batch is told where it is the first, too."""
        if self.spans == 1:
            return _title(self.first, numbered=numbered and self.first.action in PASSES)
        return f"{self.spans} spans in {duration(self.end_ns - self.start_ns)}: {self._shares()}"

    def _shares(self) -> str:
        length = max(1, self.end_ns - self.start_ns)
        largest = sorted(self.totals, key=lambda action: -self.totals[action])[:_LISTED]
        return ", ".join(f"{action} {self.totals[action] / length:.0%}" for action in largest)


def boxes(spans: Iterable[Span], shown: Stretch, narrow_ns: float) -> list[Box]:
    """The boxes of one lane.

    Args:
        spans: of the lane, by their start.
        shown: what lies outside it is left out.
        narrow_ns: spans shorter than this are merged.
    """
    cells: list[Box] = []
    for span in spans:
        box = _box(span, shown, narrow_ns)
        if box is None:
            continue
        if cells and _mergeable(cells[-1], box) and box.end_ns - cells[-1].start_ns <= narrow_ns:
            cells[-1] = _merged(cells[-1], box)
        else:
            cells.append(box)
    return _joined(cells, narrow_ns)


def _joined(cells: list[Box], narrow_ns: float) -> list[Box]:
    """Neighbouring cells as one box, where they touch and the same action leads in both."""
    joined: list[Box] = []
    for cell in cells:
        last = joined[-1] if joined else None
        touches = last is not None and _mergeable(last, cell) and cell.start_ns - last.end_ns <= narrow_ns / 3
        if last is not None and touches and last.action == cell.action:
            joined[-1] = _merged(last, cell)
        else:
            joined.append(cell)
    return joined


def _box(span: Span, shown: Stretch, narrow_ns: float) -> Box | None:
    cut = shown.cut(span)
    if cut is None:
        return None
    start, end = cut
    return Box(start, end, {span.action: end - start}, span, 1, end - start < narrow_ns)


def _mergeable(first: Box, second: Box) -> bool:
    return first.narrow and second.narrow


def _merged(first: Box, second: Box) -> Box:
    totals = dict(first.totals)
    for action, total in second.totals.items():
        totals[action] = totals.get(action, 0) + total
    end = max(first.end_ns, second.end_ns)
    return Box(first.start_ns, end, totals, first.first, first.spans + second.spans, narrow=True)


def _title(span: Span, *, numbered: bool) -> str:
    words = [span.action, f"step {span.step}"]
    words += [f"micro-batch {span.micro_batch}"] if span.micro_batch or numbered else []
    words += [f"{span.bytes:,} bytes"] if span.bytes else []
    return " · ".join([*words, duration(span.duration_ns)])

"""Which part of a run a swimlane shows: a whole run is far too long for a page."""

from collections.abc import Iterable, Sequence
from statistics import median

from paceline.core.types import ReplicaId, Seconds
from paceline.trace.spans import SERVER, Span
from paceline.trace.swimlane import svg

STEPS, REPLICAS = 12, 12


def swimlanes(recorded: Sequence[Sequence[Span]]) -> list[str]:
    """A stretch from the middle of each run, as SVG; all to one scale, so that paces can be compared by eye.

    A stretch is as long as a dozen steps of the median replica of the median run. The first dozen replicas are shown,
    and the server.

    Args:
        recorded: the spans of each run; none of them empty.
    """
    shown = [[span for span in spans if span.replica < REPLICAS] for spans in recorded]
    length_s = median(STEPS * step_s(spans) for spans in shown)
    return [svg(spans, *_middle(spans, length_s)) for spans in shown]


def step_s(spans: Iterable[Span]) -> Seconds:
    """How long one step takes the median replica, from its first span to its last."""
    lanes: dict[ReplicaId, list[Span]] = {}
    for span in spans:
        if span.replica != SERVER:
            lanes.setdefault(span.replica, []).append(span)
    return median(_pace(lane) for lane in lanes.values()) / 1e9 if lanes else 0.0


def _pace(lane: Sequence[Span]) -> float:
    length = max(span.end_ns for span in lane) - min(span.start_ns for span in lane)
    return length / len({span.step for span in lane})


def _middle(spans: Sequence[Span], length_s: Seconds) -> tuple[Seconds, Seconds]:
    """Where a stretch in the middle begins and ends, in seconds since the first span."""
    whole_s = (max(span.end_ns for span in spans) - min(span.start_ns for span in spans)) / 1e9
    start_s = max(0.0, (whole_s - length_s) / 2)
    return start_s, max(min(start_s + length_s, whole_s), start_s + 1e-9)

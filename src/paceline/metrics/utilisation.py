"""How much of their time workers are busy, from spans: coloured area / total area of the swimlane."""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from paceline.core.types import Nanoseconds
from paceline.trace.spans import SERVER, Span

Worker: TypeAlias = tuple[int, int, int]
"""(replica, stage, shard)"""
Interval: TypeAlias = tuple[Nanoseconds, Nanoseconds]


def worker_utilisation(spans: Sequence[Span], window: Interval | None = None) -> dict[Worker, float]:
    """Busy time / total time of each worker; all but ``wait`` is busy, a moment covered twice counts once.

    Owners and the coordinator are no workers.

    Args:
        spans: of one run, in any order.
        window: (start_ns, end_ns), the total; absent: from the first start to the last end of any span.
    """
    spans = [span for span in spans if span.replica != SERVER]
    if not spans:
        return {}
    start, end = window or (min(s.start_ns for s in spans), max(s.end_ns for s in spans))
    busy: dict[Worker, list[Interval]] = {w: [] for w in sorted({_worker(s) for s in spans})}
    for span in spans:
        if span.action != "wait":
            busy[_worker(span)].append((max(span.start_ns, start), min(span.end_ns, end)))
    return {w: covered_ns(intervals) / (end - start) if end > start else 0.0 for w, intervals in busy.items()}


def utilisation(spans: Sequence[Span], window: Interval | None = None) -> float | None:
    """Coloured area / total area over all workers, a pipeline's among them; None without spans."""
    per_worker = worker_utilisation(spans, window)
    return sum(per_worker.values()) / len(per_worker) if per_worker else None


def covered_ns(intervals: Iterable[Interval]) -> Nanoseconds:
    """Length of the union of intervals; empty and reversed ones count nothing.

    >>> covered_ns([(0, 10), (5, 12), (20, 21), (9, 3)])
    13
    """
    total, reached = 0, None
    for start, end in sorted(intervals):
        begin = start if reached is None else max(start, reached)
        if end > begin:
            total += end - begin
            reached = end
    return total


def _worker(span: Span) -> Worker:
    return (span.replica, span.stage, span.shard)

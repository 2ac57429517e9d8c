"""What a worker measures of itself, where that is kept, and what is told of it when the run has ended."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple, Protocol

from paceline.core.mesh import Coordinate
from paceline.core.records import WorkerFigures
from paceline.core.types import Nanoseconds, ReplicaId, Seconds
from paceline.trace.spans import Span

STEP_TIMES = 512
"""How many of a worker's latest step times are kept."""


class Figures(NamedTuple):
    """What a worker has measured of itself so far."""

    steps: int
    busy_ns: int
    payload_bytes: int
    peak_memory_bytes: int


class MetricsSink(Protocol):
    """Where workers' figures are kept."""

    def measure(self, replica: ReplicaId, figures: Figures, step_time_s: Seconds | None = None) -> None:
        """Note a worker's figures so far, and the time of one more step."""

    def figures(self, replica: ReplicaId) -> Figures:
        """A worker's figures so far."""


class InMemorySink:
    """A ledger of one worker, in its own memory."""

    def __init__(self) -> None:
        self.seen = Figures(0, 0, 0, 0)
        self.step_times: deque[Seconds] = deque(maxlen=STEP_TIMES)

    def measure(self, replica: ReplicaId, figures: Figures, step_time_s: Seconds | None = None) -> None:
        """Note the figures so far, and the time of one more step."""
        del replica
        self.seen = figures
        if step_time_s is not None:
            self.step_times.append(step_time_s)

    def figures(self, replica: ReplicaId) -> Figures:
        """The figures so far."""
        del replica
        return self.seen


def told(
    place: Coordinate, seen: Figures, step_times: Sequence[Seconds], parameter_bytes: int, seconds: Seconds
) -> WorkerFigures:
    """One worker's figures as a run tells them; a step that outlasted the training time counts up to its end."""
    return WorkerFigures(
        replica=place.replica,
        stage=place.stage,
        shard=place.shard,
        steps=seen.steps,
        busy_s=min(seen.busy_ns * 1e-9, seconds),
        step_time_s=median(step_times) if step_times else None,
        payload_bytes=seen.payload_bytes,
        peak_memory_bytes=seen.peak_memory_bytes or None,
        parameter_bytes=parameter_bytes,
    )


def timeline(spans: Iterable[Span], began: Nanoseconds) -> list[Span]:
    """The spans of the training time, in order, with their times since it began."""
    shifted = (replace(s, start_ns=s.start_ns - began, end_ns=s.end_ns - began) for s in spans)
    return sorted((s for s in shifted if s.end_ns > 0), key=lambda s: (s.start_ns, s.replica))

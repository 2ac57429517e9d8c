"""What is told of a run's workers when it has ended."""

from collections.abc import Iterable
from dataclasses import replace
from statistics import median

from paceline.core.records import WorkerFigures
from paceline.core.types import Nanoseconds, ReplicaId, Seconds
from paceline.engine.local.board import Board
from paceline.trace.spans import Span


def figures(board: Board, replica: ReplicaId, parameter_bytes: int, seconds: Seconds) -> WorkerFigures:
    """One worker's, as it left them on the board; a step that outlasted the training time counts up to its end."""
    seen, times = board.figures(replica), board.step_times(replica)
    return WorkerFigures(
        replica=replica,
        stage=0,
        shard=0,
        steps=seen.steps,
        busy_s=min(seen.busy_ns * 1e-9, seconds),
        step_time_s=median(times) if times else None,
        payload_bytes=seen.payload_bytes,
        peak_memory_bytes=seen.peak_memory_bytes or None,
        parameter_bytes=parameter_bytes,
    )


def timeline(spans: Iterable[Span], began: Nanoseconds) -> list[Span]:
    """The spans of the training time, in order, with their times since it began."""
    shifted = (replace(s, start_ns=s.start_ns - began, end_ns=s.end_ns - began) for s in spans)
    return sorted((s for s in shifted if s.end_ns > 0), key=lambda s: (s.start_ns, s.replica))

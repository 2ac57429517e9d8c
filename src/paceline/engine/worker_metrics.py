"""What main knows of the workers of a run: their figures and spans, and ``workers.json``, the list of its processes."""

import contextlib
import json
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Protocol, TypeAlias

from paceline.comm.linux import memfd_create
from paceline.core.errors import InputError
from paceline.core.mesh import Coordinate
from paceline.core.records import WorkerFigures
from paceline.core.types import Clock, Nanoseconds, ReplicaId, Seconds
from paceline.trace.recorder import AnyRecorder, NullRecorder, Recorder, read_packed
from paceline.trace.spans import Span

# Number of a worker's newest step times that are kept.
STEP_TIMES = 512

# Micro-steps after which a worker has allocated all it will: gradients, an optimizer's state, Δs on their way.
_SETTLED = 4


class Figures(NamedTuple):
    """Measurements of a worker since it began."""

    steps: int
    busy_ns: int
    payload_bytes: int
    peak_memory_bytes: int


class MetricsSink(Protocol):
    """Store of workers' figures."""

    def measure(self, replica: ReplicaId, figures: Figures, step_time_s: Seconds | None = None) -> None:
        """Store a worker's figures so far, and the time of one more step."""

    def figures(self, replica: ReplicaId) -> Figures:
        """Return a worker's figures so far."""


class WorkerMetrics:
    """Measurements of one worker, kept in a sink that outlives it.

    Args:
        sink: keeps them.
        replica: of the worker.
        recorder: of its spans, and of the waits within its replica.
        step_bytes: bytes that one Δ moves, both ways.
        per_step: micro-steps of one step.
    """

    def __init__(
        self, sink: MetricsSink, replica: ReplicaId, recorder: AnyRecorder, step_bytes: int, per_step: int
    ) -> None:
        self._sink, self._replica, self._recorder = sink, replica, recorder
        self._step_bytes, self._per_step = step_bytes, per_step
        self._micro_steps = self._payload = self._peak = 0
        self._next_peak_check = 1
        self._before = sink.figures(replica)
        """Of processes that did this worker's work before it, and have died."""
        self._traced = not isinstance(recorder, NullRecorder)
        self._began = self._last = time.monotonic_ns()
        self._waited_before = recorder.waited_ns

    def start(self) -> None:
        """Start the clock: the first grant has come."""
        self._began = self._last = time.monotonic_ns()
        self._waited_before = self._recorder.waited_ns

    def waited(self, since_ns: int, step: Clock, until_ns: int | None = None) -> None:
        """Count time from ``since_ns`` to ``until_ns`` (None: now) as waiting."""
        self._recorder.wait(step, since_ns, time.monotonic_ns() if until_ns is None else until_ns)

    def spent(self, action: str, since_ns: int, step: Clock, moved: int = 0) -> None:
        """Record what the worker did from ``since_ns`` until now."""
        if self._traced:
            self._recorder.record(action, step, since_ns, time.monotonic_ns(), bytes=moved)  # type: ignore[arg-type]

    def stepped(self, *, pushed: bool, skipped: int = 0) -> None:
        """Count one more micro-step, and ``skipped`` others that were left out."""
        now = time.monotonic_ns()
        self._micro_steps += 1 + skipped
        self._payload += self._step_bytes if pushed else 0
        busy = now - self._began - (self._recorder.waited_ns - self._waited_before)
        if self._micro_steps >= self._next_peak_check:  # reading it takes milliseconds, so ever more rarely
            self._peak, self._next_peak_check = max(self._peak, peak_bytes()), 2 * self._micro_steps
        steps, rest = divmod(self._micro_steps, self._per_step)
        before = self._before
        peak = max(before.peak_memory_bytes, self._peak)
        figures = Figures(before.steps + steps, before.busy_ns + busy, before.payload_bytes + self._payload, peak)
        self._sink.measure(self._replica, figures, None if rest else (now - self._last) * 1e-9)
        self._last = self._last if rest else now

    def close(self) -> None:
        """Store the peak memory and the spans at the end of the worker."""
        # Later on, pages shared with others would count as this worker's own once those have ended.
        if self._micro_steps < _SETTLED:
            self._peak = max(self._peak, peak_bytes())
        figures = self._sink.figures(self._replica)
        peak = max(self._before.peak_memory_bytes, self._peak)
        self._sink.measure(self._replica, figures._replace(peak_memory_bytes=peak))
        self._recorder.close()


@dataclass
class InMemorySink:
    """Metrics sink of one worker, in its own memory."""

    newest: Figures = field(default=Figures(0, 0, 0, 0))
    step_times: deque[Seconds] = field(default_factory=lambda: deque(maxlen=STEP_TIMES))

    def measure(self, replica: ReplicaId, figures: Figures, step_time_s: Seconds | None = None) -> None:
        """Store the figures so far, and the time of one more step."""
        del replica
        self.newest = figures
        if step_time_s is not None:
            self.step_times.append(step_time_s)

    def figures(self, replica: ReplicaId) -> Figures:
        """Return the figures so far."""
        del replica
        return self.newest


def worker_figures(
    place: Coordinate, figures: Figures, step_times: Sequence[Seconds], parameter_bytes: int, seconds: Seconds
) -> WorkerFigures:
    """Return one worker's figures as a run reports them; a step that outlasted training counts up to its end.

    Args:
        place: of the worker.
        figures: that it measured.
        step_times: of its newest steps.
        parameter_bytes: size of its part of A.
        seconds: training time since the run began or went on.
    """
    return WorkerFigures(
        *place,
        steps=figures.steps,
        busy_s=min(figures.busy_ns * 1e-9, seconds),
        step_time_s=median(step_times) if step_times else None,
        payload_bytes=figures.payload_bytes,
        peak_memory_bytes=figures.peak_memory_bytes or None,
        parameter_bytes=parameter_bytes,
    )


class SpanLog:
    """A process's recorder of spans and the memory file behind it; nothing is recorded unless the job is traced.

    Args:
        trace: whether spans are recorded.
        replica: of the worker, or ``SERVER``.
        stage: of the worker.
        shard: of the worker.
    """

    def __init__(self, trace: bool, replica: int, stage: int = 0, shard: int = 0) -> None:
        self._fd = memfd_create("paceline:spans") if trace else -1
        self.recorder: AnyRecorder = Recorder(replica, stage, shard, self._fd) if trace else NullRecorder()

    def read(self) -> list[Span]:
        """Return what was recorded; read it when no more follows."""
        if self._fd < 0:
            return []
        self.recorder.close()
        return read_packed(self._fd)

    def close(self) -> None:
        """Release the memory."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def training_spans(spans: Iterable[Span], began: Nanoseconds) -> list[Span]:
    """Return the spans of the training time, in order, with their times since it began."""
    shifted = (replace(s, start_ns=s.start_ns - began, end_ns=s.end_ns - began) for s in spans)
    return sorted((s for s in shifted if s.end_ns > 0), key=lambda s: (s.start_ns, s.replica))


# Name of workers.json until it is complete.
PARTIAL_NAME = ".workers.json.partial"

# Lines about a run while it lasts, which main writes beside workers.json.
PROGRESS_NAME = "progress.jsonl"
# Name of the file with address and token of a server that processes join.
SERVER_NAME = "server.json"

# pid of a process, and its node where there are several.
ProcessInfo: TypeAlias = Mapping[str, int | str]


@contextlib.contextmanager
def workers_file(
    folder: Path | None, others: Mapping[str, ProcessInfo], workers: Mapping[Coordinate, ProcessInfo]
) -> Iterator[Sequence[Path]]:
    """Context manager: keep ``workers.json`` in the run's folder, there while the run lasts.

    At the end the folder is removed as well if nothing else is in it: it is written anew as a whole.

    Args:
        folder: of the run; None: nothing is written.
        others: the processes that are no replica's, by their role.
        workers: the replicas' processes.

    Yields:
        The files that a killed process would leave.
    """
    if folder is None:
        yield ()
        return
    rows: list[dict[str, Any]] = [{"role": role, **info} for role, info in others.items()]
    rows += [{"role": "replica", **place._asdict(), **info} for place, info in workers.items()]
    partial, whole = folder / PARTIAL_NAME, folder / "workers.json"
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
            partial.replace(whole)  # a reader finds all of it, or nothing
        except OSError as error:
            raise InputError(
                f"{folder} can't be written: {error}; write out= a folder where there is room for it"
            ) from error
        yield partial, whole, folder / PROGRESS_NAME
    finally:
        remove_workers_file(folder)


def update_workers_file(folder: Path | None, place: Coordinate | str, info: ProcessInfo | None) -> None:
    """Write down which process is a replica's worker, or has a role, now, or that none is.

    A full disk leaves the file as it was.
    """
    if folder is None:
        return
    partial, whole = folder / PARTIAL_NAME, folder / "workers.json"
    with contextlib.suppress(OSError, ValueError):
        rows = json.loads(whole.read_text(encoding="utf-8"))
        own: dict[str, Any] = {"role": place} if isinstance(place, str) else {"role": "replica", **place._asdict()}
        others = [row for row in rows if not own.items() <= row.items()]
        before = [row for row in rows if own.items() <= row.items()] or [own]
        rows = others if info is None else [*others, before[0] | dict(info)]
        partial.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
        partial.replace(whole)


def remove_workers_file(folder: Path) -> None:
    """Remove what is there while a run lasts, and a folder with nothing else in it; do nothing if they are gone."""
    for name in (PARTIAL_NAME, "workers.json", PROGRESS_NAME):
        with contextlib.suppress(OSError):
            (folder / name).unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()


def peak_bytes() -> int:
    """Return the most memory that this process has used, as :func:`proportional_bytes` counts it.

    That is its memory now, plus what it has released since its peak; 0 where the kernel does not report it.
    """
    now, peak = (_kernel_bytes("/proc/self/status", name) for name in ("VmRSS", "VmHWM"))
    return proportional_bytes() + max(0, peak - now)


def proportional_bytes() -> int:
    """Return this process's memory now, shared pages divided by the number of their users (Pss); 0 if unknown."""
    return _kernel_bytes("/proc/self/smaps_rollup", "Pss")


def _kernel_bytes(path: str, name: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path(path).read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0

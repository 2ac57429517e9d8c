"""How much of their time workers are busy, from spans: coloured area / total area of the swimlane.

A pipeline's figures, from what its workers recorded: how busy they were, and how far from what the schedule allows.

::

    a step    |<------------------------ total ------------------------>|
    worker 0  | forward | send |  wait  | backward |        | apply |     utilisation = (forward + backward) / total
                        |<-- exposed -->|                                 bubble      = all but forward, backward, apply
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeAlias

from paceline.core.errors import InputError
from paceline.core.mesh import StageReplicas
from paceline.core.types import Nanoseconds, Seconds
from paceline.schedule import Dependencies, Schedule, StageTimes, simulate
from paceline.trace.spans import PASSES, SERVER, Action, Span

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


COMPUTE: frozenset[Action] = PASSES
"""What a pipeline is there for."""

COMMUNICATION: frozenset[Action] = frozenset({"send", "receive", "wait"})
"""Bytes between workers, and waiting for them."""

UPDATE: frozenset[Action] = frozenset({"all_reduce", "apply"})
"""What ends a step."""

_LASTS: frozenset[Action] = COMPUTE | UPDATE | {"send", "receive"}

Place: TypeAlias = tuple[int, int]
"""(stage, shard) of a worker in its replica."""

_Piece: TypeAlias = tuple[str, int, int, int, int]

# An activation that is computed again is part of what its backward takes.
_HALVES: Mapping[Action, str] = {
    "forward": "forward",
    "backward": "backward_input",
    "backward_input": "backward_input",
    "recompute": "backward_input",
    "backward_weight": "backward_weight",
}


@dataclass(frozen=True, slots=True)
class PipelineWorkerFigures:
    """One worker's, over all steps."""

    utilisation: float
    """Compute / time of the steps."""
    bubble: float
    """The part of the steps in which it neither computes nor updates."""
    exposed_communication_s: Seconds
    """A step's time in sends, receives and waits that no compute covers."""


IDLE = PipelineWorkerFigures(0.0, 1.0, 0.0)
"""A worker that had nothing to do: there were fewer micro-batches than take turns at its stage."""


@dataclass(frozen=True, slots=True)
class Pace:
    """A pipeline's step, and what its schedule allows with the same compute and free communication."""

    step_s: Seconds
    ideal_s: Seconds

    @property
    def ratio(self) -> float:
        """Measured / ideal: 1 is as quick as can be."""
        return self.step_s / self.ideal_s


def worker_figures(spans: Iterable[Span], replica: int = 0) -> dict[Place, PipelineWorkerFigures]:
    """How each worker of a replica spent its steps.

    Steps are :func:`windows`; where they overlap, as they do when a pipeline never runs empty, a moment counts once.

    Args:
        spans: of one run, in any order; only compute, communication and updates count.
        replica: whose.

    >>> spans = [Span(0, 0, 0, "forward", 1, 0, 0, 10, 0), Span(0, 0, 0, "wait", 1, 0, 5, 30, 0),
    ...          Span(0, 0, 0, "backward", 1, 0, 30, 50, 0), Span(0, 0, 0, "apply", 1, 0, 90, 100, 0)]
    >>> worker_figures(spans)
    {(0, 0): WorkerFigures(utilisation=0.3, bubble=0.6, exposed_communication_s=2e-08)}
    """
    spans = _pipelines(spans, replica)
    found = _windows(spans)
    total = covered_ns(found.values())
    places = sorted({(span.stage, span.shard) for span in spans})
    own = {place: [span for span in spans if (span.stage, span.shard) == place] for place in places}
    return {place: _figures(own[place], found, total) for place in places if total}


def windows(spans: Iterable[Span], replica: int = 0) -> dict[int, Interval]:
    """When each step was under way: from its first compute to the end of its last compute, transfer or update.

    Where Δ is accumulated over several mini-batches, each is a step, and those that end with an update last longer.

    Args:
        spans: of one run, in any order.
        replica: whose.

    >>> windows([Span(0, 0, 0, "forward", 4, 0, 10, 20, 0), Span(0, 0, 0, "apply", 1, 0, 30, 35, 0)])
    {4: (10, 35)}
    """
    return _windows(_pipelines(spans, replica))


def stage_times(spans: Iterable[Span], schedule: Schedule, workers: int, replica: int = 0) -> StageTimes:
    """The median time of a micro-batch in each part, as it was measured.

    A backward that was not split counts as ``backward_input`` alone; a recomputation counts with its backward.

    Args:
        spans: of one run, in any order.
        schedule: that it followed.
        workers: p.
        replica: whose.

    Raises:
        InputError: no forward or no backward of some part.

    >>> from paceline.schedule import parse
    >>> spans = [Span(0, 0, 0, "forward", 1, i, 100 * i, 100 * i + 10 + i, 0) for i in range(3)]
    >>> spans += [Span(0, 0, 0, "backward", 1, i, 100 * i + 50, 100 * i + 70, 0) for i in range(3)]
    >>> stage_times(spans, parse("1f1b"), workers=1)
    StageTimes(forward=(1.1e-08,), backward_input=(2e-08,), backward_weight=(0.0,), transfer=0.0)
    """
    lengths: defaultdict[tuple[str, int], list[Nanoseconds]] = defaultdict(list)
    for (half, part, *_), intervals in _pieces(_pipelines(spans, replica), schedule, workers).items():
        lengths[half, part].append(covered_ns(intervals))
    needed = ["forward", "backward_input", *(["backward_weight"] if schedule.splits_backward else [])]
    parts = range(schedule.parts(workers))
    for half, part in ((half, part) for half in needed for part in parts if (half, part) not in lengths):
        raise InputError(
            f"no {half} of part {part} is among the spans of replica {replica}, but each of {len(parts)} parts needs "
            "one; record a whole step with trace=True."
        )
    forward, inputs, weights = (
        tuple(median(lengths.get((half, part), [0])) / 1e9 for part in parts)
        for half in dict.fromkeys(_HALVES.values())
    )
    return StageTimes(forward, inputs, weights)


def ideal(
    spans: Sequence[Span],
    schedule: Schedule,
    workers: int,
    micro_batches: int,
    replica: int = 0,
    columns: StageReplicas | None = None,
    dependencies: Dependencies | None = None,
) -> list[Span]:
    """What the schedule would make of the measured compute if nothing else took time.

    Args:
        spans: of one run, in any order.
        schedule: that it followed.
        workers: p.
        micro_batches: m.
        replica: whose.
        columns: that take turns at the stages; None: one at each.
        dependencies: of the model's parts; None: each needs the one before it.

    Returns:
        The spans of one step; where weights don't wait for its end, of as many as were measured.
    """
    steps = 1 if schedule.flushes else len(windows(spans, replica))
    times = stage_times(spans, schedule, workers, replica)
    return simulate(schedule.resolved(micro_batches), times, workers, micro_batches * steps, columns, dependencies)


def pace(spans: Sequence[Span], best: Sequence[Span], *, flushes: bool = True, replica: int = 0) -> Pace:
    """The time of a step, measured and :func:`ideal`.

    Measured is the median step; where steps overlap, the whole time over their number.

    Args:
        spans: of one run, in any order.
        best: its ideal.
        flushes: whether the schedule lets weights wait for the end of a step, and ``best`` is of one.
        replica: whose.

    >>> from paceline.schedule import parse
    >>> spans = [Span(0, 0, 0, "forward", 1, 0, 0, 10, 0), Span(0, 0, 0, "backward", 1, 0, 15, 35, 0)]
    >>> pace(spans, ideal(spans, parse("gpipe"), workers=1, micro_batches=1))
    Pace(step_s=3.5e-08, ideal_s=3e-08)
    """
    lengths = windows(spans, replica).values()
    lasted = max(span.end_ns for span in best)
    if flushes:
        return Pace(median(end - start for start, end in lengths) / 1e9, lasted / 1e9)
    return Pace(covered_ns(lengths) / len(lengths) / 1e9, lasted / len(lengths) / 1e9)


def _pipelines(spans: Iterable[Span], replica: int) -> list[Span]:
    """The spans that count, by their start; updates, which are numbered apart, with the number of the step they end."""
    counted = (span for span in spans if span.replica == replica and span.action in COMPUTE | COMMUNICATION | UPDATE)
    under_way: dict[Place, int] = {}
    found: list[Span] = []
    for span in sorted(counted, key=lambda span: span.start_ns):
        place = (span.stage, span.shard)
        if span.action in COMPUTE:
            under_way[place] = span.step
        if span.action not in UPDATE:
            found.append(span)
        elif place in under_way:
            found.append(replace(span, step=under_way[place]))
    return found


def _windows(spans: Iterable[Span]) -> dict[int, Interval]:
    found: dict[int, Interval] = {}
    for span in spans:
        start, end = found.get(span.step, (span.start_ns, span.end_ns))
        if span.action in COMPUTE:
            found[span.step] = min(start, span.start_ns), max(end, span.end_ns)
        elif span.action in _LASTS and span.step in found:
            found[span.step] = start, max(end, span.end_ns)
    return found


def _figures(spans: Sequence[Span], steps: Mapping[int, Interval], total: Nanoseconds) -> PipelineWorkerFigures:
    inside = [
        replace(span, start_ns=max(span.start_ns, steps[span.step][0]), end_ns=min(span.end_ns, steps[span.step][1]))
        for span in spans
        if span.step in steps
    ]
    compute, work = _covered(inside, COMPUTE), _covered(inside, COMPUTE | UPDATE)
    exposed = _covered(inside, COMPUTE | COMMUNICATION) - compute
    return PipelineWorkerFigures(compute / total, 1 - work / total, exposed / len(steps) / 1e9)


def _covered(spans: Iterable[Span], actions: frozenset[Action]) -> Nanoseconds:
    return covered_ns((span.start_ns, span.end_ns) for span in spans if span.action in actions)


def _pieces(spans: Iterable[Span], schedule: Schedule, workers: int) -> dict[_Piece, list[Interval]]:
    """The intervals of each (half, part, shard, step, micro-batch)."""
    pieces: defaultdict[_Piece, list[Interval]] = defaultdict(list)
    for span, part in _with_parts(spans, schedule.chunks, workers):
        pieces[_HALVES[span.action], part, span.shard, span.step, span.micro_batch].append((span.start_ns, span.end_ns))
    return pieces


def _with_parts(spans: Iterable[Span], chunks: int, workers: int) -> Iterator[tuple[Span, int]]:
    """Each span of compute with the part that it was in: a micro-batch goes forward through a worker's parts in
    ascending order, and backward in descending order."""
    turns: Counter[tuple[Action, int, int, int, int]] = Counter()
    for span in sorted((s for s in spans if s.action in COMPUTE), key=lambda s: s.start_ns):
        key = (span.action, span.stage, span.shard, span.step, span.micro_batch)
        turn = turns[key] % chunks
        turns[key] += 1
        yield span, span.stage + workers * (turn if span.action == "forward" else chunks - 1 - turn)

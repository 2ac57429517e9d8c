"""Utilisation of a pipeline's workers, from spans, and its distance from what its schedule allows.

::

    a step    |<------------------------ total ------------------------>|
    worker 0  | forward | send |  wait  | backward |        | apply |     utilisation = (forward + backward) / total
                        |<-- exposed -->|                                 bubble      = all but forward, backward, apply
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeAlias

from paceline.core.errors import InputError
from paceline.core.mesh import StageReplicas
from paceline.core.types import Nanoseconds, Seconds
from paceline.schedule import Dependencies, Schedule, StageTimes, simulate
from paceline.trace.spans import PASSES, Action, Span

Interval: TypeAlias = tuple[Nanoseconds, Nanoseconds]
# (stage, shard) of a worker in its replica.
Place: TypeAlias = tuple[int, int]

COMMUNICATION: frozenset[Action] = frozenset({"send", "receive", "wait"})
UPDATE: frozenset[Action] = frozenset({"all_reduce", "apply"})

# Recomputing an activation is part of the time of its backward pass.
_HALVES: Mapping[Action, str] = {
    "forward": "forward",
    "backward": "backward_input",
    "backward_input": "backward_input",
    "recompute": "backward_input",
    "backward_weight": "backward_weight",
}


def covered_ns(intervals: Iterable[Interval]) -> Nanoseconds:
    """Return the length of the union of intervals; empty and reversed ones count nothing.

    >>> covered_ns([(0, 10), (5, 12), (20, 21), (9, 3)])
    13
    """
    # By start, each interval adds what is beyond the furthest end so far.
    total, reached = 0, None
    for start, end in sorted(intervals):
        begin = start if reached is None else max(start, reached)
        if end > begin:
            total += end - begin
            reached = end
    return total


@dataclass(frozen=True, slots=True)
class PipelineWorkerFigures:
    """Figures of one worker over all steps."""

    utilisation: float
    """Compute / time of the steps."""
    bubble: float
    """Fraction of the steps in which the worker neither computes nor updates."""
    exposed_communication_s: Seconds
    """Time per step in sends, receives and waits that no compute covers."""


# A worker that had nothing to do: there were fewer micro-batches than workers that take turns at its stage.
IDLE = PipelineWorkerFigures(0.0, 1.0, 0.0)


@dataclass(frozen=True, slots=True)
class Pace:
    """Time of a pipeline's step, and the time that its schedule allows with free communication."""

    step_s: Seconds
    ideal_s: Seconds

    @property
    def ratio(self) -> float:
        """Measured / ideal, at best 1."""
        return self.step_s / self.ideal_s


def worker_figures(spans: Iterable[Span], replica: int = 0) -> dict[Place, PipelineWorkerFigures]:
    """Return the figures of each worker of a replica.

    Steps are :func:`windows`; where they overlap, as in a pipeline that never runs empty, a moment counts once.

    Args:
        spans: spans of one run, in any order; only compute, communication and updates count.
        replica: number of the replica.

    >>> spans = [Span(0, 0, 0, "forward", 1, 0, 0, 10, 0), Span(0, 0, 0, "wait", 1, 0, 5, 30, 0),
    ...          Span(0, 0, 0, "backward", 1, 0, 30, 50, 0), Span(0, 0, 0, "apply", 1, 0, 90, 100, 0)]
    >>> worker_figures(spans)
    {(0, 0): PipelineWorkerFigures(utilisation=0.3, bubble=0.6, exposed_communication_s=2e-08)}
    """
    spans = _pipeline_spans(spans, replica)
    steps = _windows(spans)
    total = covered_ns(steps.values())
    if not total:
        return {}
    # Only what is inside the window of its own step counts.
    inside: dict[Place, list[Span]] = {place: [] for place in sorted({(span.stage, span.shard) for span in spans})}
    for span in spans:
        if span.step in steps:
            start, end = steps[span.step]
            clipped = replace(span, start_ns=max(span.start_ns, start), end_ns=min(span.end_ns, end))
            inside[span.stage, span.shard].append(clipped)

    def covered(spans: Iterable[Span], actions: frozenset[Action]) -> Nanoseconds:
        return covered_ns((span.start_ns, span.end_ns) for span in spans if span.action in actions)

    figures: dict[Place, PipelineWorkerFigures] = {}
    for place, own in inside.items():
        compute, work = covered(own, PASSES), covered(own, PASSES | UPDATE)
        exposed = covered(own, PASSES | COMMUNICATION) - compute
        figures[place] = PipelineWorkerFigures(compute / total, 1 - work / total, exposed / len(steps) / 1e9)
    return figures


def windows(spans: Iterable[Span], replica: int = 0) -> dict[int, Interval]:
    """Return the window of each step: from its first compute to the end of its last compute, transfer or update.

    If Δ is accumulated over several mini-batches, each is a step, and those that end with an update last longer.

    Args:
        spans: spans of one run, in any order.
        replica: number of the replica.

    >>> windows([Span(0, 0, 0, "forward", 4, 0, 10, 20, 0), Span(0, 0, 0, "apply", 1, 0, 30, 35, 0)])
    {4: (10, 35)}
    """
    return _windows(_pipeline_spans(spans, replica))


def stage_times(spans: Iterable[Span], schedule: Schedule, workers: int, replica: int = 0) -> StageTimes:
    """Return the measured median time of a micro-batch in each part, in seconds.

    A backward that was not split counts as ``backward_input`` alone; a recomputation counts with its backward.

    Args:
        spans: spans of one run, in any order.
        schedule: the run's schedule.
        workers: p.
        replica: number of the replica.

    Raises:
        InputError: no forward or no backward of some part.

    >>> from paceline.schedule import parse
    >>> spans = [Span(0, 0, 0, "forward", 1, i, 100 * i, 100 * i + 10 + i, 0) for i in range(3)]
    >>> spans += [Span(0, 0, 0, "backward", 1, i, 100 * i + 50, 100 * i + 70, 0) for i in range(3)]
    >>> stage_times(spans, parse("1f1b"), workers=1)
    StageTimes(forward=(1.1e-08,), backward_input=(2e-08,), backward_weight=(0.0,), transfer=0.0)
    """
    # A micro-batch goes forward through a worker's parts in ascending order, and backward in descending order, so the
    # number of earlier spans of its kind says which part a span belongs to.
    earlier: Counter[tuple[Action, int, int, int, int]] = Counter()
    pieces: defaultdict[tuple[str, int, int, int, int], list[Interval]] = defaultdict(list)
    for span in _pipeline_spans(spans, replica):
        if span.action in PASSES:
            key = (span.action, span.stage, span.shard, span.step, span.micro_batch)
            turn = earlier[key] % schedule.chunks
            earlier[key] += 1
            chunk = turn if span.action == "forward" else schedule.chunks - 1 - turn
            piece = (_HALVES[span.action], span.stage + workers * chunk, span.shard, span.step, span.micro_batch)
            pieces[piece].append((span.start_ns, span.end_ns))
    lengths: defaultdict[tuple[str, int], list[Nanoseconds]] = defaultdict(list)
    for (half, part, *_), intervals in pieces.items():
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
    """Return the spans of the schedule with the measured compute if nothing else took time.

    Args:
        spans: spans of one run, in any order.
        schedule: the run's schedule.
        workers: p.
        micro_batches: m.
        replica: number of the replica.
        columns: replicas of the stages; None: one of each.
        dependencies: dependencies among the model's parts; None: each needs the one before it.

    Returns:
        The spans of one step; if weights don't wait for its end, of as many steps as were measured.
    """
    # Without a flush steps overlap, so that one step alone would not show the rate of the stream.
    steps = 1 if schedule.flushes else len(windows(spans, replica))
    times = stage_times(spans, schedule, workers, replica)
    return simulate(schedule.resolved(micro_batches), times, workers, micro_batches * steps, columns, dependencies)


def pace(spans: Sequence[Span], best: Sequence[Span], *, flushes: bool = True, replica: int = 0) -> Pace:
    """Return the time of a step, measured and :func:`ideal`.

    The measured time is that of the median step; if steps overlap, the whole time over their number.

    Args:
        spans: spans of one run, in any order.
        best: the result of :func:`ideal`.
        flushes: True if the schedule updates weights at the end of a step only, and ``best`` is one step.
        replica: number of the replica.

    >>> from paceline.schedule import parse
    >>> spans = [Span(0, 0, 0, "forward", 1, 0, 0, 10, 0), Span(0, 0, 0, "backward", 1, 0, 15, 35, 0)]
    >>> pace(spans, ideal(spans, parse("gpipe"), workers=1, micro_batches=1))
    Pace(step_s=3.5e-08, ideal_s=3e-08)
    """
    lengths = windows(spans, replica).values()
    ideal_ns = max(span.end_ns for span in best)
    if flushes:
        return Pace(median(end - start for start, end in lengths) / 1e9, ideal_ns / 1e9)
    return Pace(covered_ns(lengths) / len(lengths) / 1e9, ideal_ns / len(lengths) / 1e9)


def _pipeline_spans(spans: Iterable[Span], replica: int) -> list[Span]:
    """Return a replica's compute, communication and updates by their start.

    Updates are numbered apart from steps; here each gets the number of the step that it ends.
    """
    counted = (span for span in spans if span.replica == replica and span.action in PASSES | COMMUNICATION | UPDATE)
    current: dict[Place, int] = {}
    result: list[Span] = []
    for span in sorted(counted, key=lambda span: span.start_ns):
        place = (span.stage, span.shard)
        if span.action in PASSES:
            current[place] = span.step
        # An update before the first step belongs to none, and is left out.
        if span.action not in UPDATE:
            result.append(span)
        elif place in current:
            result.append(replace(span, step=current[place]))
    return result


def _windows(spans: Iterable[Span]) -> dict[int, Interval]:
    result: dict[int, Interval] = {}
    for span in spans:
        start, end = result.get(span.step, (span.start_ns, span.end_ns))
        if span.action in PASSES:
            result[span.step] = min(start, span.start_ns), max(end, span.end_ns)
        elif span.action != "wait" and span.step in result:  # a wait after the last transfer is no part of the step
            result[span.step] = start, max(end, span.end_ns)
    return result

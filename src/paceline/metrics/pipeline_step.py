"""One step of a pipeline next to what its schedule allows, and the figures of the whole run."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from statistics import fmean, median_low
from typing import Any

from paceline.core.errors import InputError
from paceline.core.formatting import aligned, amount
from paceline.core.mesh import Coordinate
from paceline.core.types import Nanoseconds
from paceline.metrics.pipeline import Interval, Pace, PipelineWorkerFigures, ideal, pace, windows, worker_figures
from paceline.metrics.summary import NEEDS, SAVED
from paceline.schedule import Dependencies
from paceline.strategy import Strategy
from paceline.trace.lanes import Panel, duration
from paceline.trace.spans import Span
from paceline.trace.svg import panels_svg
from paceline.trace.text import panels_text

_TITLES = ("stage", "utilisation", "bubble", "exposed communication", "peak activations")
NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class StageRow:
    """Figures of one worker over all steps."""

    stage: int
    shard: int
    figures: PipelineWorkerFigures
    peak_saved_bytes: int | None
    """Largest memory kept for backward at one time; None: it was not counted."""


@dataclass(frozen=True)
class PipelineStep:
    """One step of one replica."""

    step: int
    steps: int
    """Number of recorded steps."""
    began_ns: Nanoseconds
    """Start of the step on the clock of the run's spans."""
    measured: Panel
    ideal: Panel
    pace: Pace
    """Measured and ideal time over all steps."""
    stages: tuple[StageRow, ...]

    def text(self, width: int) -> str:
        """Return both panels, and below them the figures, as text.

        Args:
            width: characters of a lane without its label.
        """
        rows = self.table()
        panels = panels_text([self.measured, self.ideal], width)
        return "\n".join([panels, self.sentence(), "", *aligned(rows, right=rows[0])]) + "\n"

    def svg(self) -> str:
        """Return both panels and the figures as an SVG element."""
        return panels_svg([self.measured, self.ideal], self.sentence(), self.table())

    def sentence(self) -> str:
        """Return measured and ideal time in words."""
        measured, best = duration(self.pace.step_s * 1e9), duration(self.pace.ideal_s * 1e9)
        return f"step time, median of {self.steps}: {measured}; ideal: {best}; measured / ideal: {self.pace.ratio:.2f}"

    def table(self) -> list[tuple[str, ...]]:
        """Return titles, a line for each worker, and their means; the last column is left out if it is empty."""
        figures = [row.figures for row in self.stages]
        mean = PipelineWorkerFigures(*map(fmean, zip(*map(astuple, figures), strict=True)))
        split = any(row.shard for row in self.stages)
        named = [
            (f"{r.stage}.{r.shard}" if split else str(r.stage), r.figures, r.peak_saved_bytes) for r in self.stages
        ]
        lines: list[tuple[str, ...]] = [_TITLES]
        for name, each, saved in [*named, ("mean", mean, None)]:
            shares = (f"{share:.1%}".replace("%", " %") for share in (each.utilisation, each.bubble))
            exposed = duration(each.exposed_communication_s * 1e9)
            lines.append((name, *shares, exposed, "" if saved is None else amount(saved)))
        kept = len(_TITLES) - all(row.peak_saved_bytes is None for row in self.stages)
        return [line[:kept] for line in lines]

    def to_json(self) -> dict[str, Any]:
        """Return the figures, ready for JSON."""
        return {
            "step": self.step,
            "steps": self.steps,
            "step_time_s": self.pace.step_s,
            "ideal_step_time_s": self.pace.ideal_s,
            "measured_over_ideal": self.pace.ratio,
            "stages": [
                {
                    "stage": row.stage,
                    "shard": row.shard,
                    **asdict(row.figures),
                    "peak_saved_bytes": row.peak_saved_bytes,
                }
                for row in self.stages
            ],
        }

    def ideal_spans(self) -> list[Span]:
        """Return the spans of the ideal on the clock of the run, from the start of the step."""
        shift_ns = self.began_ns
        return [
            replace(span, start_ns=span.start_ns + shift_ns, end_ns=span.end_ns + shift_ns) for span in self.ideal.spans
        ]


def pipeline_step(
    spans: Sequence[Span],
    strategy: Strategy | str,
    summary: Mapping[str, Any] = NOTHING,
    *,
    step: int | None = None,
    replica: int = 0,
) -> PipelineStep | None:
    """Return a step of a pipeline; None if the strategy is no pipeline, or no whole step was recorded.

    Args:
        spans: spans of one run, in any order.
        strategy: strategy of the run.
        summary: summary of the run, with the memory that each worker kept for backward and the dependencies among the
            model's parts; without it each part needs the one before it.
        step: number of the step; by default the first of median length.
        replica: number of the replica.

    Raises:
        InputError: no such step.
    """
    if not (isinstance(strategy, Strategy) and strategy.pipelined):
        return None
    steps = windows(spans, replica)
    order, workers, m = strategy.order, strategy.stage_count, strategy.micro_batch_count
    columns = strategy.mesh.stage_replicas if strategy.replicated else None
    needs = (summary.get("notes") or {}).get(NEEDS)
    dependencies = None if needs is None else Dependencies.parse(order.parts(workers), needs)
    try:
        best = ideal(spans, order, workers, m, replica, columns, dependencies)
    except InputError:  # a run that was interrupted before its first step ended
        return None
    middle = median_low(end - start for start, end in steps.values())
    typical = next(number for number, (start, end) in steps.items() if end - start == middle)
    chosen = typical if step is None else step
    if chosen not in steps:
        raise InputError(f"step={chosen}, but the run has steps {min(steps)} to {max(steps)}; write step={typical}")
    # An ideal that never flushes is one stream of micro-batches: m of them are a step.
    ideal_steps = [replace(span, step=span.micro_batch // m) for span in best]
    ideal_window = windows(ideal_steps)[0 if order.flushes else sorted(steps).index(chosen)]
    title = f"ideal, {strategy.schedule} with {m} micro-batch{'es' if m > 1 else ''}"
    saved, rows = summary.get(SAVED), list[StageRow]()
    for place, figures in worker_figures(spans, replica).items():
        rank = strategy.mesh.rank(Coordinate(replica, *place))
        rows.append(StageRow(*place, figures, saved[rank] if saved else None))
    return PipelineStep(
        chosen,
        len(steps),
        steps[chosen][0],
        _panel(f"measured, step {chosen}", [s for s in spans if s.replica == replica], steps[chosen]),
        _panel(title, ideal_steps, ideal_window),
        pace(spans, best, flushes=order.flushes, replica=replica),
        tuple(rows),
    )


def _panel(title: str, spans: Sequence[Span], window: Interval) -> Panel:
    """Return all spans inside a window, also those of other steps that overlap with it."""
    start, end = window
    inside = (span for span in spans if span.start_ns < end and span.end_ns > start)
    cut = [replace(s, start_ns=max(s.start_ns - start, 0), end_ns=min(s.end_ns, end) - start) for s in inside]
    return Panel(f"{title}: {duration(end - start)}", cut, end - start)

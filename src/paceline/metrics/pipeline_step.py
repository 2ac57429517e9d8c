"""One step of a pipeline beside what its schedule allows, and the figures of the whole run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median_low
from typing import Any

from paceline.core.errors import InputError
from paceline.core.formatting import amount
from paceline.core.mesh import Coordinate
from paceline.core.types import Nanoseconds
from paceline.metrics.pipeline import Interval, Pace, PipelineWorkerFigures, ideal, pace, windows, worker_figures
from paceline.metrics.summary import NEEDS, SAVED
from paceline.schedule import Dependencies
from paceline.strategy import Strategy
from paceline.trace.lanes import duration
from paceline.trace.spans import Span
from paceline.trace.step_view import Panel, panels_svg, panels_text

_TITLES = ("stage", "utilisation", "bubble", "exposed communication", "peak activations")
NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class StageRow:
    """What one worker did, over all steps."""

    stage: int
    shard: int
    figures: PipelineWorkerFigures
    peak_saved_bytes: int | None
    """The most that was kept for backward at one time; None: it was not counted."""

    def to_json(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "shard": self.shard,
            "utilisation": self.figures.utilisation,
            "bubble": self.figures.bubble,
            "exposed_communication_s": self.figures.exposed_communication_s,
            "peak_saved_bytes": self.peak_saved_bytes,
        }


@dataclass(frozen=True)
class PipelineStep:
    """One step of one replica."""

    step: int
    steps: int
    """How many were recorded."""
    began_ns: Nanoseconds
    """On the clock of the run's spans."""
    measured: Panel
    ideal: Panel
    pace: Pace
    """Of all steps."""
    stages: tuple[StageRow, ...]

    def text(self, width: int) -> str:
        """Both panels, and below them the figures.

        Args:
            width: characters of a lane, its label not counted.
        """
        rows = self.table()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([panels_text([self.measured, self.ideal], width), self.sentence(), "", *lines]) + "\n"

    def svg(self) -> str:
        """The same as a picture."""
        return panels_svg([self.measured, self.ideal], self.sentence(), self.table())

    def sentence(self) -> str:
        """The pace in words."""
        measured, best = duration(self.pace.step_s * 1e9), duration(self.pace.ideal_s * 1e9)
        return f"step time, median of {self.steps}: {measured}; ideal: {best}; measured / ideal: {self.pace.ratio:.2f}"

    def table(self) -> list[tuple[str, ...]]:
        """Titles, a line for each worker, their means; a column that is empty is left out."""
        figures = [row.figures for row in self.stages]
        mean = PipelineWorkerFigures(
            fmean(each.utilisation for each in figures),
            fmean(each.bubble for each in figures),
            fmean(each.exposed_communication_s for each in figures),
        )
        split = any(row.shard for row in self.stages)
        names = (f"{row.stage}.{row.shard}" if split else str(row.stage) for row in self.stages)
        saved = ("" if row.peak_saved_bytes is None else amount(row.peak_saved_bytes) for row in self.stages)
        lines = [_cells(*line) for line in zip(names, figures, saved, strict=True)]
        kept = len(_TITLES) - all(row.peak_saved_bytes is None for row in self.stages)
        return [line[:kept] for line in (_TITLES, *lines, _cells("mean", mean, ""))]

    def to_json(self) -> dict[str, Any]:
        """The figures."""
        return {
            "step": self.step,
            "steps": self.steps,
            "step_time_s": self.pace.step_s,
            "ideal_step_time_s": self.pace.ideal_s,
            "measured_over_ideal": self.pace.ratio,
            "stages": [row.to_json() for row in self.stages],
        }

    def ideal_spans(self) -> list[Span]:
        """The ideal on the clock of the run, beginning when the step did."""
        return [_moved(span, self.began_ns) for span in self.ideal.spans]


def pipeline_step(
    spans: Sequence[Span],
    strategy: Strategy | str,
    summary: Mapping[str, Any] = NOTHING,
    *,
    step: int | None = None,
    replica: int = 0,
) -> PipelineStep | None:
    """A step of a pipeline; None where the strategy is for none, or no whole step was recorded.

    Args:
        spans: of one run, in any order.
        strategy: that it followed.
        summary: of the run. It says the most that each worker kept for backward, and which parts of the model need
            which; without it each needs the one before it.
        step: which one; by default the first of median length.
        replica: whose.

    Raises:
        InputError: no such step.
    """
    if not (isinstance(strategy, Strategy) and strategy.pipelined):
        return None
    found = windows(spans, replica)
    order, workers, m = strategy.order, strategy.stage_count, strategy.micro_batch_count
    columns = strategy.mesh.stage_replicas if strategy.replicated else None
    needs = (summary.get("notes") or {}).get(NEEDS)
    dependencies = None if needs is None else Dependencies.parse(order.parts(workers), needs)
    try:
        best = ideal(spans, order, workers, m, replica, columns, dependencies)
    except InputError:  # a run that was interrupted early
        return None
    chosen = _typical(found) if step is None else step
    if chosen not in found:
        raise InputError(
            f"step={chosen}, but the run has steps {min(found)} to {max(found)}; write step={_typical(found)}"
        )
    position = 0 if order.flushes else sorted(found).index(chosen)
    return PipelineStep(
        chosen,
        len(found),
        found[chosen][0],
        _panel(f"measured, step {chosen}", [s for s in spans if s.replica == replica], found[chosen]),
        _panel(
            f"ideal, {strategy.schedule} with {m} micro-batch{'es' if m > 1 else ''}",
            _stepped(best, m),
            windows(_stepped(best, m))[position],
        ),
        pace(spans, best, flushes=order.flushes, replica=replica),
        tuple(_rows(spans, strategy, summary.get(SAVED), replica)),
    )


def _typical(found: dict[int, Interval]) -> int:
    """The first step of median length."""
    middle = median_low(end - start for start, end in found.values())
    return next(step for step, (start, end) in found.items() if end - start == middle)


def _stepped(best: Sequence[Span], micro_batches: int) -> list[Span]:
    """A stream of micro-batches as steps of so many each, from 0 on."""
    return [replace(span, step=span.micro_batch // micro_batches) for span in best]


def _panel(title: str, spans: Sequence[Span], window: Interval) -> Panel:
    """What lies in a window; of steps that overlap with others all that does."""
    start, end = window
    inside = (span for span in spans if span.start_ns < end and span.end_ns > start)
    cut = (replace(s, start_ns=max(s.start_ns, start), end_ns=min(s.end_ns, end)) for s in inside)
    return Panel(f"{title}: {duration(end - start)}", [_moved(span, -start) for span in cut], end - start)


def _moved(span: Span, by_ns: Nanoseconds) -> Span:
    return replace(span, start_ns=span.start_ns + by_ns, end_ns=span.end_ns + by_ns)


def _rows(
    spans: Sequence[Span], strategy: Strategy, saved_bytes: Sequence[int | None] | None, replica: int
) -> list[StageRow]:
    found = worker_figures(spans, replica)
    ranks = {place: strategy.mesh.rank(Coordinate(replica, *place)) for place in found}
    saved = {place: saved_bytes[rank] for place, rank in ranks.items()} if saved_bytes else {}
    return [StageRow(*place, figures, saved.get(place)) for place, figures in found.items()]


def _cells(name: str, figures: PipelineWorkerFigures, saved: str) -> tuple[str, ...]:
    shares = (f"{share:.1%}".replace("%", " %") for share in (figures.utilisation, figures.bubble))
    return (name, *shares, duration(figures.exposed_communication_s * 1e9), saved)

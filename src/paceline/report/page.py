"""Write a report: sections of tables and figures in one HTML file that needs no other.

Which part of a run a swimlane shows: a whole run is far too long for a page.

The page: sections of tables and figures, in one file that needs no other.
"""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from statistics import median

from paceline.core.errors import InputError
from paceline.core.safe_files import replacing
from paceline.core.types import ReplicaId, Seconds
from paceline.metrics.pipeline_step import PipelineStep, pipeline_step
from paceline.report import figures
from paceline.report.figures import curve
from paceline.report.inputs import Section, Source, StrategyRuns, sections
from paceline.report.tables import legend, name, notes, results, strategies
from paceline.run import Run
from paceline.trace.spans import SERVER, Span
from paceline.trace.swimlane import svg

CSS = """
:root { --ink: #222; --soft: #5c5c5c; --line: #dcdcdc; --wash: #f6f7f8; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: 40px 28px 64px; background: #fff; color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 27px; line-height: 1.25; margin: 0 0 4px; letter-spacing: -0.01em; }
h2 { font-size: 20px; margin: 30px 0 4px; }
section + section { margin-top: 60px; border-top: 1px solid var(--line); }
h3 { font-size: 16px; margin: 34px 0 6px; }
p { margin: 6px 0; max-width: 105ch; }
.soft, figcaption, caption { color: var(--soft); }
figcaption, caption { font-size: 13px; line-height: 1.45; text-align: left; max-width: 110ch; }
caption { caption-side: bottom; padding-top: 8px; }
code { font: 12.5px/1.45 ui-monospace, "SF Mono", Menlo, Consolas, monospace; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: 6px 8px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { font-weight: 600; font-size: 13px; vertical-align: bottom; }
th.group { border-bottom: 0; padding-bottom: 0; text-align: center; }
thead tr:last-child th { font-weight: 400; color: var(--soft); border-bottom: 1.5px solid #999; }
td { font-size: 13.5px; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
td.text, th.text { text-align: left; white-space: normal; }
.swatch { display: inline-block; width: 22px; height: 0; margin-right: 8px; vertical-align: middle;
  border-top: 4px solid; border-radius: 2px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 26px; margin: 12px 0 4px; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(430px, 1fr)); gap: 26px 36px;
  margin: 14px 0 8px; }
figure { margin: 0; break-inside: avoid; }
figure svg { display: block; width: 100%; height: auto; }
figure svg text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif
  !important; }
.lane { margin: 16px 0 22px; }
ul { margin: 6px 0; padding-left: 20px; }
footer { margin-top: 56px; padding-top: 12px; border-top: 1px solid var(--line); color: var(--soft); font-size: 13px; }
@media print { body { padding: 0; max-width: none; font-size: 11pt; } h2, h3 { break-after: avoid; }
  .grid { grid-template-columns: 1fr 1fr; } * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""


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
    return median(_swimlane_pace(lane) for lane in lanes.values()) / 1e9 if lanes else 0.0


def _swimlane_pace(lane: Sequence[Span]) -> float:
    length = max(span.end_ns for span in lane) - min(span.start_ns for span in lane)
    return length / len({span.step for span in lane})


def _middle(spans: Sequence[Span], length_s: Seconds) -> tuple[Seconds, Seconds]:
    """Where a stretch in the middle begins and ends, in seconds since the first span."""
    whole_s = (max(span.end_ns for span in spans) - min(span.start_ns for span in spans)) / 1e9
    start_s = max(0.0, (whole_s - length_s) / 2)
    return start_s, max(min(start_s + length_s, whole_s), start_s + 1e-9)


_CURVES = (
    ("test_accuracy", "Test accuracy, %", 100.0),
    ("test_loss", "Test loss", 1.0),
    ("train_loss", "Train loss", 1.0),
    ("threshold", "K: gradients that an update waits for", 1.0),
    ("noise_scale", "Noise scale, samples: the largest batch that is worth them", 1.0),
    ("efficiency", "Statistical efficiency of the batch, %", 100.0),
    ("goodput_samples_per_s", "Goodput: samples/s · efficiency", 1.0),
)


def write_report(sources: Iterable[Source], html_path: str | Path) -> None:
    """Write one self-contained HTML page; what was at ``html_path`` is replaced.

    Args:
        sources: runs and comparisons, or the folders that they were saved to.
        html_path: the file to write.

    Raises:
        InputError: there is nothing to report, a folder can't be read, or the file can't be written.
    """
    text = page(sections(sources))
    try:
        with replacing(html_path) as file:
            file.write(text)
    except OSError as error:
        raise InputError(f"{html_path} can't be written: {error}; write a file in a folder that exists") from error


def page(found: Sequence[Section]) -> str:
    """The whole document."""
    title = escape(" · ".join(dict.fromkeys(section.program for section in found)))
    body = "\n".join("\n".join(["<section>", *_section(section), "</section>"]) for section in found)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{title} – Paceline</title>\n'
        f"<style>{CSS}</style>\n</head>\n<body>\n<h1>Paceline report</h1>\n"
        f'<p class="soft">{_count(found)}</p>\n'
        f"{body}\n<footer>Written by Paceline from the runs' own records.</footer>\n</body>\n</html>\n"
    )


def _count(found: Sequence[Section]) -> str:
    runs = sum(len(group.runs) for section in found for group in section.groups)
    ways = len({group.strategy for section in found for group in section.groups})
    return f"{runs} run{'' if runs == 1 else 's'} under {ways} strateg{'y' if ways == 1 else 'ies'}."


def _section(section: Section) -> Iterator[str]:
    yield f"<h2>{escape(section.program)} on the {escape(section.engine)} engine</h2>"
    yield strategies(section)
    yield "<h3>Results</h3>"
    yield results(section)
    yield from _curves(section)
    yield from _pace(section)
    yield from _swimlanes(section)
    if told := notes(section):
        yield f"<h3>Notes</h3>{told}"


def _curves(section: Section) -> Iterator[str]:
    time = "virtual time, s" if section.engine == "virtual" else "training time, s"
    drawn = [curve(section.groups, key, title, time=time, scale=scale) for key, title, scale in _CURVES]
    rounds = max(len(group.runs) for group in section.groups)
    spread = (
        " Lines are means over the rounds, bands reach from the least to the largest of them." if rounds > 1 else ""
    )
    yield "<h3>Over time</h3>"
    yield legend(section.groups)
    yield _grid(drawn)
    yield (
        '<p class="soft">Each point scores a snapshot of A taken at that time, off the training path; the train loss '
        f"is that of a fixed sample of the training set.{spread}</p>"
    )


def _pace(section: Section) -> Iterator[str]:
    drawn = [figures.staleness(section.groups), figures.utilisation(section.groups)]
    if any(drawn):
        yield "<h3>Staleness and utilisation</h3>"
        yield _grid(drawn)
        yield (
            '<p class="soft">Staleness: of the gradients that were applied, how many updates A had had since it was '
            "read for each; all rounds together. Busy: time in work and delay / training time, mean over the rounds; "
            "waiting is not busy.</p>"
        )


def _grid(drawn: Iterable[str | None]) -> str:
    figures = "".join(f"<figure>{svg}</figure>" for svg in drawn if svg is not None)
    return f'<div class="grid">{figures}</div>'


def _swimlanes(section: Section) -> Iterator[str]:
    recorded = [(group, run) for group in section.groups if (run := _traced(group))]
    if not recorded:
        return
    yield "<h3>Swimlanes</h3>"
    steps = {group.strategy: pipeline_step(r.spans, r.strategy, r.summary) for group, r in recorded}
    yield from _pipelines([(group, step) for group, _ in recorded if (step := steps[group.strategy])])
    yield from _stretches([(group, run.spans) for group, run in recorded if not steps[group.strategy]])


def _pipelines(found: Sequence[tuple[StrategyRuns, PipelineStep]]) -> Iterator[str]:
    if not found:
        return
    yield (
        '<p class="soft">Pipelines: one step, of median length, and below it what the schedule allows with the same '
        "compute and free communication and updates; numbers are micro-batches. Utilisation: compute / time of the "
        "steps; bubble: neither compute nor update; peak activations: the most that was kept for backward.</p>"
    )
    for group, step in found:
        yield _lane(group, step.svg())


def _stretches(found: Sequence[tuple[StrategyRuns, Sequence[Span]]]) -> Iterator[str]:
    if not found:
        return
    yield (
        '<p class="soft">What each worker did, from the middle of a round: a lane a worker, time from left to right '
        f"since the first span; about {STEPS} steps, all strategies to one scale, at most {REPLICAS} replicas.</p>"
    )
    for (group, _), drawing in zip(found, swimlanes([spans for _, spans in found]), strict=True):
        yield _lane(group, drawing)


def _lane(group: StrategyRuns, svg: str) -> str:
    return f'<figure class="lane"><figcaption>{name(group)}</figcaption>{svg}</figure>'


def _traced(group: StrategyRuns) -> Run | None:
    return next((run for run in group.runs if run.spans), None)

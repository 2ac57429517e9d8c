"""Write a report: sections of tables and figures in one HTML file that needs no other."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from statistics import median

from paceline.core.errors import InputError
from paceline.core.safe_files import replacing
from paceline.core.types import ReplicaId, Seconds
from paceline.metrics.pipeline_step import pipeline_step
from paceline.report import figures
from paceline.report.inputs import Section, Source, StrategyRuns, sections
from paceline.report.tables import legend, name, notes, results, strategies
from paceline.trace.spans import SERVER, Span
from paceline.trace.svg import swimlanes_svg

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
"""Length of a drawn window in steps, and the number of replicas that are drawn."""

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
    """Write one self-contained HTML page, replacing an older file.

    Args:
        sources: runs and comparisons, or the folders that they were saved to.
        html_path: path of the file to write.

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
    """Return the whole document."""
    title = escape(" · ".join(dict.fromkeys(section.program for section in found)))
    runs = sum(len(group.runs) for section in found for group in section.groups)
    ways = len({group.strategy for section in found for group in section.groups})
    count = f"{runs} run{'' if runs == 1 else 's'} under {ways} strateg{'y' if ways == 1 else 'ies'}."
    body = "\n".join("\n".join(["<section>", *_section(section), "</section>"]) for section in found)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{title} – Paceline</title>\n'
        f"<style>{CSS}</style>\n</head>\n<body>\n<h1>Paceline report</h1>\n"
        f'<p class="soft">{count}</p>\n'
        f"{body}\n<footer>Written by Paceline from the runs' own records.</footer>\n</body>\n</html>\n"
    )


def _section(section: Section) -> Iterator[str]:
    """Yield the elements of a section: strategies, results, curves, staleness and utilisation, swimlanes, notes."""
    groups, rounds = section.groups, max(len(group.runs) for group in section.groups)
    yield f"<h2>{escape(section.program)} on the {escape(section.engine)} engine</h2>"
    yield strategies(section)
    yield "<h3>Results</h3>"
    yield results(section)

    time = "virtual time, s" if section.engine == "virtual" else "training time, s"
    spread = " Lines are means over the rounds, bands extend from the least to the largest of them."
    yield "<h3>Over time</h3>"
    yield legend(groups)
    yield _grid([figures.curve(groups, key, title, time=time, scale=scale) for key, title, scale in _CURVES])
    yield (
        '<p class="soft">Each point scores a snapshot of A taken at that time, off the training path; the train loss '
        f"is that of a fixed sample of the training set.{spread if rounds > 1 else ''}</p>"
    )

    bars = [figures.staleness(groups), figures.utilisation(groups)]
    if any(bars):
        yield "<h3>Staleness and utilisation</h3>"
        yield _grid(bars)
        yield (
            '<p class="soft">Staleness: of the gradients that were applied, how many updates A had had since it was '
            "read for each; all rounds together. Busy: time in work and delay / training time, mean over the rounds; "
            "waiting is not busy.</p>"
        )
    yield from _swimlanes(section)
    if items := notes(section):
        yield f"<h3>Notes</h3>{items}"


def _grid(drawings: Iterable[str | None]) -> str:
    elements = "".join(f"<figure>{drawing}</figure>" for drawing in drawings if drawing is not None)
    return f'<div class="grid">{elements}</div>'


def _swimlanes(section: Section) -> Iterator[str]:
    """Yield the swimlanes of the first traced run of each strategy: one step of a pipeline, else a time window."""
    traced = [(group, run) for group in section.groups if (run := next((r for r in group.runs if r.spans), None))]
    if not traced:
        return
    yield "<h3>Swimlanes</h3>"
    steps = [(group, run, pipeline_step(run.spans, run.strategy, run.summary)) for group, run in traced]
    drawn = [(group, step.svg()) for group, _, step in steps if step]
    if drawn:
        yield (
            '<p class="soft">Pipelines: one step, of median length, and below it what the schedule allows with the '
            "same compute and free communication and updates; numbers are micro-batches. Utilisation: compute / time "
            "of the steps; bubble: neither compute nor update; peak activations: the most that was kept for "
            "backward.</p>"
        )
    yield from (_lane(group, element) for group, element in drawn)
    rest = [(group, run.spans) for group, run, step in steps if not step]
    if rest:
        yield (
            '<p class="soft">What each worker did, from the middle of a round: a lane a worker, time from left to '
            f"right since the first span; about {STEPS} steps, all strategies to one scale, at most {REPLICAS} "
            "replicas.</p>"
        )
        lanes = swimlanes([spans for _, spans in rest])
        yield from (_lane(group, element) for (group, _), element in zip(rest, lanes, strict=True))


def _lane(group: StrategyRuns, element: str) -> str:
    return f'<figure class="lane"><figcaption>{name(group)}</figcaption>{element}</figure>'


def swimlanes(recorded: Sequence[Sequence[Span]]) -> list[str]:
    """Return a time window from the middle of each run, as SVG; all to one scale, so that they can be compared.

    A window is as long as a dozen steps of the median replica of the median run. The first dozen replicas are drawn,
    and the server.

    Args:
        recorded: the spans of each run; none of them empty.
    """
    # The server has a negative number, and is always drawn.
    shown = [[span for span in spans if span.replica < REPLICAS] for spans in recorded]
    length_s = median(STEPS * step_s(spans) for spans in shown)
    drawings = []
    for spans in shown:
        whole_s = (max(span.end_ns for span in spans) - min(span.start_ns for span in spans)) / 1e9
        start_s = max(0.0, (whole_s - length_s) / 2)
        # A window is never empty, however short the run.
        drawings.append(swimlanes_svg(spans, start_s, max(min(start_s + length_s, whole_s), start_s + 1e-9)))
    return drawings


def step_s(spans: Iterable[Span]) -> Seconds:
    """Return the time of one step of the median replica, from its first span to its last."""
    lanes: dict[ReplicaId, list[Span]] = {}
    for span in spans:
        if span.replica != SERVER:
            lanes.setdefault(span.replica, []).append(span)
    lengths_ns = [
        (max(span.end_ns for span in lane) - min(span.start_ns for span in lane)) / len({span.step for span in lane})
        for lane in lanes.values()
    ]
    return median(lengths_ns) / 1e9 if lengths_ns else 0.0

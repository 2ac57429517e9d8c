"""Write a report: sections of tables and figures in one HTML file that needs no other.

All text that a user may have written is escaped here.
"""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from statistics import median

from paceline.core.errors import InputError
from paceline.core.safe_files import replacing
from paceline.core.types import ReplicaId, Seconds
from paceline.metrics.efficiency import verdict
from paceline.metrics.pipeline_step import pipeline_step
from paceline.metrics.repeats import difference, mean_summary
from paceline.metrics.summary import NEEDS
from paceline.metrics.table_columns import PACE, REACHED, Column, Entry, figure, grid
from paceline.report import figures
from paceline.report.inputs import Section, Source, StrategyRuns, sections
from paceline.trace.spans import SERVER, Span
from paceline.trace.svg import swimlanes_svg

# Length of a drawn window in steps, and the number of replicas that are drawn.
STEPS, REPLICAS = 12, 12

CURVES = (
    ("test_accuracy", "Test accuracy, %", 100.0),
    ("test_loss", "Test loss", 1.0),
    ("train_loss", "Train loss", 1.0),
    ("threshold", "K: gradients that an update waits for", 1.0),
    ("noise_scale", "Noise scale, samples: the largest batch that is worth them", 1.0),
    ("efficiency", "Statistical efficiency of the batch, %", 100.0),
    ("goodput_samples_per_s", "Goodput: samples/s · efficiency", 1.0),
)


_RUN_COLUMNS = (
    Column("", "rounds", lambda entry: str(entry.rounds)),
    Column("", "training time, s", figure("seconds", ",.1f")),
    *PACE,
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


def page(all_sections: Sequence[Section]) -> str:
    """Return the whole document."""
    title = escape(" · ".join(dict.fromkeys(section.program for section in all_sections)))
    runs = sum(len(group.runs) for section in all_sections for group in section.groups)
    ways = len({group.strategy for section in all_sections for group in section.groups})
    count = f"{runs} run{'' if runs == 1 else 's'} under {ways} strateg{'y' if ways == 1 else 'ies'}."
    body = "\n".join(map(section_html, all_sections))
    footer = "<footer>Written by Paceline from the runs' own records.</footer>"
    return document(title, f'<h1>Paceline report</h1>\n<p class="soft">{count}</p>\n{body}\n{footer}')


def document(title: str, body: str) -> str:
    """Return a document with the report's style.

    Args:
        title: with entities for what is special in HTML.
        body: elements.
    """
    css = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{title} – Paceline</title>\n'
        f"<style>\n{css}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def section_html(section: Section) -> str:
    """Return the element of a section."""
    return "\n".join(["<section>", *_elements(section), "</section>"])


def _elements(section: Section) -> Iterator[str]:
    """Yield the elements of a section: strategies, results, curves, staleness and utilisation, swimlanes, notes."""
    groups, rounds = section.groups, max(len(group.runs) for group in section.groups)
    yield f"<h2>{escape(section.program)} on the {escape(section.engine)} engine</h2>"
    yield _strategies(section)
    yield "<h3>Results</h3>"
    yield _results(section)

    time = "virtual time, s" if section.engine == "virtual" else "training time, s"
    spread = " Lines are means over the rounds, bands extend from the least to the largest of them."
    yield "<h3>Over time</h3>"
    names = "".join(f"<span>{_name(group)}</span>" for group in groups)
    yield f'<div class="legend">{names}</div>'
    yield figure_grid([figures.curve(groups, key, title, time=time, scale=scale) for key, title, scale in CURVES])
    yield (
        '<p class="soft">Each point scores a snapshot of A taken at that time, off the training path; the train loss '
        f"is that of a fixed sample of the training set.{spread if rounds > 1 else ''}</p>"
    )

    bars = [figures.staleness(groups), figures.utilisation(groups)]
    if any(bars):
        yield "<h3>Staleness and utilisation</h3>"
        yield figure_grid(bars)
        yield (
            '<p class="soft">Staleness: of the gradients that were applied, how many updates A had had since it was '
            "read for each; all rounds together. Busy: time in work and delay / training time, mean over the rounds; "
            "waiting is not busy.</p>"
        )
    yield from _swimlanes(section)
    if items := _notes(section):
        yield f"<h3>Notes</h3>{items}"


def figure_grid(drawings: Iterable[str | None]) -> str:
    """Return figures side by side, without those that are None."""
    elements = "".join(f"<figure>{drawing}</figure>" for drawing in drawings if drawing is not None)
    return f'<div class="grid">{elements}</div>'


def _name(group: StrategyRuns) -> str:
    """Return a strategy's label next to its colour."""
    line = {"-": "solid", "--": "dashed", ":": "dotted"}[group.dash]
    swatch = f'<span class="swatch" style="border-top-color:{group.colour};border-top-style:{line}"></span>'
    return swatch + escape(group.label)


def _strategies(section: Section) -> str:
    """Return the table of strategies: their full text, number and length of runs, and rates."""
    columns, lines = grid(_RUN_COLUMNS, _entries(section))
    titles = "".join(f"<th>{escape(column.title)}</th>" for column in columns)
    rows = [
        f'<tr><td>{_name(group)}</td><td class="text"><code>{escape(group.strategy)}</code></td>{_cells(line)}</tr>'
        for group, line in zip(section.groups, lines, strict=True)
    ]
    head = f'<thead><tr><th>strategy</th><th class="text">in full</th>{titles}</tr></thead>'
    caption = "Staleness: how many updates A had had since it was read for a gradient, when that was applied; the mean."
    return table(head, rows, caption)


def _results(section: Section) -> str:
    """Return the table of scores of each strategy, and of its differences from the baseline."""
    columns, lines = grid(REACHED, _entries(section))
    rows = [f"<tr><td>{_name(g)}</td>{_cells(line)}</tr>" for g, line in zip(section.groups, lines, strict=True)]
    spans = [(title, len(list(members))) for title, members in groupby(columns, key=lambda column: column.group)]
    top = "".join(f'<th class="group" colspan="{count}">{escape(title)}</th>' for title, count in spans)
    titles = "".join(f"<th>{escape(column.title)}</th>" for column in columns)
    head = f'<thead><tr><th class="group"></th>{top}</tr><tr><th>strategy</th>{titles}</tr></thead>'
    rounds = max(len(group.runs) for group in section.groups)
    caption = ["End: at the end; mean: over time, averaged over the whole interval of training by the trapezoid rule."]
    if rounds > 1:
        caption.append("All figures are means over the rounds.")
    if section.baseline is not None:
        against = next(group.label for group in section.groups if group.strategy == section.baseline)
        caption.append(f"Difference: of that mean, strategy minus {against}, accuracy in percentage points.")
        caption.append("Higher accuracy and lower loss are better.")
        if rounds > 1:
            caption.append("±: half a 95 % interval (Student's t, paired by round).")
    return table(head, rows, " ".join(caption))


# What a note is, where its key does not say it.
_LABELS = {
    NEEDS: "dependencies among the model's parts (0-1: part 1 needs what part 0 makes, and 0 its gradient; 0>1: "
    "without a gradient)"
}


def _notes(section: Section) -> str:
    """Return a list of events in single runs: replicas that left, interruptions, discarded gradients."""
    items: list[str] = []
    for group in section.groups:
        for number, run in enumerate(group.runs):
            label = escape(group.label) + (f", round {number + 1}" if len(group.runs) > 1 else "")
            for left in run.left:
                items.append(f"{label}: replica {left.replica} left after {left.time_s:.2f} s: {escape(left.reason)}.")
            if run.summary.get("interrupted"):
                items.append(f"{label}: interrupted after {run.summary.get('seconds') or 0:.2f} s.")
            if run.summary.get("nonfinite"):
                count = run.summary["nonfinite"]
                items.append(f"{label}: {count:,} gradients were not finite and were discarded.")
            if sentence := verdict(run.summary):
                items.append(f"{label}: {escape(sentence)}.")
            for key, note in (run.summary.get("notes") or {}).items():
                items.append(f"{escape(_LABELS.get(str(key), str(key)))}: {escape(str(note))}")
    return f"<ul>{''.join(f'<li>{item}</li>' for item in dict.fromkeys(items))}</ul>" if items else ""


def _entries(section: Section) -> list[Entry]:
    summaries = {group.strategy: [run.summary for run in group.runs] for group in section.groups}
    baseline = summaries.get(section.baseline or "", [])
    entries = []
    for group in section.groups:
        own = summaries[group.strategy]
        against = None if group.strategy == section.baseline else difference(own, baseline)
        entries.append(Entry(group.label, mean_summary(own), against, len(group.runs)))
    return entries


def _cells(line: Sequence[str]) -> str:
    return "".join(f"<td>{escape(cell)}</td>" for cell in line)


def table(head: str, rows: Sequence[str], caption: str) -> str:
    """Return a table of rows, which are elements, with a caption, which is a text."""
    body = f"{head}<tbody>{''.join(rows)}</tbody>"
    return f'<div class="wide"><table><caption>{escape(caption)}</caption>{body}</table></div>'


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
    return f'<figure class="lane"><figcaption>{_name(group)}</figcaption>{element}</figure>'


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

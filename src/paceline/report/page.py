"""The page: sections of tables and figures, in one file that needs no other."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from paceline.core.errors import InputError
from paceline.metrics.pipeline_step import PipelineStep, pipeline_step
from paceline.report import bars
from paceline.report.curves import curve
from paceline.report.sources import Group, Section, Source, sections
from paceline.report.stretch import REPLICAS, STEPS, swimlanes
from paceline.report.style import CSS
from paceline.report.tables import legend, name, notes, results, strategies
from paceline.run import Run
from paceline.trace.files import replacing
from paceline.trace.spans import Span

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
    drawn = [bars.staleness(section.groups), bars.utilisation(section.groups)]
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


def _pipelines(found: Sequence[tuple[Group, PipelineStep]]) -> Iterator[str]:
    if not found:
        return
    yield (
        '<p class="soft">Pipelines: one step, of median length, and below it what the schedule allows with the same '
        "compute and free communication and updates; numbers are micro-batches. Utilisation: compute / time of the "
        "steps; bubble: neither compute nor update; peak activations: the most that was kept for backward.</p>"
    )
    for group, step in found:
        yield _lane(group, step.svg())


def _stretches(found: Sequence[tuple[Group, Sequence[Span]]]) -> Iterator[str]:
    if not found:
        return
    yield (
        '<p class="soft">What each worker did, from the middle of a round: a lane a worker, time from left to right '
        f"since the first span; about {STEPS} steps, all strategies to one scale, at most {REPLICAS} replicas.</p>"
    )
    for (group, _), svg in zip(found, swimlanes([spans for _, spans in found]), strict=True):
        yield _lane(group, svg)


def _lane(group: Group, svg: str) -> str:
    return f'<figure class="lane"><figcaption>{name(group)}</figcaption>{svg}</figure>'


def _traced(group: Group) -> Run | None:
    return next((run for run in group.runs if run.spans), None)

"""The page: the paper's numbers beside ours, what was assumed, and what each assumption does."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, isnan
from pathlib import Path
from typing import Any

from cells import METRICS
from engine_sections import agreement, servers
from figures import BARS, CURVES, SAID, table_of, title
from protocol import ALGORITHMS, TABLES, Table
from sections import SCRIPT, Cells, assumptions_made, commands, engines, grid, protocol, sensitivity
from sensitivity import Effect
from server_sections import server_counts
from study import Study, tally
from tables import Entry


@dataclass(frozen=True)
class Sources:
    """What a page is made from.

    Args:
        study: gives the tables.
        effects: of the assumptions.
        sensitivity_rounds: rounds behind ``effects``.
        machine: what was measured, and where.
        folder: where the page, its figures and the CSV files lie.
    """

    study: Study
    effects: Sequence[Effect]
    sensitivity_rounds: int
    machine: Mapping[str, Mapping[str, Any]]
    folder: Path


def write(sources: Sources) -> Path:
    """``README.md`` in the folder."""
    sources.folder.mkdir(parents=True, exist_ok=True)
    path = sources.folder / "README.md"
    path.write_text(page(sources), encoding="utf-8")
    return path


def page(sources: Sources) -> str:
    """The text of the page; tables and figures whose runs are not all there are named as missing."""
    study = sources.study
    done = [table for table in TABLES.values() if study.complete(table)]
    parts = [
        _head(study, sources.machine),
        _signs(study, done),
        assumptions_made(study.assumptions),
        protocol(study),
        *(_table(study, table, sources.folder) for table in TABLES.values()),
        _disagreements(study, done),
        sensitivity(sources.effects, sources.sensitivity_rounds),
        engines(study, done, sources.folder),
        servers(sources.folder),
        agreement(sources.folder),
        server_counts(sources.folder),
        commands(study, sources.sensitivity_rounds),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(study: Study, machine: Mapping[str, Mapping[str, Any]]) -> str:
    said = machine.get("machine", {}).get("gradient_s", "an unknown machine")
    return (
        "# The Smooth Switch paper, table by table\n\n"
        "arXiv 2407.00101, section 7. A number is Smooth Switch minus asynchronous, averaged over the run; accuracy in "
        "points. Ours is the mean over rounds of paired differences ± half of its 95 % interval (Student's t).\n\n"
        f"- Assumptions: `{study.assumptions}`, for all tables alike.\n"
        f"- {_rounds(study)} of {study.seconds:g} s, {study.engine} engine.\n"
        f"- Gradients were timed on: {said}.\n"
        "- **CIFAR-10 is a JPEG copy of the data set, not the original pixels.**"
    )


def _rounds(study: Study) -> str:
    images = study.image_rounds or study.rounds
    apart = "" if images == study.rounds else f" ({images} on the image sets)"
    return f"{study.rounds} rounds{apart}"


def _signs(study: Study, done: Sequence[Table]) -> str:
    tallies = [(table, tally(study.entries(table))) for table in done]
    everything = tally(entry for table in done for entry in study.entries(table))
    rows = [(f"{t.number}: {title(t)}", str(n), str(n.against), str(study.diverged(t))) for t, n in tallies]
    whole = sum(len(values) for table in TABLES.values() for values in table.paper.values())
    share = f" ({100 * everything.agree / everything.entries:.0f} %)" if everything.entries else ""
    absent = [str(number) for number, table in TABLES.items() if table not in done]
    left_out = f" Tables without all of their runs, not counted: {', '.join(absent)}." if absent else ""
    return (
        "## Signs\n\n"
        f"**{everything}**{share} entries have the paper's sign; the five tables have {whole} in all.{left_out}\n\n"
        + grid(("table", "signs as in the paper", "clearly against it", "runs that diverged"), rows)
        + "\n\nClearly: the interval leaves 0 out."
        + _shape(study, done)
    )


def _shape(study: Study, done: Sequence[Table]) -> str:
    """Where table 4 has its peak, and what lies on either side, ours beside the paper's."""
    if TABLES[4] not in done:
        return ""
    mine = [entry for entry in study.entries(TABLES[4]) if entry.metric == "test_accuracy"]
    said = []
    for who, values in (("ours", [e.ours for e in mine]), ("the paper's", [e.paper for e in mine])):
        peak = max(range(len(mine)), key=values.__getitem__)
        places = [0] * (peak != 0) + [peak] + [len(mine) - 1] * (peak != len(mine) - 1)
        said.append(
            f"{who} {', '.join(f'{values[i]:+.3f} at {mine[i].label}' for i in places)}, most at {mine[peak].label}"
        )
    return f"\n\nThe shape of table 4, test accuracy in points: {'; '.join(said)}."


def _table(study: Study, table: Table, folder: Path) -> str:
    head = f"## Table {table.number}: {title(table)}\n\n"
    if not study.complete(table):
        return f"{head}Not all of its runs have been made: `{SCRIPT} --table {table.number}`."
    entries = study.entries(table)
    labels = [configuration.label for configuration in table.configurations]
    rows: list[Cells] = []
    for metric in METRICS:
        mine = [entry for entry in entries if entry.metric == metric]
        rows.append((f"{SAID[metric]}: paper", *(f"{entry.paper:+.3f}" for entry in mine)))
        rows.append(("ours", *(_ours(entry) for entry in mine)))
    files = f"[entries](table_{table.number}.csv), [runs](table_{table.number}_runs.csv)"
    marks = "✓ the paper's sign, ✗ the other; in brackets where the interval contains 0 or there is none"
    parts = [grid(("", *labels), rows), f"{marks}. CSV: {files}.", _averages(study, table), _pictures(table, folder)]
    return head + "\n\n".join(part for part in parts if part)


def _ours(entry: Entry) -> str:
    mark = "✓" if entry.agrees else "✗"
    return f"{difference(entry)} {mark if entry.clear else f'({mark})'}"


def difference(entry: Entry) -> str:
    """Ours with its interval; one whose losses overflowed has none."""
    if not isfinite(entry.ours):
        return "none" if isnan(entry.ours) else f"{'+' if entry.ours > 0 else '−'}∞"
    return f"{entry.ours:+.3f}" + ("" if isnan(entry.half_width) else f" ± {entry.half_width:.3f}")


def _interval(entry: Entry) -> str:
    if isnan(entry.half_width):
        return "there is no interval"
    return f"the interval {'leaves 0 out' if entry.clear else 'contains 0'}"


def _averages(study: Study, table: Table) -> str:
    """What the differences are of: each algorithm's accuracy."""
    by_column = [study.results(configuration) for configuration in table.configurations]
    rows = []
    for name in ALGORITHMS:
        columns = [[run.test_accuracy for run in results[name]] for results in by_column]
        rows.append((name, *(f"{sum(values) / len(values):.2f}" for values in columns)))
    return grid(("test accuracy, mean over time", *(c.label for c in table.configurations)), rows)


def _pictures(table: Table, folder: Path) -> str:
    there = [n for n in (*CURVES, *BARS) if table_of(n) is table and (folder / f"figure_{n}.png").exists()]
    return "\n\n".join(f"![Figure {n}](figure_{n}.png)\n\n[as SVG](figure_{n}.svg)" for n in there)


def _disagreements(study: Study, done: Sequence[Table]) -> str:
    lines = []
    for table in done:
        for entry in study.entries(table):
            if not entry.agrees:
                interval = _interval(entry)
                numbers = f"paper {entry.paper:+.3f}, ours {difference(entry)}"
                where = f"table {table.number}, {entry.label}, {SAID[entry.metric].partition(',')[0]}"
                lines.append(f"- {where}: {numbers}; {interval}")
    return "## Entries with the other sign\n\n" + ("\n".join(lines) or "None.")

"""CSV files: each table's entries, and the means of every run behind them."""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cells import METRICS
from protocol import Table
from study import Study

Row = dict[str, Any]


def write_table(study: Study, table: Table, folder: Path) -> None:
    """``table_N.csv``, an entry a row, and ``table_N_runs.csv``, a run a row."""
    write(folder / f"table_{table.number}.csv", list(_entries(study, table)))
    write(folder / f"table_{table.number}_runs.csv", list(runs(study, table)))


def write(path: Path, rows: Sequence[Row]) -> None:
    """A CSV file with a header."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _setting(study: Study, table: Table) -> Row:
    return {
        "engine": study.engine,
        "workers": study.assumptions.workers,
        "seconds": f"{study.seconds:g}",
        "rounds": study.rounds_of(table.configurations[0]),
        "assumptions": str(study.assumptions),
    }


def _entries(study: Study, table: Table) -> Iterator[Row]:
    for entry in study.entries(table):
        yield {
            "metric": entry.metric,
            "label": entry.label,
            "paper": entry.paper,
            "ours": f"{entry.ours:.6g}",
            "half_width": f"{entry.half_width:.6g}",
            "agrees": entry.agrees,
            "clear": entry.clear,
        } | _setting(study, table)


def runs(study: Study, table: Table) -> Iterator[Row]:
    """The means of every run."""
    for configuration in table.configurations:
        for algorithm, results in study.results(configuration).items():
            for number, result in enumerate(results):
                means = {metric: f"{getattr(result, metric):.6g}" for metric in METRICS}
                counts = {"updates": result.updates, "gradients": result.gradients, "diverged": result.diverged}
                head = {"label": configuration.label, "algorithm": algorithm, "round": number}
                yield head | means | counts | _setting(study, table)

"""Does Smooth Switch still pay where A is in slices, each with a server of its own? Tables on Ray, runs in turn."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import nan
from statistics import fmean

from cells import Cell, Result
from processor_time import FIGURES
from protocol import Table
from sheets import Row, runs
from study import COMPARED, Study
from tables import BASELINE, SWITCH, paired

SHEET = "servers.csv"

Kept = Mapping[str, str]
"""A row of the sheet."""


def in_turn(studies: Sequence[Study], tables: Sequence[Table]) -> Iterator[Cell]:
    """Every run, so that the host's load changes little between those that are compared.

    ::

        round 0    table 1: servers=1, servers=4     table 2: servers=4, servers=1
        round 1    table 1: servers=4, servers=1     table 2: servers=1, servers=4

    Within one number of servers the algorithms alternate, batch size by batch size; in odd rounds backwards.
    """
    for number in range(max(study.rounds_of(table.configurations[0]) for study in studies for table in tables)):
        for place, table in enumerate(tables):
            for study in studies[:: -1 if (number + place) % 2 else 1]:
                yield from list(dict.fromkeys(_round(study, table, number)))[:: -1 if number % 2 else 1]


def _round(study: Study, table: Table, number: int) -> Iterator[Cell]:
    for configuration in sorted(table.configurations, key=lambda configuration: configuration.batch_size):
        for runs_of_one in study.cells(configuration).values():
            yield from runs_of_one[number : number + 1]


def disturbed(studies: Sequence[Study], tables: Sequence[Table], cores: float) -> list[Cell]:
    """Return the runs of the algorithms that are compared in which other programs had more than so many cores.

    Synchronous training leaves cores idle, which other programs may have without disturbing it.
    """
    configurations = [configuration for table in tables for configuration in table.configurations]
    wanted = [cell for study in studies for cell in study.needed(configurations, COMPARED)]
    return [cell for cell in dict.fromkeys(wanted) if studies[0].store[cell].usage.get("other_cores", 0.0) > cores]


def rows(studies: Sequence[Study], tables: Sequence[Table], other_cores: float) -> Iterator[Row]:
    """For the CSV file: a run a row; one that two configurations share stands under both.

    Args:
        studies: one of each number of servers.
        tables: whose runs have been made.
        other_cores: from how many cores of other programs on a run was made again.
    """
    limit = {"other_cores_limit": f"{other_cores:g}"}
    for table, study in product(tables, studies):
        of_table = {"table": table.number, "servers": study.servers}
        results = [study.results(configuration) for configuration in table.configurations]
        in_order = [one for by_name in results for made in by_name.values() for one in made]
        points = study.cells(table.configurations[0])[BASELINE][0].points
        for row, result in zip(runs(study, table), in_order, strict=True):
            yield of_table | row | {"points": points} | limit | _measured(result)


def _measured(result: Result) -> Row:
    """What this benchmark alone looks at; empty in a run that diverged."""
    thresholds = result.curve["threshold"]
    last = {"last_threshold": f"{thresholds[-1]:g}" if thresholds else ""}
    return last | {name: f"{result.usage[name]:.4g}" if name in result.usage else "" for name in FIGURES}


@dataclass(frozen=True)
class Gains:
    """Smooth Switch minus asynchronous in one metric, of one table and one number of servers."""

    by_label: Mapping[str, Sequence[float]]
    """Configuration -> round by round."""

    @classmethod
    def of(cls, rows: Sequence[Kept], metric: str) -> "Gains":
        """Those of a sheet's rows, all of one table and one number of servers."""
        found = {(row["label"], row["algorithm"], int(row["round"])): float(row[metric]) for row in rows}
        labels = dict.fromkeys(row["label"] for row in rows)
        numbers = sorted({number for _, _, number in found})
        return cls({x: [found[x, SWITCH, n] - found[x, BASELINE, n] for n in numbers] for x in labels})

    def minus(self, other: "Gains") -> "Gains":
        """Return what this has more than the other, paired by round."""
        pairs = {label: zip(self.by_label[label], other.by_label[label], strict=True) for label in self.by_label}
        return Gains({label: [mine - theirs for mine, theirs in both] for label, both in pairs.items()})

    def columns(self) -> list[tuple[float, float]]:
        """Return mean and half of the 95 % interval over rounds of each configuration, then of the mean of all.

        Configurations of a round share asynchronous runs, so that the last is taken over rounds, not over all runs.
        """
        together = [fmean(values) for values in zip(*self.by_label.values(), strict=True)]
        return [paired(values) for values in (*self.by_label.values(), together)]


@dataclass(frozen=True)
class Load:
    """What the runs of one algorithm, in one table with one number of servers, did and had of the host; means."""

    gradients: float
    """A second, of all workers."""
    updates: float
    """A second."""
    accuracy: float
    threshold: float
    """K at the end."""
    usage: Mapping[str, float]
    """By :data:`~processor_time.FIGURES`; not a number where nothing was measured."""

    @classmethod
    def of(cls, rows: Sequence[Kept]) -> "Load":
        """That of a sheet's rows."""
        gradients, updates = (
            fmean(int(row[name]) / float(row["seconds"]) for row in rows) for name in ("gradients", "updates")
        )
        measured = {name: [float(row[name]) for row in rows if row[name]] for name in FIGURES}
        usage = {name: fmean(values) if values else nan for name, values in measured.items()}
        accuracy = fmean(float(row["test_accuracy"]) for row in rows)
        thresholds = [float(row["last_threshold"]) for row in rows if row["last_threshold"]]
        return cls(gradients, updates, accuracy, fmean(thresholds) if thresholds else nan, usage)

    @property
    def server_s(self) -> float:
        """Processor time of all servers for a Δ."""
        return self.usage["server_cores"] / self.gradients


def by_servers(rows: Sequence[Kept]) -> dict[str, dict[int, list[Kept]]]:
    """Table -> number of servers -> the rows, in the order of the sheet."""
    found: dict[str, dict[int, list[Kept]]] = {}
    for row in rows:
        found.setdefault(row["table"], {}).setdefault(int(row["servers"]), []).append(row)
    return found

"""Does Smooth Switch still pay where A is in slices, each with a server of its own? Tables on Ray, runs in turn."""

from collections.abc import Iterator, Sequence

from cells import Cell
from processor_time import FIGURES
from protocol import ALGORITHMS, Table
from sheets import Row, runs
from study import Study

SHEET = "servers.csv"


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


def rows(studies: Sequence[Study], tables: Sequence[Table]) -> Iterator[Row]:
    """For the CSV file: a run a row; one that two configurations share stands under both."""
    for table in tables:
        for study in studies:
            points = study.cells(table.configurations[0])[ALGORITHMS[0]][0].points
            head = {"table": table.number, "servers": study.servers}
            for row in runs(study, table):
                yield head | row | {"points": points} | {name: row.get(name, "") for name in FIGURES}

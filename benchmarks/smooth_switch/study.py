"""A study: the paper's tables under one reading of it, on one engine, out of one store."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import isfinite, nan

from assumptions import Assumptions
from cells import METRICS, Cell, Result, Store
from measured import compute_s
from protocol import ALGORITHMS, IMAGES, ROUNDS, Configuration, Table
from tables import BASELINE, SWITCH, Compute, Entry, cells, paired

DEFAULTS = Assumptions()

COMPARED = (BASELINE, SWITCH)
"""The algorithms whose difference the tables are about."""


@dataclass(frozen=True)
class Study:
    """Which runs the tables need, and what came out of those that were made.

    Args:
        store: where the runs lie.
        assumptions: one reading of the paper.
        rounds: runs of each configuration and algorithm.
        engine: ``virtual``, or one that measures time itself: then server and compute times are what they are there.
        seconds: the length of a run.
        compute: seconds of a gradient in virtual time.
        image_rounds: as ``rounds``, on the image sets, whose runs take a hundred times as long; None: the same.
        servers: of A in each run on Ray; 0: the engine's own choice.
        points: evaluations of a run beside the one at its start; None: as many as in the tables.
    """

    store: Store
    assumptions: Assumptions = DEFAULTS
    rounds: int = ROUNDS
    engine: str = "virtual"
    seconds: float = 100.0
    compute: Compute = compute_s
    image_rounds: int | None = None
    servers: int = 0
    points: int | None = None

    def on(self, cell: Cell) -> Cell:
        """The cell on this study's engine, for this study's time."""
        times = cell.times if self.engine == "virtual" else ""
        points = self.points or cell.points
        return replace(cell, engine=self.engine, times=times, seconds=self.seconds, servers=self.servers, points=points)

    def rounds_of(self, configuration: Configuration) -> int:
        """Runs of this configuration and each algorithm."""
        own = self.image_rounds if configuration.dataset in IMAGES else None
        return own or self.rounds

    def cells(self, configuration: Configuration) -> dict[str, list[Cell]]:
        """The runs of a configuration by algorithm, round by round."""
        made = cells(configuration, self.assumptions, self.compute, self.rounds_of(configuration))
        return {name: [self.on(cell) for cell in runs] for name, runs in made.items()}

    def needed(self, configurations: Sequence[Configuration], algorithms: Sequence[str] = ALGORITHMS) -> list[Cell]:
        """Every run of them, round after round: what is there first is a whole table of fewer rounds."""
        made = [self.cells(configuration) for configuration in configurations]
        chosen = [by_name[name] for by_name in made for name in algorithms]
        most = max((len(runs) for runs in chosen), default=0)
        return [runs[number] for number in range(most) for runs in chosen if number < len(runs)]

    def complete(self, table: Table, algorithms: Sequence[str] = ALGORITHMS) -> bool:
        """Whether every run of a table has been made."""
        return all(self.store.known(cell) for cell in self.needed(table.configurations, algorithms))

    def results(self, configuration: Configuration, algorithms: Sequence[str] = ALGORITHMS) -> dict[str, list[Result]]:
        """What the runs of a configuration gave, by algorithm, round by round."""
        made = self.cells(configuration)
        return {name: [self.store[cell] for cell in made[name]] for name in algorithms}

    def entries(self, table: Table) -> list[Entry]:
        """The table's numbers, row by row."""
        runs = [self.results(configuration, COMPARED) for configuration in table.configurations]
        return [
            Entry(metric, configuration.label, table.paper[metric][column], *_difference(metric, runs[column]))
            for metric in METRICS
            for column, configuration in enumerate(table.configurations)
        ]

    def diverged(self, table: Table, algorithms: Sequence[str] = ALGORITHMS) -> int:
        """How many of a table's runs diverged."""
        return sum(self.store[cell].diverged for cell in self.needed(table.configurations, algorithms))


def _difference(metric: str, runs: dict[str, list[Result]]) -> tuple[float, float]:
    """Smooth Switch minus asynchronous, and half the width of the interval.

    A loss can overflow in a run that goes on: the difference is infinite then, and where it did so on both sides none.
    """
    pairs = zip(runs[SWITCH], runs[BASELINE], strict=True)
    found = [getattr(ours, metric) - getattr(theirs, metric) for ours, theirs in pairs]
    endless = {difference for difference in found if not isfinite(difference)}
    if not endless:
        return paired(found)
    return (endless.pop() if len(endless) == 1 else nan), nan


@dataclass(frozen=True)
class Tally:
    """How many entries have the paper's sign."""

    entries: int
    agree: int
    against: int
    """Have the other sign, by an interval that leaves 0 out."""

    def __str__(self) -> str:
        return f"{self.agree} of {self.entries}"


def tally(found: Iterable[Entry]) -> Tally:
    """Count signs."""
    signs = [(entry.agrees, entry.clear) for entry in found]
    return Tally(len(signs), sum(same for same, _ in signs), sum(clear and not same for same, clear in signs))

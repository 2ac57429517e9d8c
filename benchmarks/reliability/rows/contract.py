"""What a row of the scorecard is: trials that disturb real processes, numbers to pass, and what came of it.

A file of this folder adds rows, and what others do under the same disturbance::

    @row("kill", trials=100)
    def kill_a_worker(trials: int) -> Outcome: ...

    @compared("kill", DDP)
    def ddp_loses_a_rank(trials: int) -> Observed: ...
"""

from collections.abc import Callable
from dataclasses import dataclass, field

DDP, TORCHFT, RAY_TRAIN = "DDP on Gloo", "torchft", "Ray Train"
"""Those that rows are compared with; the page has a column for each."""


@dataclass
class Outcome:
    """What came of a row's trials.

    Args:
        row: its number in the scorecard.
        title: what is done.
        passes: the numbers to pass, in words.
        failures: what each trial that missed one of them did.
        unnamed: what was said in trials after which no message told process, step and cause; where everything goes on
            by itself, the summary's list of exits is that message.
    """

    row: str
    title: str
    passes: str
    trials: int = 0
    failures: list[str] = field(default_factory=list[str])
    unnamed: list[str] = field(default_factory=list[str])
    figures: dict[str, float] = field(default_factory=dict[str, float])

    def trial(self, failure: str | None, *, named: bool = True, said: str = "") -> None:
        """Count a trial.

        Args:
            failure: the number that was missed; None: it passed.
            named: whether what happened was told with process, step and cause.
            said: what was told instead.
        """
        self.trials += 1
        if failure is not None:
            self.failures.append(failure)
        if not named:
            self.unnamed.append(said[-300:])


@dataclass
class Observed:
    """What another system did under a row's disturbance.

    Args:
        trials: how often it was tried; 0: it could not be.
        told: what happened, in words.
        figures: median times and counts.
    """

    trials: int
    told: str
    figures: dict[str, float] = field(default_factory=dict[str, float])


@dataclass
class Row:
    """One row.

    Args:
        run: makes so many trials.
        trials: how many the scorecard asks for; of those that last a time, seconds.
        stated: how many an outcome must have for its points.
        others: comparators by name, likewise, each with a number of trials.
    """

    run: Callable[[int], Outcome]
    trials: int
    stated: int
    others: dict[str, tuple[Callable[[int], Observed], int]] = field(
        default_factory=dict[str, tuple[Callable[[int], Observed], int]]
    )


ROWS: dict[str, Row] = {}
"""Name on the command line -> the row."""

_OTHERS: dict[str, dict[str, tuple[Callable[[int], Observed], int]]] = {}


def row(
    name: str, *, trials: int, stated: int | None = None
) -> Callable[[Callable[[int], Outcome]], Callable[[int], Outcome]]:
    """Return a decorator that adds a row."""

    def add(run: Callable[[int], Outcome]) -> Callable[[int], Outcome]:
        if name in ROWS:
            raise ValueError(
                f"two rows are called {name}: {ROWS[name].run.__module__} has one, {run.__module__} another"
            )
        ROWS[name] = Row(run, trials, trials if stated is None else stated, _OTHERS.setdefault(name, {}))
        return run

    return add


def compared(
    name: str, other: str, *, trials: int = 5
) -> Callable[[Callable[[int], Observed]], Callable[[int], Observed]]:
    """Return a decorator that adds what another system does under the disturbance of a row."""

    def add(run: Callable[[int], Observed]) -> Callable[[int], Observed]:
        _OTHERS.setdefault(name, {})[other] = run, trials
        return run

    return add


def percentile(values: list[float], share: float) -> float:
    """Return the smallest value that so large a share of them does not exceed.

    >>> percentile([3.0, 1.0, 2.0, 4.0], 0.5)
    2.0
    """
    return sorted(values)[max(0, -(-len(values) * round(share * 100) // 100) - 1)]


def times(values: list[float], name: str) -> dict[str, float]:
    """Return the median, the 95th percentile and the longest of some times in seconds; {} if there are none."""
    if not values:
        return {}
    return {
        f"{name}_median_s": percentile(values, 0.5),
        f"{name}_p95_s": percentile(values, 0.95),
        f"{name}_longest_s": max(values),
    }

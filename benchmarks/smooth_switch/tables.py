"""A table of the paper, measured: differences with their intervals, and whether their signs agree."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from assumptions import Assumptions
from cells import Cell
from protocol import ALGORITHMS, Configuration
from scipy.stats import t as student

BASELINE, SWITCH = ALGORITHMS[1], ALGORITHMS[2]

Compute = Callable[[str, int], float]
"""(data set, batch size) -> seconds of a gradient."""


@dataclass(frozen=True)
class Entry:
    """One number of a table."""

    metric: str
    label: str
    paper: float
    ours: float
    half_width: float
    """Of the 95 % interval over rounds (Student's t of paired differences); not a number with one round."""

    @property
    def agrees(self) -> bool:
        """Whether both lie on one side of 0; one without a number lies on none."""
        return self.paper * self.ours > 0 or self.paper == self.ours == 0

    @property
    def clear(self) -> bool:
        """Whether the interval leaves 0 out."""
        return abs(self.ours) > self.half_width


def paired(differences: Sequence[float]) -> tuple[float, float]:
    """The mean of paired differences, and half the width of its 95 % interval."""
    n = len(differences)
    if n < 2 or not all(map(math.isfinite, differences)):
        return fmean(differences), math.nan
    return fmean(differences), float(student.ppf(0.975, n - 1)) * stdev(differences) / math.sqrt(n)


def cells(
    configuration: Configuration, assumptions: Assumptions, compute: Compute, rounds: int
) -> dict[str, list[Cell]]:
    """The runs of a configuration by algorithm, round by round."""
    seconds = compute(configuration.dataset, configuration.batch_size)
    return {
        name: [configuration.cell(policy, number, assumptions, seconds) for number in range(rounds)]
        for name, policy in configuration.policies(assumptions).items()
    }

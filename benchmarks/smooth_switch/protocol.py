"""The paper's tables as configurations of runs (arXiv 2407.00101, section 7)."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from assumptions import Assumptions
from cells import POINTS, Cell
from data import RANDOM

ROUNDS = 5
"""Rounds of each configuration; round r starts from seed r."""

IMAGE_POINTS = 20
"""Evaluations of a run on an image set: its test set takes as long as 300 gradients."""

IMAGES = ("mnist", "cifar10")
"""Sets of images, whose pixels may be scaled one way or another."""

ALGORITHMS = ("synchronous", "asynchronous", "smooth-switch")
"""The names in figures and tables."""


@dataclass(frozen=True)
class Configuration:
    """One column of a table."""

    label: str
    dataset: str
    every: float
    """Step size of the threshold, in gradients."""
    batch_size: int
    std: float = 0.25
    """Of the delays, in seconds."""
    sample: int = 0
    """Seed of the random data: newly drawn for each configuration."""

    def cell(self, policy: str, number: int, assumptions: Assumptions, compute_s: float) -> Cell:
        """One run of it in virtual time."""
        random = self.dataset == RANDOM
        return Cell(
            dataset=self.dataset,
            policy=policy,
            batch_size=self.batch_size,
            rate=assumptions.learning_rate(self.batch_size),
            delay=assumptions.delay(self.std),
            times=assumptions.times(compute_s),
            sample=self.sample,
            hidden=assumptions.hidden if random else Cell.hidden,
            clusters=assumptions.clusters if random else Cell.clusters,
            pixels=assumptions.pixels if self.dataset in IMAGES else Cell.pixels,
            round=number,
            workers=assumptions.workers,
            points=POINTS if random else IMAGE_POINTS,
        )

    def policies(self, assumptions: Assumptions) -> dict[str, str]:
        """The three algorithms, by name."""
        switch = assumptions.smooth_switch(self.every)
        return dict(zip(ALGORITHMS, (assumptions.synchronous(), "asynchronous", switch), strict=True))


@dataclass(frozen=True)
class Table:
    """One of the paper's tables: what its columns are, and what it says."""

    number: int
    title: str
    configurations: tuple[Configuration, ...]
    paper: Mapping[str, tuple[float, ...]]
    """Metric -> Smooth Switch minus asynchronous, averaged over the interval; accuracy in points."""
    figures: tuple[int, ...]
    """Figures that show the same runs."""


def _images(dataset: str) -> tuple[Configuration, ...]:
    return tuple(Configuration(f"({e}, {b})", dataset, e, b) for e in (300, 500) for b in (32, 64))


def _random(
    labels: tuple[str, ...], make: Callable[[int], tuple[float, int, float]], first: int
) -> Iterator[Configuration]:
    for i, label in enumerate(labels):
        every, batch_size, std = make(i)
        yield Configuration(label, RANDOM, every, batch_size, std, first + i)


_BATCHES, _MULTIPLES, _STDS = (8, 16, 32, 64, 128), (1, 3, 5, 7, 10), (0.25, 0.5, 0.75, 1.0, 1.25)

TABLES = {
    table.number: table
    for table in (
        Table(
            1,
            "MNIST",
            _images("mnist"),
            {
                "test_accuracy": (1.374, -0.516, 1.366, 1.291),
                "test_loss": (-0.047, 0.001, -0.053, -0.022),
                "train_loss": (-0.047, -0.001, -0.054, -0.023),
            },
            (4, 5),
        ),
        Table(
            2,
            "CIFAR-10",
            _images("cifar10"),
            {
                "test_accuracy": (4.849, 2.435, 3.468, 2.884),
                "test_loss": (-0.137, -0.066, -0.092, -0.080),
                "train_loss": (-0.139, -0.067, -0.091, -0.082),
            },
            (6, 7),
        ),
        Table(
            3,
            "batch sizes",
            tuple(_random(tuple(str(b) for b in _BATCHES), lambda i: (500, _BATCHES[i], 0.25), 300)),
            {
                "test_accuracy": (4.896, 5.183, 4.222, 3.304, 2.599),
                "test_loss": (-0.141, -0.141, -0.117, -0.089, -0.072),
                "train_loss": (-0.143, -0.141, -0.114, -0.088, -0.068),
            },
            (8,),
        ),
        Table(
            4,
            "step sizes",
            tuple(_random(tuple(f"{c}/lr" for c in _MULTIPLES), lambda i: (100 * _MULTIPLES[i], 32, 0.25), 400)),
            {
                "test_accuracy": (0.136, 3.857, 3.915, 3.083, 2.967),
                "test_loss": (-0.016, -0.110, -0.118, -0.084, -0.074),
                "train_loss": (-0.013, -0.110, -0.121, -0.079, -0.075),
            },
            (9,),
        ),
        Table(
            5,
            "delays",
            tuple(_random(tuple(f"(0, {std:g})" for std in _STDS), lambda i: (500, 32, _STDS[i]), 500)),
            {
                "test_accuracy": (3.915, 1.920, 3.012, 2.879, 5.184),
                "test_loss": (-0.117, -0.035, -0.081, -0.079, -0.156),
                "train_loss": (-0.120, -0.039, -0.079, -0.075, -0.166),
            },
            (10,),
        ),
    )
}
"""By number."""

"""The map of regimes: where does which threshold win?"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from assumptions import Assumptions
from cells import Cell
from data import RANDOM
from protocol import Configuration

SMOOTH = {f"{c}/lr": f"smooth-switch:every={100 * c}" for c in (1, 3, 5, 7, 10)}
"""The paper's five step sizes, at its learning rate of 0.01."""

CANDIDATES = {"synchronous": "synchronous", "asynchronous": "asynchronous"} | SMOOTH
"""Among these the best is chosen afterwards, for each regime by itself; the adaptive threshold is held against it."""

OTHERS = {
    "linear": "smooth-switch:threshold=linear",
    "exponential": "smooth-switch:threshold=exponential",
    "loss-driven": "smooth-switch:threshold=loss-driven",
    "buffered 12": "buffered:k=12",
}

ADAPTIVE = {"adaptive": "smooth-switch:adaptive"}

ALL = CANDIDATES | OTHERS | ADAPTIVE

COMPUTE_S = 0.1
"""Seconds of a gradient on the map: the server's times below are fractions of it."""

SERVERS = {
    "free": (0.0, 0.0),
    "0.04 an update": (0.004, 0.0),
    "0.16 an update": (0.016, 0.0),
    "0.05 + 0.03 K": (0.005, 0.003),
}
"""Server time in units of a gradient's -> (seconds an update, seconds a gradient)."""

STDS = (0.0, 0.25, 1.0)
"""Of the delays, in seconds."""

RATES = {"0.01": 0.01, "0.05": 0.05, "0.01, loss summed": 0.32}
"""Learning rates of the mean loss; summed over a batch of 32 it is 32 times as large."""


def combined(policy: str, combine: str) -> str:
    """The policy's text with its combine, where it has one."""
    if policy == "asynchronous":
        return policy
    return f"{policy}{',' if ':' in policy else ':'}combine={combine}"


@dataclass(frozen=True)
class Regime:
    """One place of the map, or one configuration of a table."""

    group: str
    label: str
    combine: str
    cell: Cell
    """Its runs, but for policy and round."""

    def runs(self, policy: str, rounds: int) -> list[Cell]:
        """The cells of a policy."""
        text = combined(policy, self.combine)
        return [replace(self.cell, policy=text, round=number) for number in range(rounds)]


def the_map() -> Iterator[Regime]:
    """Server time × learning rate and loss reduction × combine × delay."""
    for i, (server, rate, combine, std) in enumerate(product(SERVERS, RATES, ("sum", "mean"), STDS)):
        apply_s, gradient_s = SERVERS[server]
        assumed = Assumptions(apply_s=apply_s, gradient_s=gradient_s, compute_s=COMPUTE_S, combine=combine)
        made = Configuration("", RANDOM, 500, 32, std, 700 + i).cell("", 0, assumed, COMPUTE_S)
        yield Regime(
            "map", f"server {server} | lr {rate} | {combine} | N(0, {std:g})", combine, replace(made, rate=RATES[rate])
        )


def future_work() -> Iterator[Regime]:
    """What the paper names as its future: another architecture, another loss, more data; under its own assumptions."""
    made = Configuration("", RANDOM, 500, 32, 0.25, 800).cell("", 0, Assumptions(compute_s=0.002), 0.002)
    for label, change in {
        "linear model": {"hidden": 0},
        "4 layers of 64": {"layers": 4},
        "1 layer of 512": {"hidden": 512},
        "multi-margin loss": {"loss": "multi-margin"},
        "100,000 samples": {"samples": 100_000},
    }.items():
        yield Regime("future work", label, "sum", replace(made, **change))


def random_tables(compute_s: dict[str, float]) -> Iterator[Regime]:
    """The configurations of tables 3 to 5, which share many."""
    for batch_size in (8, 16, 32, 64, 128):
        yield _of_table(RANDOM, batch_size, 0.25, 320 + batch_size, compute_s)
    for std in (0.5, 0.75, 1.0, 1.25):
        yield _of_table(RANDOM, 32, std, 500 + round(100 * std), compute_s)


def image_tables(compute_s: dict[str, float]) -> Iterator[Regime]:
    """Those of tables 1 and 2."""
    for dataset, batch_size in product(("mnist", "cifar10"), (32, 64)):
        yield _of_table(dataset, batch_size, 0.25, 0, compute_s)


def held_out() -> Iterator[Regime]:
    """A data set that the adaptive threshold was not designed on: scikit-learn's digits."""
    for (server, (apply_s, gradient_s)), combine, std in product(SERVERS.items(), ("sum", "mean"), (0.25, 1.0)):
        assumed = Assumptions(apply_s=apply_s, gradient_s=gradient_s, compute_s=COMPUTE_S, combine=combine)
        made = Configuration("", "digits", 500, 32, std).cell("", 0, assumed, COMPUTE_S)
        for rate, value in RATES.items():
            label = f"digits | server {server} | lr {rate} | {combine} | N(0, {std:g})"
            yield Regime("held out", label, combine, replace(made, rate=value, points=50))


def _of_table(dataset: str, batch_size: int, std: float, sample: int, compute_s: dict[str, float]) -> Regime:
    seconds = compute_s[f"{dataset}/{batch_size}"]
    made = Configuration("", dataset, 500, batch_size, std, sample).cell("", 0, Assumptions(), seconds)
    return Regime("tables", f"{dataset}, batch {batch_size}, N(0, {std:g})", "sum", made)

"""Which strategy won where, and what the adaptive threshold would have cost instead."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from cells import Result, Store
from regimes import ADAPTIVE, ALL, CANDIDATES, Regime
from sheets import Row, read

TARGET = 0.95
"""Of the highest accuracy that any strategy reached in a regime: the time to it is what is compared."""

FIXED = "5/lr"
"""The step size that the paper recommends."""


@dataclass(frozen=True)
class Standing:
    """One strategy in one regime, over all rounds."""

    accuracy: float
    """Averaged over the interval and the rounds, in points."""
    highest: float
    """Of the mean curve."""
    to_target_s: float
    """Infinite where the target was not reached."""
    diverged: int
    """Rounds that did."""


@dataclass(frozen=True)
class Contest:
    """All strategies in one regime."""

    regime: Regime
    standings: dict[str, Standing]

    @property
    def best(self) -> str:
        """The candidate with the highest time-averaged accuracy, chosen afterwards."""
        return max((n for n in CANDIDATES if n in self.standings), key=lambda name: self.standings[name].accuracy)

    def winner(self, names: Iterable[str]) -> str:
        """The best of these by time-averaged accuracy."""
        return max((n for n in names if n in self.standings), key=lambda name: self.standings[name].accuracy)

    def first(self, names: Iterable[str]) -> str | None:
        """The first of these to reach the target; None where none did."""
        name = min((n for n in names if n in self.standings), key=lambda name: self.standings[name].to_target_s)
        return name if math.isfinite(self.standings[name].to_target_s) else None

    @property
    def regret(self) -> float:
        """Points of time-averaged accuracy that the adaptive threshold is behind the best; below 0 where ahead."""
        return self.standings[self.best].accuracy - self._adaptive

    @property
    def gain(self) -> float:
        """Points that it is ahead of the recommended step."""
        return self._adaptive - self.standings[FIXED].accuracy

    @property
    def _adaptive(self) -> float:
        return self.standings[next(iter(ADAPTIVE))].accuracy


def contest(regime: Regime, rounds: int, store: Store) -> Contest | None:
    """The regime's standings; None where the runs have not all been made. Strategies that were not run are left out."""
    runs = {name: regime.runs(policy, rounds) for name, policy in ALL.items()}
    made = {name: [store[cell] for cell in cells] for name, cells in runs.items() if all(map(store.known, cells))}
    if not {*CANDIDATES, *ADAPTIVE} <= made.keys():
        return None
    curves = {name: _curve(results) for name, results in made.items()}
    target = TARGET * max((value for curve in curves.values() for _, value in curve), default=0.0)
    return Contest(regime, {name: _standing(made[name], curves[name], target) for name in made})


def sheet_rows(group: str, contests: Iterable[Contest], rounds: int) -> Iterator[Row]:
    """For the CSV file: a strategy of a regime each."""
    for made in contests:
        for name, standing in made.standings.items():
            yield {
                "group": group,
                "regime": made.regime.label,
                "strategy": name,
                "test_accuracy_mean": f"{standing.accuracy:.4f}",
                "highest": f"{standing.highest:.4f}",
                "to_target_s": "" if math.isinf(standing.to_target_s) else f"{standing.to_target_s:g}",
                "diverged": standing.diverged,
                "rounds": rounds,
            }


def kept(path: Path, groups: Mapping[str, Sequence[Regime]]) -> dict[tuple[str, str, int], Contest]:
    """The contests of a CSV file, by group, regime and rounds: where a cache has gone, its results need not."""
    found: dict[tuple[str, str, int], dict[str, Standing]] = defaultdict(dict)
    for row in read(path) if path.exists() else []:
        found[row["group"], row["regime"], int(row["rounds"])][row["strategy"]] = Standing(
            accuracy=float(row["test_accuracy_mean"]),
            highest=float(row["highest"]),
            to_target_s=float(row["to_target_s"] or math.inf),
            diverged=int(row["diverged"]),
        )
    known = {(group, regime.label): regime for group, regimes in groups.items() for regime in regimes}
    return {key: Contest(known[key[:2]], standings) for key, standings in found.items() if key[:2] in known}


def _standing(results: Sequence[Result], curve: Sequence[tuple[float, float]], target: float) -> Standing:
    return Standing(
        accuracy=fmean(result.test_accuracy for result in results),
        highest=max((value for _, value in curve), default=0.0),
        to_target_s=next((time_s for time_s, value in curve if value >= target), math.inf),
        diverged=sum(result.diverged for result in results),
    )


def _curve(results: Sequence[Result]) -> list[tuple[float, float]]:
    """Mean accuracy over rounds at each evaluation; none where a round diverged."""
    if any(result.diverged for result in results):
        return []
    rounds = [zip(r.curve["time_s"], r.curve["test_accuracy"], strict=True) for r in results]
    return [(points[0][0], fmean(value for _, value in points)) for points in zip(*rounds, strict=True)]


@dataclass(frozen=True)
class Regrets:
    """Over a group of regimes."""

    regimes: int
    mean: float
    percentile_95: float
    worst: float
    gain: float
    """Mean points ahead of the recommended step."""

    @classmethod
    def of(cls, contests: Sequence[Contest]) -> "Regrets":
        values = sorted(c.regret for c in contests)
        rank = max(0, math.ceil(0.95 * len(values)) - 1)
        return cls(len(values), fmean(values), values[rank], values[-1], fmean(c.gain for c in contests))

"""The server's time of an update of K gradients, a + c·K, fitted on this host with 25 workers that keep it busy.

::

    workers     push push push ....           (none is delayed: a Δ is always waiting)
    server      |-- K Δs, update --|-- K Δs, update --|-- K Δs, update --|
                                   |<---- period ---->|  =  a + c·K

Workers and server share the cores of this host, so the period holds the processor time of both: it is what one more
gradient costs the run, which is what virtual time needs of it. Virtual time itself knows no cores.
"""

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
from data import RANDOM, program
from scipy.optimize import nnls
from sheets import Row, read

from paceline import Program, train
from paceline.api.train import open_engine
from paceline.core.records import Record
from paceline.core.types import Seconds
from paceline.engine.base import Engine

ENGINES = ("local", "ray")

SIZES = (1, 2, 3, 5, 8, 12, 18, 25)
"""Gradients in an update."""

WORKERS, REPEATS = 25, 3

WARM_UP_S: Seconds = 2.0
WINDOW_S: Seconds = 6.0

SHEET = "server.csv"


@dataclass(frozen=True)
class Server:
    """An update of K gradients takes ``apply_s + K * gradient_s``.

    >>> Server(apply_s=0.002, gradient_s=0.001).period_s(8)
    0.01
    """

    apply_s: Seconds
    gradient_s: Seconds

    def period_s(self, gradients: int) -> Seconds:
        """Of one update."""
        return self.apply_s + gradients * self.gradient_s

    def residual(self, points: Mapping[int, Seconds]) -> float:
        """The largest distance of a point from the line, as a fraction of the point."""
        return max(abs(self.period_s(k) / period - 1) for k, period in points.items())


@dataclass(frozen=True)
class Point:
    """One run."""

    engine: str
    gradients: int
    """In an update."""
    repeat: int
    period_s: Seconds
    """From one update to the next, averaged over the window."""
    elsewhere: float
    """Fraction of all cores that programs of low priority had meanwhile."""

    def row(self) -> Row:
        """For a CSV file."""
        return {
            "engine": self.engine,
            "gradients": self.gradients,
            "repeat": self.repeat,
            "period_s": f"{self.period_s:.6g}",
            "elsewhere": f"{self.elsewhere:.3f}",
        }

    @classmethod
    def of(cls, row: Mapping[str, str]) -> "Point":
        """What :meth:`row` wrote."""
        counted = int(row["gradients"]), int(row["repeat"])
        return cls(row["engine"], *counted, float(row["period_s"]), float(row["elsewhere"]))


def fit(points: Mapping[int, Seconds]) -> Server:
    """The line with the least squares of relative distances, neither part of it below 0.

    >>> fitted = fit({1: 0.003, 5: 0.007, 25: 0.027})
    >>> f"{fitted.apply_s:.4f} {fitted.gradient_s:.4f}"
    '0.0020 0.0010'
    """
    k, period = (np.array([*values], dtype=float) for values in (points.keys(), points.values()))
    (apply_s, gradient_s), _ = nnls(np.stack([1 / period, k / period], axis=1), np.ones(len(k)))
    return Server(float(apply_s), float(gradient_s))


def medians(points: Iterable[Point], engine: str) -> dict[int, Seconds]:
    """The period of each K over the repeats of an engine."""
    return {k: median(periods) for k, periods in _by_size(points, engine).items()}


def shortest(points: Iterable[Point], engine: str) -> dict[int, Seconds]:
    """The same where other programs disturbed least: they only make a period longer."""
    return {k: min(periods) for k, periods in _by_size(points, engine).items()}


def _by_size(points: Iterable[Point], engine: str) -> dict[int, list[Seconds]]:
    found: defaultdict[int, list[Seconds]] = defaultdict(list)
    for point in points:
        if point.engine == engine:
            found[point.gradients].append(point.period_s)
    return dict(sorted(found.items()))


def told(points: Mapping[int, Seconds]) -> dict[str, float]:
    """What is kept of an engine's server in the file of what was measured."""
    server = fit(points)
    line = {"apply_s": server.apply_s, "gradient_s": server.gradient_s, "residual": server.residual(points)}
    return {name: float(f"{value:.4g}") for name, value in line.items()} | {
        f"period_s/{k}": float(f"{period:.4g}") for k, period in points.items()
    }


def kept(known: Mapping[str, Mapping[str, float]], engine: str) -> Server:
    """What :func:`told` said."""
    return Server(known[engine]["apply_s"], known[engine]["gradient_s"])


def points_of(folder: Path) -> list[Point]:
    """Those of the sheet; none where there is no sheet."""
    path = folder / SHEET
    return [Point.of(row) for row in read(path)] if path.exists() else []


def measure(repeats: int = REPEATS, window_s: Seconds = WINDOW_S) -> Iterator[Point]:
    """Each K on each engine, as often as ``repeats`` says; every second time from the largest down."""
    made = _program()
    for name in ENGINES:
        with open_engine(name) as engine:
            for repeat in range(repeats):
                for k in SIZES[:: -1 if repeat % 2 else 1]:
                    yield _point(made, engine, k, repeat, window_s)


def _program() -> Program:
    made = program(RANDOM, None, 0, 64, 2)
    return replace(made, optimizer=functools.partial(torch.optim.SGD, lr=0.01)).seeded(0)


def _point(made: Program, engine: Engine, gradients: int, repeat: int, window_s: Seconds) -> Point:
    policy = f"buffered:k={gradients},combine=sum"
    busy = _Busy()
    done = train(
        made,
        f"replicas={WORKERS} partition=disjoint aggregation={policy}",
        engine=engine,
        seconds=WARM_UP_S + window_s,
        evaluate_every=WARM_UP_S,
        on_nonfinite="skip",
        progress=False,
    )
    if done.summary["interrupted"]:
        raise KeyboardInterrupt
    return Point(engine.name, gradients, repeat, period_s(done.history), busy.fraction())


def period_s(history: Sequence[Record]) -> Seconds:
    """From one update to the next, from the first record after the warm-up to the last."""
    first = next(record for record in history if record.time_s >= WARM_UP_S)
    last = history[-1]
    return (last.time_s - first.time_s) / (last.updates - first.updates)


class _Busy:
    """What programs of low priority (above nice 0) have of all cores, from now on."""

    def __init__(self) -> None:
        self._before = _processor_times()

    def fraction(self) -> float:
        passed = [now - then for now, then in zip(_processor_times(), self._before, strict=True)]
        return passed[1] / max(1, sum(passed))


def _processor_times() -> list[int]:
    """Ticks since the machine started: of programs, of those of low priority, of the system, idle, and so on."""
    path = Path("/proc/stat")
    return [int(word) for word in path.read_text().splitlines()[0].split()[1:9]] if path.exists() else [0, 0]

"""Cells: single runs by name, each made once and kept in a file of its own, on as many cores as there are."""

import functools
import hashlib
import json
import math
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from data import program
from processor_time import Meter
from rich.progress import Progress

from paceline import train
from paceline.aggregation import parse, text_of
from paceline.api.train import open_engine
from paceline.core.errors import NonFiniteError
from paceline.engine.base import Engine

POINTS = 50
"""Evaluations of a run, evenly spaced, beside the one at its start; of the image sets, see :attr:`Cell.points`."""


@dataclass(frozen=True)
class Cell:
    """One run, by all that decides what comes out of it."""

    dataset: str
    policy: str
    batch_size: int = 32
    rate: float = 0.01
    """Learning rate of the mean loss."""
    delay: str = "fraction=0.5 normal:mean=0,std=0.25"
    times: str = ""
    """Virtual time; empty on engines that measure it."""
    sample: int = 0
    """Seed of random data."""
    hidden: int = 64
    clusters: int = 2
    layers: int = 1
    loss: str = "cross-entropy"
    samples: int = 10_000
    pixels: str = "standard"
    round: int = 0
    workers: int = 25
    seconds: float = 100.0
    points: int = POINTS
    engine: str = "virtual"
    servers: int = 0
    """Of A, on engines that have them; 0: the engine's own choice."""

    def __post_init__(self) -> None:
        # One policy has one text, whoever wrote it: what two tables share is run once. A regime's cell has none yet.
        if self.policy:
            object.__setattr__(self, "policy", text_of(parse(self.policy)))

    @property
    def name(self) -> str:
        """Of its file: from what differs from the defaults, so that a field that is new leaves old runs as they are."""
        said = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:20]


@dataclass(frozen=True)
class Result:
    """What a run gave."""

    test_accuracy: float
    """Mean over the interval, in points (percent), as the paper's tables have it."""
    test_loss: float
    train_loss: float
    updates: int
    gradients: int
    curve: dict[str, list[float]]
    """time_s, threshold and the three metrics at each evaluation."""
    diverged: bool = False
    usage: dict[str, float] = field(default_factory=dict[str, float])
    """By :data:`processor_time.FIGURES`, of runs whose number of servers is given."""

    def reached(self, accuracy: float) -> float | None:
        """The time of the first evaluation at or above an accuracy, in points."""
        times = zip(self.curve["time_s"], self.curve["test_accuracy"], strict=True)
        return next((time for time, value in times if value >= accuracy), None)


METRICS = ("test_accuracy", "test_loss", "train_loss")

CHANCE = Result(
    10.0, math.log(10), math.log(10), 0, 0, {n: [] for n in ("time_s", "threshold", *METRICS)}, diverged=True
)
"""A run that diverged: as ten classes are guessed."""


class Store:
    """The folder where results lie.

    Args:
        folder: made where it is absent.
        data: where the image sets lie.
    """

    def __init__(self, folder: Path, data: dict[str, Path]) -> None:
        self._folder, self._data = folder, data
        folder.mkdir(parents=True, exist_ok=True)
        self._read: dict[Cell, Result] = {}

    def known(self, cell: Cell) -> bool:
        """Whether the run has been made."""
        return cell in self._read or self._path(cell).exists()

    def __getitem__(self, cell: Cell) -> Result:
        if cell not in self._read:
            self._read[cell] = Result(**json.loads(self._path(cell).read_text())["result"])
        return self._read[cell]

    def forget(self, cells: Iterable[Cell]) -> None:
        """Remove these runs, which have been made."""
        for cell in cells:
            self._read.pop(cell, None)
            self._path(cell).unlink()

    def make(self, cells: Iterable[Cell], processes: int, what: str = "runs") -> None:
        """Make the runs that have not been made; Ctrl-C keeps those that are complete."""
        missing = [cell for cell in dict.fromkeys(cells) if not self.known(cell)]
        if not missing:
            return
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(processes, context, initializer=_end_with_parent)
        with Progress(disable=not sys.stderr.isatty()) as progress:
            task = progress.add_task(what, total=len(missing))
            try:
                futures = [pool.submit(_made, cell, self._path(cell), self._data) for cell in missing]
                for future in as_completed(futures):
                    future.result()
                    progress.advance(task)
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def make_in_turn(self, cells: Iterable[Cell], engine: str) -> None:
        """Make the runs that have not been made one after the other, in this order, on an engine that stays open.

        Time is real there, so that runs at one time would slow each other; and to start Ray and 25 workers takes
        longer than a run.
        """
        missing = [cell for cell in dict.fromkeys(cells) if not self.known(cell)]
        if not missing:
            return
        with open_engine(engine) as opened, Progress(disable=not sys.stderr.isatty()) as progress:
            for cell in progress.track(missing, description="runs"):
                _made(cell, self._path(cell), self._data, opened)

    def _path(self, cell: Cell) -> Path:
        return self._folder / f"{cell.name}.json"


def _end_with_parent() -> None:
    """A process of a pool whose owner was killed would go on with what is queued."""
    owner = multiprocessing.parent_process()
    assert owner is not None, "this runs in a pool"

    def watch() -> None:
        owner.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _made(cell: Cell, path: Path, data: dict[str, Path], engine: Engine | None = None) -> None:
    """Run a cell and write its file, beside first and then renamed."""
    torch.set_num_threads(1)
    beside = path.with_suffix(f".{os.getpid()}")
    beside.write_text(json.dumps({"cell": asdict(cell), "result": asdict(run(cell, data, engine))}))
    beside.rename(path)


def run(cell: Cell, data: dict[str, Path], engine: Engine | None = None) -> Result:
    """One run, on an open engine or on one of its own."""
    made = program(
        cell.dataset,
        data.get(cell.dataset),
        cell.sample,
        cell.hidden,
        cell.clusters,
        cell.layers,
        cell.loss,
        cell.samples,
        cell.pixels,
    )
    made = replace(made, optimizer=functools.partial(torch.optim.SGD, lr=cell.rate), batch_size=cell.batch_size).seeded(
        cell.round
    )
    servers = f"servers={cell.servers} " if cell.servers else ""
    strategy = f"replicas={cell.workers} {servers}partition=disjoint aggregation={cell.policy}"
    options: dict[str, Any] = {"times": cell.times} if cell.times else {}
    try:
        with Meter(cell.seconds) if cell.servers else nullcontext() as meter:
            done = train(
                made,
                strategy,
                engine=engine or cell.engine,
                seconds=cell.seconds,
                evaluate_every=cell.seconds / cell.points,
                delay=cell.delay,
                progress=False,
                out=meter.out if meter else None,
                **options,
            )
    except NonFiniteError:
        return CHANCE
    if done.summary["interrupted"]:  # what there is of it is no result
        raise KeyboardInterrupt
    summary, rows = done.summary, [record.row() for record in done.history]
    curve = {name: [row[name] for row in rows] for name in ("time_s", "threshold", *METRICS)}
    curve["test_accuracy"] = [100 * value for value in curve["test_accuracy"]]
    means = {name: summary[f"{name}_mean"] for name in METRICS}
    means["test_accuracy"] *= 100
    counts = {"updates": summary["updates"], "gradients": summary["gradients"]}
    return Result(**means, **counts, curve=curve, usage=meter.usage if meter else {})

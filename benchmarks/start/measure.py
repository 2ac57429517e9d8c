"""How long Paceline takes to start: the command's help, and 25 local workers until all have built their model."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from paceline.api.train import train
from paceline.datasets import load_program
from paceline.engine.base import Engine, Job, Outcome, Progress, Watcher
from paceline.engine.local.engine import LocalEngine

REPEATS = 7
REPLICAS = 25


class Timed(Engine):
    """A local engine that notes how long a run took from its start to the first look at the training."""

    name = "local"

    def __init__(self) -> None:
        self._inner = LocalEngine()
        self.ready_s: list[float] = []

    def refuse(self, job: Job) -> None:
        self._inner.refuse(job)

    def run(self, job: Job, watch: Watcher) -> Outcome:
        began = time.perf_counter()
        seen = False

        def note(progress: Progress) -> None:
            nonlocal seen
            if progress.phase == "training" and not seen:
                seen = True
                self.ready_s.append(time.perf_counter() - began)
            watch(progress)

        return self._inner.run(job, Watcher(note))

    def close(self) -> None:
        self._inner.close()


def help_s() -> float:
    """Seconds of one ``paceline --help``, as a whole process."""
    began = time.perf_counter()
    command = Path(sys.executable).with_name("paceline")
    subprocess.run([command, "--help"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def cold_s() -> float:
    """Seconds until 25 workers are ready, the fork server's imports included."""
    with Timed() as engine:
        _run(engine)
        return engine.ready_s[0]


def warm_s() -> float:
    """The same in the second run of one engine, as in a comparison."""
    with Timed() as engine:
        _run(engine)
        _run(engine)
        return engine.ready_s[1]


def _run(engine: Engine) -> None:
    strategy = f"replicas={REPLICAS} aggregation=asynchronous"
    train(load_program("synthetic"), strategy, engine=engine, seconds=0.5, progress=False)


def _row(name: str, measure: Callable[[], float]) -> None:
    seconds = sorted(measure() for _ in range(REPEATS))
    print(f"| {name} | {median(seconds):.2f} | {seconds[0]:.2f} | {seconds[-1]:.2f} |", flush=True)


if __name__ == "__main__":
    print(f"seconds, median, minimum and maximum of {REPEATS}\n")
    print("| what | median | min | max |\n|---|---|---|---|")
    _row("`paceline --help`", help_s)
    _row(f"{REPLICAS} local workers ready, first run of an engine", cold_s)
    _row(f"{REPLICAS} local workers ready, later runs", warm_s)

"""Steps a second of the local engine with 1 to 16 workers under every policy, and the efficiency against one worker."""

import argparse
import functools
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import nn

from paceline import InputError, Program, train
from paceline.aggregation import Aggregation, registered
from paceline.datasets.models import cnn, mlp
from paceline.engine.base import Engine
from paceline.engine.local.engine import LocalEngine

WORKERS = (1, 2, 4, 8, 16)
BATCH = 32
"""Samples per worker and step."""

SAMPLES = 8192
"""Of MNIST's shape, drawn at random; a multiple of 16 · 32, so that every step has a whole batch."""

WARM_UP_S = 0.5

MODELS: dict[str, Callable[[], nn.Module]] = {
    "cnn": functools.partial(cnn, 1, 28),
    "mlp": functools.partial(mlp, 784, 2048, 2048, 10),
}

SAID = {
    "buffered": "buffered:k={half}",
    "elastic-averaging": "elastic-averaging:period=8,elasticity=0.1",
    "local-steps": "local-steps:period=16",
    "smooth-switch": "smooth-switch:every=500",
    "stale-synchronous": "stale-synchronous:bound=3",
}
"""Text forms with what a reader of the table should see; ``half`` is max(1, P // 2). Other policies: by their name."""


class Row(NamedTuple):
    """One policy with so many workers."""

    workers: int
    policy: str
    steps_per_s: float
    alone_steps_per_s: float
    """Of one synchronous worker, in the same rounds."""
    efficiency: float


def machine() -> str:
    """Where this runs, in words."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")
    return f"{cores()} cores of {model}, torch {torch.__version__}, Python {platform.python_version()}"


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0))


def make_program(model: str) -> Program:
    """The model on random pictures: nothing has to be downloaded, and no step is quicker for what it learns."""
    draw = torch.Generator().manual_seed(0)
    shape = (SAMPLES, 1, 28, 28) if model == "cnn" else (SAMPLES, 784)
    return Program(
        model=MODELS[model],
        loss=nn.functional.cross_entropy,
        optimizer=functools.partial(torch.optim.SGD, lr=0.01),
        train=(torch.randn(shape, generator=draw), torch.randint(10, (SAMPLES,), generator=draw)),
        batch_size=BATCH,
    )


def rate(program: Program, engine: Engine, workers: int, policy: str, seconds: float) -> float:
    """Steps a second whose Δ was applied, of all workers together; one thread each."""
    text = f"replicas={workers} threads=1 aggregation={policy.format(half=max(1, workers // 2))}"
    run = train(program, text, engine=engine, seconds=seconds, evaluate_every=seconds, progress=False)
    # Samples, not Δs: under some policies a Δ is the work of many steps.
    return float(run.summary["samples_per_s"]) / BATCH


def policies(program: Program, engine: Engine, chosen: list[str]) -> dict[str, str]:
    """Name -> text of the policies to measure; one that can't be run by its text alone is named and left out."""
    texts = {}
    for name in chosen or sorted(registered(Aggregation)):
        text = SAID.get(name, name)
        try:
            rate(program, engine, 1, text, WARM_UP_S)
            texts[name] = text
        except InputError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    return texts


def measure(
    program: Program, engine: Engine, texts: dict[str, str], counts: list[int], rounds: int, seconds: float
) -> Iterator[Row]:
    """The rows of the table. In each round one worker is measured first, then every policy, forwards or backwards."""
    for workers in counts:
        alone: list[float] = []
        rates: dict[str, list[float]] = {name: [] for name in texts}
        for turn in range(rounds):
            alone.append(rate(program, engine, 1, "synchronous", seconds))
            for name in list(texts)[:: -1 if turn % 2 else 1]:
                rates[name].append(rate(program, engine, workers, texts[name], seconds))
        for name, text in texts.items():
            efficiency = median(r / (workers * one) for r, one in zip(rates[name], alone, strict=True))
            label = text.format(half=max(1, workers // 2))
            yield Row(workers, label, median(rates[name]), median(alone), efficiency)


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="cnn")
    parser.add_argument("--policies", nargs="*", default=[], help="by name; all that are registered")
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS, help="1 2 4 8 16, up to the cores there are")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of training in one measurement")
    parser.add_argument("--figure", type=Path, help="draw it: a .png or .svg file")
    return parser.parse_args()


def main() -> None:
    """Print the table, and draw it where that is asked for."""
    said = arguments()
    counts = [p for p in said.workers if p <= cores()]
    rows = []
    print(f"{machine()}\n\n{said.model}, batch {BATCH} per worker, {said.rounds} rounds of {said.seconds:g} s\n")
    with LocalEngine() as engine:
        program = make_program(said.model)
        texts = policies(program, engine, said.policies)
        print("| workers | policy | steps/s | one worker, steps/s | efficiency |\n|---|---|---|---|---|", flush=True)
        for row in measure(program, engine, texts, counts, said.rounds, said.seconds):
            rows.append(row)
            numbers = f"{row.steps_per_s:,.0f} | {row.alone_steps_per_s:,.0f} | {row.efficiency:.2f}"
            print(f"| {row.workers} | `{row.policy}` | {numbers} |", flush=True)
    if said.figure is not None:
        from figure import draw

        draw(rows, f"{said.model}, batch {BATCH} per worker; {machine()}", said.figure)


if __name__ == "__main__":
    main()

"""Updates a second of a parameter server, a trivial Δ from each worker: Paceline's local engine beside Ray actors.

Needs ``pip install ray``. The two alternate; the rates are medians, the ratio is the median of the pairs'.
"""

import functools
import os
import sys
from pathlib import Path
from statistics import median

import ray_server
import torch
from torch import nn

from paceline.engine.local.engine import LocalEngine
from paceline.program import Program
from paceline.train import train

SECONDS = 3.0
PAIRS = 5
CASES = [
    (2, 22_000, "sgd"),
    (8, 22_000, "sgd"),
    (25, 22_000, "sgd"),
    (8, 22_000, "adam"),
    (25, 22_000, "adam"),
    (2, 1_000_000, "sgd"),
    (8, 1_000_000, "sgd"),
    (25, 1_000_000, "sgd"),
]


class Weights(nn.Module):
    """So many parameters, which are hardly used."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(parameters))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum() + self.weights.sum()


def identity(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The output as its own loss."""
    del target
    return output


def paceline_rate(engine: LocalEngine, workers: int, parameters: int, optimizer: str) -> float:
    """Updates a second of an asynchronous run."""
    rule = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer]
    program = Program(
        model=functools.partial(Weights, parameters),
        loss=identity,
        optimizer=functools.partial(rule, lr=0.01),
        train=(torch.zeros(64, 1), torch.zeros(64)),
    )
    run = train(program, f"replicas={workers} aggregation=asynchronous", engine=engine, seconds=SECONDS, progress=False)
    return float(run.summary["updates_per_s"])


def main() -> None:
    """Print the table."""
    sys.path.insert(0, str(Path(__file__).parent))
    ray_server.start(len(os.sched_getaffinity(0)))
    print(f"updates/s, medians of {PAIRS} pairs of {SECONDS:g} s each\n")
    print("| workers | parameters | optimizer | Paceline | Ray actors | ratio |\n|---|---|---|---|---|---|")
    with LocalEngine(entry="trivial:main") as engine:
        for workers, parameters, optimizer in CASES:
            pairs = [
                (
                    paceline_rate(engine, workers, parameters, optimizer),
                    ray_server.rate(workers, parameters, optimizer, SECONDS),
                )
                for _ in range(PAIRS)
            ]
            mine, theirs = (median(column) for column in zip(*pairs, strict=True))
            ratio = median(a / b for a, b in pairs)
            print(
                f"| {workers} | {parameters:,} | {optimizer} | {mine:,.0f} | {theirs:,.0f} | {ratio:.0f} |", flush=True
            )


if __name__ == "__main__":
    main()

"""Gradients a second of the virtual engine on one core, beside autograd with nothing around it, alternating."""

import os
import sys
import time
from statistics import median

import torch
from torch import nn

from paceline.api.train import train
from paceline.datasets import load_program
from paceline.program import Program

REPEATS = 9
REPLICAS = 25
SECONDS = 10.0
"""Of virtual time in one run."""


def engine_rate(program: Program, strategy: str) -> float:
    """Gradients a second of a whole run: checks, data, events, updates and 21 scorings included."""
    began = time.perf_counter()
    run = train(program, strategy, engine="virtual", seconds=SECONDS, progress=False)
    return float(run.summary["gradients"]) / (time.perf_counter() - began)


def bare_rate(program: Program, gradients: int = 5000) -> float:
    """Forward and backward alone, one batch at a time, always the same batch; no data, no update."""
    module = program.build()
    inputs, targets = program.train[0][:32], program.train[1][:32]  # type: ignore[index]
    parameters = list(module.parameters())
    began = time.perf_counter()
    for _ in range(gradients):
        torch.autograd.grad(nn.functional.cross_entropy(module(inputs), targets), parameters)
    return gradients / (time.perf_counter() - began)


def main() -> None:
    """Print the table."""
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    program = load_program("synthetic")
    policies = sys.argv[1:] or ["asynchronous", "smooth-switch:every=500", "synchronous"]
    print(f"`synthetic`, {REPLICAS} replicas, batch 32, one core; median of {REPEATS}\n")
    print("| policy | gradients/s | autograd alone, one at a time | ratio |\n|---|---|---|---|")
    for policy in policies:
        strategy = f"replicas={REPLICAS} aggregation={policy}"
        engine_rate(program, strategy)
        pairs = [(engine_rate(program, strategy), bare_rate(program)) for _ in range(REPEATS)]
        ratio = median(a / b for a, b in pairs)
        rates = [median(column) for column in zip(*pairs, strict=True)]
        print(f"| `{policy}` | {rates[0]:,.0f} | {rates[1]:,.0f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()

"""Blocks of gradients, drawn by how much they moved A last: payload, and what it costs in accuracy.

    torchrun --nproc-per-node 2 benchmarks/scheduling/gradients.py [--steps 300] [--seeds 5]

Prints a row for each compression, of the median seed: test accuracy, test loss, bytes that a rank sends in a step.
"""

import argparse
import functools
import os
from dataclasses import replace
from statistics import median

import torch

from paceline import train
from paceline.datasets import load_program

COMPRESSIONS = (
    "none",
    "blocks:ratio=0.5,size=64",
    "blocks:ratio=0.25,size=64",
    "blocks:ratio=0.1,size=64",
    "blocks:ratio=0.03,size=64",
    "blocks:ratio=0.03,size=64,eta=1000",  # nearly uniform
    "top-k:ratio=0.03",
)


def measured(compression: str, steps: int, seed: int) -> tuple[float, float, float]:
    """Return accuracy, loss and bytes of a run."""
    program = replace(load_program("digits", seed=seed), optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    strategy = f"replicas={os.environ['WORLD_SIZE']} compression={compression}"
    run = train(program, strategy, engine="distributed", steps=steps, evaluate_every=steps, progress=False)
    last = run.history[-1]
    assert last.test_accuracy is not None, "digits has test data"
    assert last.test_loss is not None, "and a loss"
    return last.test_accuracy, last.test_loss, float(run.summary["payload_bytes_per_step"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    for compression in COMPRESSIONS:
        runs = [measured(compression, arguments.steps, seed) for seed in range(arguments.seeds)]
        accuracy, loss, sent = map(median, zip(*runs, strict=True))
        if os.environ["RANK"] == "0":
            print(f"| `{compression}` | {accuracy:.1%} | {loss:.4f} | {sent:,.0f} |", flush=True)


if __name__ == "__main__":
    main()

"""A step of one replica beside the plain loop of PyTorch that it stands for: one thread each, the same batches' sizes.

    python benchmarks/limits/one_replica.py

The plain loop draws a permutation of the samples, and of each batch of it clears the gradients, computes loss and
backward, and steps. Paceline makes its steps as the model stands, and as a graph (compile=graph). All take turns; a
ratio is the median of the turns'.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from paceline import Program, train
from paceline.engine.base import Engine
from paceline.engine.distributed.engine import DistributedEngine
from paceline.engine.local.engine import LocalEngine

SAMPLES, FEATURES, CLASSES, BATCH = 3200, 64, 10, 32

WARM_UP = 100
"""Steps that are made, but not timed."""


def mlp() -> nn.Module:
    """26,122 parameters."""
    layers = nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, CLASSES)
    return nn.Sequential(*layers)


def cnn() -> nn.Module:
    """9,930 parameters, on images of 8 × 8."""
    convolutions = nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.ReLU()
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *convolutions, nn.Flatten(), nn.Linear(512, CLASSES))


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "cnn": cnn}

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.01),
    "adam": partial(torch.optim.Adam, lr=0.001),
}

ENGINES: dict[str, Callable[[], Engine]] = {"local": LocalEngine, "distributed": DistributedEngine}


def program_of(model: str, optimizer: str) -> Program:
    """Train a model on random numbers."""
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, FEATURES, generator=draw)
    targets = torch.randint(CLASSES, (SAMPLES,), generator=draw)
    return Program(MODELS[model], cross_entropy, OPTIMIZERS[optimizer], (inputs, targets), batch_size=BATCH)


def plain_us(program: Program, steps: int) -> float:
    """Microseconds of a step of the plain loop."""
    inputs, targets = program.train
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        module = program.build().train()
        optimizer: Any = program.optimizer(module.parameters())
        draw, made, began = torch.Generator().manual_seed(1), 0, 0.0
        while made < steps + WARM_UP:
            for indices in torch.randperm(SAMPLES, generator=draw).split(BATCH)[: steps + WARM_UP - made]:
                if made == WARM_UP:
                    began = time.perf_counter()
                optimizer.zero_grad()
                program.loss(module(inputs[indices]), targets[indices]).backward()
                optimizer.step()
                made += 1
        return 1e6 * (time.perf_counter() - began) / steps
    finally:
        torch.set_num_threads(before)


def paceline_us(engine: Engine, program: Program, steps: int, compile: str) -> float:
    """Microseconds of a step of a long run that a short one has not made; nothing is scored while they train."""
    strategy, every = f"replicas=1 threads=1 compile={compile}", 10 * (steps + WARM_UP)
    settings: dict[str, Any] = {"engine": engine, "evaluate_every": every, "progress": False}
    short, long = (
        train(program, strategy, steps=count, **settings).summary["seconds"] for count in (WARM_UP, steps + WARM_UP)
    )
    return float(1e6 * (long - short) / steps)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--compile", nargs="+", choices=("false", "graph"), default=["false", "graph"])
    parser.add_argument("--pairs", type=int, default=9, help="turns of each side (%(default)s)")
    parser.add_argument("--steps", type=int, default=2000, help="of a turn (%(default)s)")
    said = parser.parse_args(arguments)
    print("| model | optimizer | engine | compile | plain, µs | Paceline, µs | ratio |\n|---|---|---|---|---|---|---|")
    for name in said.engines:
        with ENGINES[name]() as engine:
            for model in said.models:
                for optimizer in said.optimizers:
                    program = program_of(model, optimizer)
                    turns = [
                        (
                            plain_us(program, said.steps),
                            *(paceline_us(engine, program, said.steps, c) for c in said.compile),
                        )
                        for _ in range(said.pairs)
                    ]
                    plain, *sides = zip(*turns, strict=True)
                    for compile, ours in zip(said.compile, sides, strict=True):
                        ratio = median(mine / theirs for mine, theirs in zip(ours, plain, strict=True))
                        what = f"| {model} | {optimizer} | {name} | {compile} "
                        print(f"{what}| {median(plain):.0f} | {median(ours):.0f} | {ratio:.3f} |", flush=True)


if __name__ == "__main__":
    main()

"""A step of one replica beside the plain loop of PyTorch that it stands for: one thread each, the same batches' sizes.

    python benchmarks/limits/one_replica.py

The plain loop of the same model draws a permutation of the samples, and of each batch of it clears the gradients,
computes loss and backward, and steps. Paceline's steps are those of the default, graphs after a while, for these models
are pure; graphs from the first one (compile=graph); and steps as they are, of models that are not pure, for they count
their calls. All take turns; a ratio is the median of the turns'.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paceline import Program, train
from paceline.engine.base import Engine
from paceline.engine.distributed.engine import DistributedEngine
from paceline.engine.local.engine import LocalEngine

SAMPLES, FEATURES, CLASSES, BATCH = 3200, 64, 10, 32

WARM_UP = 1000
"""Steps that are made, but not timed: by then steps that are to be graphs are."""


def mlp() -> nn.Module:
    """26,122 parameters."""
    layers = nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, CLASSES)
    return nn.Sequential(*layers)


def cnn() -> nn.Module:
    """9,930 parameters, on images of 8 × 8."""
    convolutions = nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.ReLU()
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *convolutions, nn.Flatten(), nn.Linear(512, CLASSES))


class Counting(nn.Module):
    """A model that counts its calls."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.model, self.calls = make(), 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        found: Tensor = self.model(inputs)
        return found


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "cnn": cnn}

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.01),
    "adam": partial(torch.optim.Adam, lr=0.001),
}

ENGINES: dict[str, Callable[[], Engine]] = {"local": LocalEngine, "distributed": DistributedEngine}


SIDES = {
    "default": ("compile=false", False),
    "compile=graph": ("compile=graph", False),
    "not pure": ("compile=false", True),
}
"""Words of the strategy, and whether the model counts."""


def program_of(model: str, optimizer: str, *, counts: bool = False) -> Program:
    """Train a model on random numbers."""
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, FEATURES, generator=draw)
    targets = torch.randint(CLASSES, (SAMPLES,), generator=draw)
    make: Callable[[], nn.Module] = partial(Counting, MODELS[model]) if counts else MODELS[model]
    return Program(make, cross_entropy, OPTIMIZERS[optimizer], (inputs, targets), batch_size=BATCH)


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


def paceline_us(engine: Engine, model: str, optimizer: str, steps: int, side: str) -> float:
    """Microseconds of a step of a long run that a short one has not made; nothing is scored while they train."""
    words, counts = SIDES[side]
    program = program_of(model, optimizer, counts=counts)
    strategy, every = f"replicas=1 threads=1 {words}", 10 * (steps + WARM_UP)
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
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--pairs", type=int, default=9, help="turns of each side (%(default)s)")
    parser.add_argument("--steps", type=int, default=2000, help="of a turn (%(default)s)")
    said = parser.parse_args(arguments)
    print("| model | optimizer | engine | side | plain, µs | Paceline, µs | ratio |\n|---|---|---|---|---|---|---|")
    for name in said.engines:
        with ENGINES[name]() as engine:
            for model in said.models:
                for optimizer in said.optimizers:
                    for side, plain, ours in turns(engine, model, optimizer, said):
                        ratio = median(mine / theirs for mine, theirs in zip(ours, plain, strict=True))
                        what = f"| {model} | {optimizer} | {name} | {side} "
                        print(f"{what}| {median(plain):.0f} | {median(ours):.0f} | {ratio:.3f} |", flush=True)


def turns(
    engine: Engine, model: str, optimizer: str, said: argparse.Namespace
) -> Iterator[tuple[str, Sequence[float], Sequence[float]]]:
    """Yield each side with the microseconds of each turn, of the plain loop of the same model and of Paceline."""
    kinds = sorted({SIDES[side][1] for side in said.sides})
    programs = {counts: program_of(model, optimizer, counts=counts) for counts in kinds}
    plain, ours = defaultdict[bool, list[float]](list), defaultdict[str, list[float]](list)
    for _ in range(said.pairs):
        for counts, program in programs.items():
            plain[counts].append(plain_us(program, said.steps))
        for side in said.sides:
            ours[side].append(paceline_us(engine, model, optimizer, said.steps, side))
    for side in said.sides:
        yield side, plain[SIDES[side][1]], ours[side]


if __name__ == "__main__":
    main()

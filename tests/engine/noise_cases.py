"""A quadratic whose gradient's mean and covariance are known, and what an estimate of it is held to."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from paceline import Program, Run, train
from tests.engine import programs

DIM, BATCH = 40, 8
SPREAD = torch.linspace(0.5, 2.0, DIM, dtype=torch.float64)
"""Standard deviations of a sample; the samples' mean is 0."""
START = 0.5
TRACE = float(SPREAD.square().sum())
"""tr(Σ) of a sample's gradient w - x."""
SQUARE = DIM * START**2
"""|G|² at A_0, where G = w."""

KEYS = ("noise_scale", "noise_scale_biased", "efficiency")


class Point(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((DIM,), START, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w - x


def half_square(output: Tensor, _target: Tensor) -> Tensor:
    return 0.5 * output.square().sum(1).mean()


def source(replica: int, _replicas: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1000 * seed + replica)
    while True:
        yield torch.randn(BATCH, DIM, dtype=torch.float64, generator=generator) * SPREAD, torch.zeros(BATCH)


def still(kind: Any = torch.optim.SGD, lr: float = 0.0, **options: Any) -> Program:
    """A stays where it is, so φ is one number."""
    optimizer = functools.partial(kind, lr=lr, **options)
    return Program(model=Point, loss=half_square, train=source, optimizer=optimizer, seed=3)


def classifier(optimizer: Any, **fields: Any) -> Program:
    """Classes that can be learned, so that in a short run the gradient can be told from noise."""
    inputs, _ = programs.data(samples=1000)
    fixed = {"train": (inputs, inputs[:, :3].argmax(1)), "optimizer": optimizer, "batch_size": 16}
    return programs.program(**fixed | fields)


def normalised() -> nn.Module:
    """What is normalised is whole on each shard, and so are the parameters of that."""
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 3)).double()


ADAM = functools.partial(torch.optim.Adam, lr=0.003)
SGD = functools.partial(torch.optim.SGD, lr=0.05)


@dataclass(frozen=True)
class Case:
    """One run; its strategy lacks the replicas."""

    optimizer: Any = SGD
    strategy: str = ""
    mesh: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    workers: int = 1
    """Of one replica."""

    def run(self, replicas: int, engine: Any) -> Run:
        """On a host without stages or shards where that is virtual time."""
        mesh = "" if engine == "virtual" else self.mesh
        strategy = f"replicas={replicas} {self.strategy} {mesh}"
        program = classifier(self.optimizer, **self.fields)
        return train(program, strategy, engine=engine, steps=14, noise_scale=True, progress=False)


CASES: dict[str, Case] = {
    "sgd": Case(),
    "sum": Case(strategy="aggregation=synchronous:combine=sum"),
    "clipped": Case(fields={"clip_norm": 0.1}),
    "uneven": Case(fields={"batch_size": 41}),
    "adam": Case(ADAM),
    "accumulated": Case(strategy="accumulate=2"),
    "adam accumulated": Case(ADAM, strategy="accumulate=2"),
    "tied": Case(fields={"model": programs.Tied}),
    "stages": Case(mesh="stages=2 micro_batches=2", workers=2),
    "tied over stages": Case(ADAM, mesh="stages=2 micro_batches=2", fields={"model": programs.Tied}, workers=2),
    "shards": Case(ADAM, mesh="shards=2", workers=2),
    "shards that share": Case(mesh="shards=2", fields={"model": normalised}, workers=2),
}
"""Equal to the virtual engine, where all of a replica is one."""

OVERLAPPED = ("sgd", "sum", "uneven", "adam", "tied")
"""Also trained with Δ sent in buckets during the backward pass."""

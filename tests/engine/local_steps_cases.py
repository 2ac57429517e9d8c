"""Replicas of several ranks that step by themselves."""

import functools
from dataclasses import dataclass

from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR

from paceline import Program, Run, train
from tests.engine import programs

RANKS = 4


@dataclass(frozen=True)
class Case:
    """One run."""

    strategy: str
    program: Program

    def run(self, engine: str) -> Run:
        return train(self.program, self.strategy, engine=engine, steps=13, evaluate_every=13, progress=False)


def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def program(**fields: object) -> Program:
    return programs.program(**{"model": deep, "test": programs.data(samples=20)} | fields)


ADAPTIVE = program(
    optimizer=functools.partial(AdamW, lr=0.01),
    scheduler=functools.partial(StepLR, step_size=4, gamma=0.5),
    clip_norm=0.05,
)

CASES = {
    "stages": Case("replicas=2 stages=2 micro_batches=2 aggregation=local-steps:period=3", program()),
    "shards": Case("replicas=2 shards=2 aggregation=local-steps:period=3,outer=nesterov", program()),
    "clipped stages": Case("replicas=2 stages=2 micro_batches=2 aggregation=local-steps:period=4", ADAPTIVE),
    "clipped shards": Case("replicas=2 shards=2 aggregation=local-steps:period=4,outer=momentum", ADAPTIVE),
    "fragments in stages": Case(
        "replicas=2 stages=2 micro_batches=2 aggregation=local-steps:period=4,fragments=4,outer=momentum", program()
    ),
    "fragments in shards": Case("replicas=2 shards=2 aggregation=local-steps:period=4,fragments=2", program()),
    "overlapped in stages": Case(
        "replicas=2 stages=2 micro_batches=2 aggregation=local-steps:period=4,fragments=2,overlap=1", ADAPTIVE
    ),
    "overlapped in shards": Case("replicas=2 shards=2 aggregation=local-steps:period=3,overlap=2", program()),
    "elastic stages": Case(
        "replicas=2 stages=2 micro_batches=2 aggregation=elastic-averaging:period=3,elasticity=0.4,synchronous=true",
        program(),
    ),
    "elastic shards": Case(
        "replicas=2 shards=2 aggregation=elastic-averaging:period=2,elasticity=0.3,synchronous=true", ADAPTIVE
    ),
    "both": Case("stages=2 shards=2 micro_batches=2 aggregation=local-steps:period=2", program()),
}

"""Shards that a whole engine trains, and the one process that they must equal."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from paceline import Program, Run, Strategy, train
from paceline.replica.base import Batch
from paceline.replica.tensor.placements import OnRank, Shard
from paceline.replica.tensor.prepare import plan_program
from paceline.shard_rules import ShardRules
from tests import zoo

STEPS = 5
"""Of 6 samples in batches of 4: every second batch is the smaller one, of 2."""

MOMENTUM = functools.partial(SGD, lr=0.05, momentum=0.9)
ADAM = functools.partial(Adam, lr=0.01)


def by_shape(parameters: list[nn.Parameter]) -> AdamW:
    """An optimizer that looks at whole shapes: no part of the first weight has 16 rows."""
    wide = [p for p in parameters if p.shape[0] == 16]
    rest = [p for p in parameters if p.shape[0] != 16]
    return AdamW([{"params": wide, "weight_decay": 0.3}, {"params": rest, "lr": 0.002}], lr=0.01)


class Idle(nn.Module):
    """Some of it is never used, which A has all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.idle, self.head = nn.Linear(8, 7), nn.Linear(3, 3), nn.Linear(7, 5)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(x)))


def idle() -> zoo.Job:
    return zoo.mlp()._replace(model=Idle)


def smooth() -> nn.Module:
    """In float32, for autocast; without a ReLU, which a rounding may switch off."""
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 5))


def half() -> zoo.Job:
    job = zoo.mlp()
    return job._replace(model=smooth, inputs=job.inputs.float())


class Branches(nn.Module):
    """One that drops, one with running statistics, and one that is itself the sum of two."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.b1 = nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Dropout(0.3))
        self.b2 = nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5), nn.Dropout(0.2), nn.Linear(5, 3))
        self.b3, self.b4 = nn.Linear(8, 6), nn.Linear(8, 6)
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(16, 5)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        made = torch.cat([self.b1(x), self.b2(x), self.b3(x) + self.b4(x).sin()], 1)
        return self.head(self.drop(made))


def branches() -> zoo.Job:
    return zoo.mlp()._replace(model=Branches)


@dataclass(frozen=True)
class Case:
    """One run; its strategy lacks the shards."""

    job: Callable[[], zoo.Job]
    strategy: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    rules: str = ""
    """Of the strategy, its ``shard_rules``."""

    @property
    def program(self) -> Program:
        model, inputs, targets, loss = self.job()
        usual: dict[str, Any] = {"optimizer": MOMENTUM, "batch_size": 4, "seed": 5}
        return Program(model=model, loss=loss, train=(inputs, targets), **usual | self.fields)

    def divided(self, shards: int) -> Strategy:
        """Its strategy, with so many shards."""
        return replace(Strategy.coerce(f"shards={shards} {self.strategy}"), shard_rules=ShardRules(self.rules))

    def run(self, shards: int, engine: Any, **settings: Any) -> Run:
        return train(self.program, self.divided(shards), engine=engine, progress=False, **{"steps": STEPS} | settings)

    def one_process(self, **settings: Any) -> Run:
        strategy = f"replicas=1 {self.strategy}"
        return train(self.program, strategy, engine="virtual", progress=False, **{"steps": STEPS} | settings)


CASES: dict[str, Case] = {
    "dropout": Case(zoo.mlp, "accumulate=2", {"optimizer": ADAM, "clip_norm": 0.1}),
    "batchnorm": Case(zoo.cnn, fields={"clip_norm": 0.5}),
    "tied": Case(zoo.tied, "accumulate=2", {"clip_norm": 0.1}),
    "encoder": Case(zoo.encoder, fields={"optimizer": ADAM}),
    "groups": Case(zoo.mlp, fields={"optimizer": by_shape}),
    "branches": Case(branches, "accumulate=2", {"clip_norm": 0.1}, "b*:branch"),
    "idle": Case(idle, fields={"clip_norm": 0.1}),
    "autocast": Case(half, fields={"precision": "bf16"}),
}


def largest_part(case: Case, shards: int) -> int:
    """Bytes of parameters that a shard may have: of what is divided its part, and of the rest all.

    Who works on which branch goes by what was measured, but somebody else has one tensor of them at least.
    """
    program, rules = case.program, ShardRules(case.rules)
    inputs, targets = program.train
    _, plan = plan_program(program, module := program.build(), Batch(inputs[:4], targets[:4], 4), shards, rules)
    if "branch" in rules.values():
        each = [p.nbytes for p in module.parameters()]
        return sum(each) - min(each)

    def held(shard: int) -> Iterator[int]:
        for name, parameter in module.named_parameters():
            how = plan.parameters.get(name)
            part = how.take(parameter, shard) if isinstance(how, Shard) else parameter
            if not isinstance(how, OnRank) or how.shard == shard:
                yield part.nbytes

    return max(sum(held(shard)) for shard in range(shards))

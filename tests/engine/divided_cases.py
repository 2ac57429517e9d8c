"""Replicas of stages and shards whose optimizer's state is divided, what they must equal, and what they must hold."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline import Program, Run, Strategy, train
from paceline.optim import Lamb
from paceline.replica.pipeline.micro_batches import micro_batch_sizes
from paceline.schedule import Action
from tests import zoo
from tests.engine.pipeline_cases import ADAM, MOMENTUM
from tests.formulas import Memory, memory, peak_saved_bytes

STEPS = 5
BATCH = 10
"""Of all replicas together, of 12 samples: every second batch has 2."""

FLOAT64 = 8
STAGES = "cuts=4 micro_batches=3"
RULES = "shard_rules=0:column,2:row,4:column,6:row"


def model() -> nn.Module:
    """Two stages, each of a pair of layers that can be divided with one sum."""
    first = [nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU()]
    return nn.Sequential(*first, nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5)).double()


def whole(inputs: int, outputs: int) -> int:
    """Elements of a linear layer."""
    return inputs * outputs + outputs


def column(inputs: int, outputs: int) -> int:
    """Of one of two shards that have half of its outputs each."""
    return (inputs * outputs + outputs) // 2


def row(inputs: int, outputs: int, shard: int) -> int:
    """Of one of two shards that have half of its inputs each; the first adds the bias."""
    return inputs * outputs // 2 + (outputs if shard == 0 else 0)


@dataclass(frozen=True)
class Part:
    """What one worker has of the model."""

    elements: int
    saved: int
    """Elements that are saved of one sample: what ReLU and the loss have made, and what a linear layer is sent."""
    put_off: int = 0
    """The same while gradients of weights wait: a linear layer's input and the gradient of its output."""


FIRST = Part(whole(8, 16) + whole(16, 8), 16 + 8, 16 + 16 + 8)
SECOND = Part(whole(8, 16) + whole(16, 5), 8 + 16 + 5, 8 + 16 + 16 + 5)
FIRSTS = [Part(column(8, 16) + row(16, 8, shard), 8 + 8) for shard in (0, 1)]
SECONDS = [Part(column(8, 16) + row(16, 5, shard), 8 + 8 + 5) for shard in (0, 1)]
SHARDS = [Part(a.elements + b.elements, 8 + 8 + 8 + 5) for a, b in zip(FIRSTS, SECONDS, strict=True)]


@dataclass(frozen=True)
class Case:
    """One run."""

    strategy: str
    parts: list[Part]
    """Of the workers of a replica."""
    remembers: int
    """Vectors of the optimizer's memory for each vector of A."""
    fields: dict[str, Any] = field(default_factory=dict)

    def program(self, replicas: int = 1) -> Program:
        draw = torch.Generator().manual_seed(0)
        data = [torch.randn(12, size, generator=draw, dtype=torch.float64) for size in (8, 5)]
        usual: dict[str, Any] = {"batch_size": BATCH // replicas, "seed": 5, "clip_norm": 0.1}
        return Program(model=model, loss=F.mse_loss, train=(data[0], data[1]), **usual | self.fields)

    def run(self, engine: Any) -> Run:
        program = self.program(Strategy.parse(self.strategy).replicas)
        return train(program, self.strategy, engine=engine, steps=STEPS, progress=False)

    def one_process(self) -> Run:
        return train(self.program(), "replicas=1", engine="virtual", steps=STEPS, progress=False)

    def expected(self) -> list[Memory]:
        """What each worker holds, from micro_batch_sizes alone."""
        strategy = Strategy.parse(self.strategy)
        mesh = strategy.mesh
        found = list[Memory]()
        for rank in range(mesh.workers):
            part, stage = self.parts[rank % mesh.per_replica], mesh.coordinate(rank).stage
            found.append(
                memory(
                    part.elements,
                    element_bytes=FLOAT64,
                    remembers=self.remembers,
                    holders=mesh.replicas * mesh.stage_replicas.copies[stage] if strategy.shard_optimizer else 1,
                    activation_bytes=self._saved(strategy, rank, part),
                )
            )
        return found

    def _saved(self, strategy: Strategy, rank: int, part: Part) -> int:
        samples, mesh = BATCH // strategy.replicas, strategy.mesh
        if not strategy.pipelined:
            return samples * part.saved * FLOAT64
        each = micro_batch_sizes(samples, strategy.micro_batch_count)

        def saved(action: Action) -> int:
            kept = part.saved if action.kind == "forward" else part.put_off
            return each[action.micro_batch] * kept * FLOAT64

        order = strategy.order.stage_replica_actions(
            mesh.stage_replica(mesh.coordinate(rank)), mesh.stage_replicas, strategy.micro_batch_count
        )
        return peak_saved_bytes(order, saved)


WITH_ADAM, WITH_MOMENTUM = {"optimizer": ADAM}, {"optimizer": MOMENTUM}

CASES: dict[str, Case] = {
    "stages": Case(f"replicas=2 stages=2 {STAGES} shard_optimizer=true", [FIRST, SECOND], 2, WITH_ADAM),
    "all forward first": Case(f"replicas=2 stages=2 {STAGES} schedule=gpipe", [FIRST, SECOND], 2, WITH_ADAM),
    "shards": Case(f"replicas=2 shards=2 {RULES} shard_optimizer=true", SHARDS, 1, WITH_MOMENTUM),
    "stages of shards": Case(f"stages=2 shards=2 {STAGES} {RULES}", [*FIRSTS, *SECONDS], 2, WITH_ADAM),
    "turns": Case(f"stages=[2,1] {STAGES} shard_optimizer=true", [FIRST, FIRST, SECOND], 1, WITH_MOMENTUM),
    "backward in halves": Case(f"stages=2 {STAGES} schedule=zero-bubble", [FIRST, SECOND], 1, WITH_MOMENTUM),
}


def normalised() -> nn.Module:
    """Two stages with running statistics."""
    first = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
    return nn.Sequential(first, nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5)).double()


def with_holes(output: Tensor, target: Tensor) -> Tensor:
    """Not finite for some micro-batches."""
    loss = F.cross_entropy(output, target)
    return loss * float("nan") if int(target.sum()) % 5 == 1 else loss


def whole_tensors(words: str, engine: Any) -> Run:
    """By an optimizer that looks at whole tensors, with running statistics, where some Δs are discarded."""
    program = Program(
        model=normalised,
        loss=with_holes,
        train=(zoo.numbers(24, 8), torch.arange(24) * 7 % 5),
        optimizer=functools.partial(Lamb, lr=0.05),
        batch_size=4,
        seed=5,
    )
    strategy = f"replicas=2 stages=2 micro_batches=2 cuts=1 {words}"
    return train(program, strategy, engine=engine, steps=STEPS, progress=False, on_nonfinite="skip")


def held(run: Run) -> Mapping[str, list[int]]:
    """What each worker has measured."""
    names = ("parameter_bytes", "optimizer_bytes", "peak_saved_bytes")
    return {name: run.summary[name] for name in names}

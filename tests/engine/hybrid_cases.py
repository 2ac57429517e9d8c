"""Replicas of stages of shards that a whole engine trains, and what they must equal."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from paceline import Program, Run, train
from tests import zoo
from tests.engine.pipeline_cases import ADAM, MOMENTUM, quiet

STEPS = 5
REPLICAS = 2
BATCH = 2
"""Samples of a replica and step. There are 6, so that in every second step one replica has some and the other none."""


@dataclass(frozen=True)
class Case:
    """One run; its strategy lacks the mesh."""

    job: Callable[[], zoo.Job]
    strategy: str = ""
    fields: dict[str, Any] = field(default_factory=dict)

    def program(self, **fields: Any) -> Program:
        """Without dropout."""
        model, inputs, targets, loss = self.job()
        usual: dict[str, Any] = {"optimizer": MOMENTUM, "batch_size": BATCH, "seed": 5}
        made = partial(quiet, model)
        return Program(model=made, loss=loss, train=(inputs, targets), **usual | self.fields | fields)

    def run(self, mesh: str, engine: Any, **settings: Any) -> Run:
        """On a mesh: ``replicas=2 stages=2 shards=2``."""
        strategy = f"{mesh} micro_batches=2 {self.strategy}"
        return train(self.program(), strategy, engine=engine, progress=False, **{"steps": STEPS} | settings)

    def one_process(self) -> Run:
        """On what all replicas see together."""
        program = self.program(batch_size=REPLICAS * BATCH)
        kept = " ".join(word for word in self.strategy.split() if word.startswith("accumulate"))
        return train(program, f"replicas=1 {kept}", engine="virtual", steps=STEPS, progress=False)


CASES: dict[str, Case] = {
    "gpt2": Case(zoo.gpt2),
    "tied": Case(zoo.tied, fields={"clip_norm": 0.1}),
    "encoder": Case(zoo.encoder),
    "inception": Case(zoo.inception),
    "adam": Case(zoo.mlp, fields={"optimizer": ADAM}),
    "accumulated": Case(zoo.tied, "accumulate=2", {"clip_norm": 0.1}),
    "divided": Case(zoo.mlp, "shard_optimizer=true", {"optimizer": ADAM, "clip_norm": 0.1}),
}
"""Equal to one process."""

NORMALISED: dict[str, Case] = {
    "resnet": Case(zoo.resnet, fields={"batch_size": 4, "clip_norm": 0.5}),
}
"""Equal to replicas of stages whose operators are whole: a BatchNorm normalises by its own micro-batch."""

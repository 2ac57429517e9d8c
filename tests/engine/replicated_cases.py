"""Pipelines at whose stages several take turns, and what they must equal."""

from typing import Any

import torch.nn.functional as F
from torch import nn

from paceline import Run, Strategy, train
from tests import zoo
from tests.engine.hybrid_cases import STEPS, Case
from tests.engine.pipeline_cases import ADAM

BATCH = 4
"""Of 6 samples: every second batch is the smaller one, of 2, which makes fewer micro-batches than some stages have
columns."""


def images() -> zoo.Job:
    """A CNN without running statistics."""

    def model() -> nn.Module:
        first = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU())
        second = nn.Sequential(nn.Conv2d(4, 8, 3, stride=2), nn.GroupNorm(2, 8), nn.ReLU())
        return nn.Sequential(first, second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)).double()

    return zoo.Job(model, zoo.numbers(zoo.SAMPLES, 1, 9, 9), zoo.classes(5), F.cross_entropy)


CASES: dict[str, Case] = {
    "tied": Case(zoo.tied, fields={"clip_norm": 0.1}),
    "gpt2": Case(zoo.gpt2, fields={"clip_norm": 0.5}),
    "cnn": Case(images),
}
"""With momentum."""

OTHERS: dict[str, Case] = {
    "accumulated": Case(zoo.tied, "accumulate=2"),
    "all forward first": Case(zoo.tied, "schedule=gpipe recompute=boundaries"),
    "one at a time": Case(zoo.mlp, "schedule=sequential"),
    "adam": Case(zoo.mlp, fields={"optimizer": ADAM}),
    "encoder": Case(zoo.encoder, fields={"clip_norm": 0.1}),
}


def trained(case: Case, mesh: str, engine: Any, **settings: Any) -> Run:
    """On a mesh; all replicas together see the batches of one process."""
    program = case.program(batch_size=BATCH // Strategy.parse(mesh).replicas)
    words = f"{mesh} {case.strategy}"
    return train(program, words, engine=engine, progress=False, **{"steps": STEPS} | settings)


def one_process(case: Case) -> Run:
    """Without micro-batches."""
    kept = " ".join(word for word in case.strategy.split() if word.startswith("accumulate"))
    program = case.program(batch_size=BATCH)
    return train(program, f"replicas=1 {kept}", engine="virtual", steps=STEPS, progress=False)

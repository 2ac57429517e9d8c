"""Pipelines that a whole engine trains, and the one process that they must equal."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

from paceline import Program, Run, train
from paceline.core.data_order import DataOrder
from paceline.engine.base import Engine
from paceline.replica.pipeline.micro_batches import micro_batch_sizes
from tests import zoo
from tests.oracle import Plain

STEPS = 5
"""Of 6 samples in batches of 4: every second batch is the smaller one, of 2."""

MOMENTUM = functools.partial(SGD, lr=0.05, momentum=0.9)
ADAM = functools.partial(Adam, lr=0.01)


def by_place(parameters: list[nn.Parameter]) -> SGD:
    """An optimizer that treats parameters by their place among all: the second group begins within a stage."""
    groups = [{"params": parameters[:3]}, {"params": parameters[3:], "lr": 0.2, "momentum": 0.5}]
    return SGD(groups, lr=0.05, momentum=0.9)


@dataclass(frozen=True)
class Case:
    """One run; its strategy lacks the stages."""

    job: Callable[[], zoo.Job]
    strategy: str = ""
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def program(self) -> Program:
        model, inputs, targets, loss = self.job()
        usual: dict[str, Any] = {"optimizer": MOMENTUM, "batch_size": 4, "seed": 5}
        data = (inputs, targets)
        return Program(model=functools.partial(quiet, model), loss=loss, train=data, **usual | self.fields)

    def run(self, stages: int, engine: str | Engine, more: str = "", **settings: Any) -> Run:
        strategy = f"stages={stages} {self.strategy} {more}"
        return train(self.program, strategy, engine=engine, steps=STEPS, progress=False, **settings)


def large() -> zoo.Job:
    """Tensors of more than 4,096 elements, whose gradients stay where autograd writes them; the ends share one."""
    return zoo.tied()._replace(model=lambda: zoo.Tied(80, 160).double())


CASES: dict[str, Case] = {
    "mlp": Case(zoo.mlp, "schedule=gpipe"),
    "one at a time": Case(zoo.mlp, "schedule=sequential", {"batch_size": 5}),
    "cnn": Case(zoo.cnn, "schedule=1f1b"),
    "unet": Case(zoo.unet, "schedule=zero-bubble", {"optimizer": ADAM, "clip_norm": 0.1}),
    "inception": Case(zoo.inception, "schedule=gpipe", {"optimizer": ADAM}),
    "encoder": Case(zoo.encoder, "schedule=1f1b recompute=all"),
    "tied": Case(zoo.tied, "schedule=1f1b", {"clip_norm": 0.1}),
    "masked": Case(zoo.masked, "schedule=interleaved"),
    "gpt2": Case(zoo.gpt2, "schedule=1f1b", {"optimizer": ADAM, "clip_norm": 0.5}),
    "bert": Case(zoo.bert, "schedule=gpipe recompute=boundaries"),
    "vit": Case(zoo.vit, "schedule=zero-bubble", {"optimizer": ADAM}),
    "resnet": Case(zoo.resnet, "schedule=1f1b recompute=boundaries"),
    "groups": Case(zoo.mlp, "schedule=1f1b", {"optimizer": by_place}),
    "large": Case(large, "schedule=1f1b"),
    "large halves": Case(large, "schedule=zero-bubble", {"optimizer": ADAM}),
}


def quiet(model: Callable[[], nn.Module]) -> nn.Module:
    """The model without dropout, whose masks depend on where a model is cut."""
    module = model()
    for part in module.modules():
        for name, value in vars(part).items():
            if name in ("p", "dropout", "attention_dropout", "dropout_prob") and isinstance(value, float):
                setattr(part, name, 0.0)
    return module


def one_process(program: Program, micro_batches: int) -> dict[str, Tensor]:
    """A plain loop over the same micro-batches: A at its end."""
    plain = Plain(program)
    order = DataOrder(zoo.SAMPLES, program.batch_size or 32, 1, program.seed)
    for k in range(STEPS):
        indices = torch.from_numpy(order.batch(0, k))
        total: dict[str, Tensor] = {}
        for rows in torch.split(indices, micro_batch_sizes(len(indices), micro_batches)):
            for name, gradient in plain.gradient(rows).items():
                total[name] = total.get(name, 0) + gradient * len(rows) / len(indices)
        plain.step(total)
    return plain.values()

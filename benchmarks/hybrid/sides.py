"""Who takes part, step by step, from the same A_0 on the same batch; torch's side of a mesh is in theirs.py."""

from abc import ABC, abstractmethod
from dataclasses import replace
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist
from kit.turns import Step
from meshes import OPTIMIZER, SAMPLES, Loss, Mesh, Size, data, program
from torch import Tensor

import paceline

ONE, OURS, THEIRS = "one process", "paceline", "torch"


class Side(ABC):
    """One of them, as one rank sees it."""

    @abstractmethod
    def step(self) -> None:
        """Forward, backward and the update."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """The parameters that this rank has, whole; all ranks ask for them together."""


class One(Side):
    """One process, while the others wait."""

    def __init__(self, size: Size) -> None:
        self._module = size.built()
        self._x, self._y = (each[:SAMPLES] for each in data())
        self._optimizer = OPTIMIZER(self._module.parameters())

    def step(self) -> None:
        if dist.get_rank() == 0:
            self._optimizer.zero_grad()
            torch.autograd.backward(Loss(self._module(self._x), self._y))
            self._optimizer.step()

    def state(self) -> dict[str, Tensor]:
        found = {name: parameter.detach().clone() for name, parameter in self._module.named_parameters()}
        for value in found.values():
            dist.broadcast(value, 0)
        return found


def ours(mesh: Mesh, size: Size, backend: str, steps: int, loop: Any) -> paceline.Run:
    """A run of the distributed engine, cut where torch's side is, if that is there.

    Args:
        mesh: all ranks.
        size: of the model.
        backend: carries what is sent.
        steps: that ``loop`` makes.
        loop: is given a step.
    """
    x, y = (each[:SAMPLES] for each in data())

    def batches(replica: int, replicas: int, seed: int) -> Any:
        return repeat((x.chunk(replicas)[replica], y.chunk(replicas)[replica]))

    def stepped(worker: Any) -> None:
        batch = next(worker.batches())  # the same again and again, as on the other sides
        step: Step = lambda: worker.step(batch)  # noqa: E731
        loop(step)

    given = replace(program(size), train=batches, global_batch_size=None, batch_size=SAMPLES // mesh.replicas)
    strategy = paceline.Strategy.parse(mesh.strategy)
    if mesh.stages > 1 and size.layers % mesh.stages == 0:
        each = size.layers // mesh.stages
        strategy = replace(strategy, cuts=tuple(f"layers.{first}" for first in range(each, size.layers, each)))
    return paceline.launch(
        stepped, given, strategy, engine=f"distributed:{backend}", steps=steps, evaluate_every=10**6, progress=False
    )


def whole(tensor: Tensor) -> Tensor:
    """All of it, where ranks have parts."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

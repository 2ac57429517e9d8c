"""Who takes part, step by step, from the same A_0 on the same mini-batch; Paceline's own side is in ours.py."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from job import OPTIMIZER, Job
from models import Loss, parts
from torch import Tensor, nn

from paceline import schedule

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")

ONE, OURS, THEIRS, THEIRS_ON_GLOO = "one process", "paceline", "torch", "torch on gloo"

BESIDE = {"zero-bubble": "1f1b"}
"""Paceline's own schedule that takes turns with one that torch does not have by the same rule."""

INSIDE = ("gpipe", "1f1b", "interleaved")
"""What torch has by the same rule."""


class Side(ABC):
    """One of them, as one rank sees it."""

    @abstractmethod
    def step(self) -> None:
        """All micro-batches, and the update."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """The parameters that this rank has; all ranks ask for them together."""

    def close(self) -> None:  # noqa: B027 (most have nothing to let go of)
        """It takes part no longer."""


class One(Side):
    """One process that goes through all micro-batches, while the others wait."""

    def __init__(self, job: Job) -> None:
        self._model, (x, y) = job.model.built(), job.model.batch(job.micro_batches)
        self._pieces = list(zip(x.chunk(job.micro_batches), y.chunk(job.micro_batches), strict=True))
        self._optimizer = OPTIMIZER(self._model.parameters())

    def step(self) -> None:
        if dist.get_rank():
            return
        self._optimizer.zero_grad()
        for a, b in self._pieces:
            torch.autograd.backward(Loss(self._model(a), b) / len(self._pieces))
        self._optimizer.step()

    def state(self) -> dict[str, Tensor]:
        for parameter in self._model.parameters():
            dist.broadcast(parameter.detach(), 0)
        return copied(self._model)


class Theirs(Side):
    """torch.distributed.pipelining, with stages written by hand.

    Args:
        name: of a schedule that torch has.
        job: what is trained.
        backend: carries what is sent.
    """

    def __init__(self, name: str, job: Job, backend: str) -> None:
        self._group, ranks, rank = dist.new_group(backend=backend), dist.get_world_size(), dist.get_rank()
        cut = dict(enumerate(parts(job.model.built(), schedule.parse(name).parts(ranks))))
        self._mine = {number: part for number, part in cut.items() if number % ranks == rank}
        self._pipeline = _pipeline(name, job, self._mine, len(cut), self._group)
        self._optimizer = OPTIMIZER([parameter for part in self._mine.values() for parameter in part.parameters()])
        x, y = job.model.batch(job.micro_batches)
        self._given: tuple[Tensor, ...] = (x,) if 0 in self._mine else ()
        self._wanted: dict[str, Any] = {"target": y} if len(cut) - 1 in self._mine else {}

    def step(self) -> None:
        self._optimizer.zero_grad()
        losses: list[Tensor] = []
        self._pipeline.step(*self._given, **self._wanted, losses=losses, return_outputs=False)
        self._optimizer.step()

    def state(self) -> dict[str, Tensor]:
        return {name: value for part in self._mine.values() for name, value in copied(part).items()}

    def close(self) -> None:
        dist.barrier()  # no socket closes before all have received
        dist.destroy_process_group(self._group)


def _pipeline(name: str, job: Job, mine: Mapping[int, nn.Module], count: int, group: Any) -> Any:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

    crosses, first = torch.empty(job.model.shape, requires_grad=True), torch.empty(job.model.shape)
    device = torch.device("cpu")
    stages = [
        PipelineStage(part, number, count, device, crosses if number else first, crosses, group=group)
        for number, part in mine.items()
    ]
    if name == "interleaved":
        return ScheduleInterleaved1F1B(list(stages), job.micro_batches, Loss)
    return {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[name](stages[0], job.micro_batches, Loss)


def copied(module: nn.Module) -> dict[str, Tensor]:
    """Its parameters as they are now."""
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def others(name: str, job: Job) -> dict[str, Side]:
    """All sides of a schedule but Paceline's own."""
    found: dict[str, Side] = {ONE: One(job)}
    if name in INSIDE:
        found[THEIRS] = Theirs(name, job, job.backend)
        if job.backend != "gloo":
            found[THEIRS_ON_GLOO] = Theirs(name, job, "gloo")
    return found

"""Who takes part, step by step, from the same A_0 on the same batch; Paceline's own side is in ours.py."""

import functools
from abc import ABC, abstractmethod

import torch
import torch.distributed as dist
from models import Loss, Row
from torch import Tensor, nn

ONE, OURS, THEIRS, UNSENT = "one process", "paceline", "DTensor", "nothing sent"

OPTIMIZER = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Side(ABC):
    """One of them, as one rank sees it."""

    @abstractmethod
    def step(self) -> None:
        """Forward, backward and the update."""

    @abstractmethod
    def forward(self) -> None:
        """Of a single sample, without gradients."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """All parameters, whole; all ranks ask for them together."""


class Plain(Side):
    """A module, trained as it is.

    Args:
        module: at A_0.
        row: gives the batch.
    """

    def __init__(self, module: nn.Module, row: Row) -> None:
        self._module, (self._x, self._y) = module, row.batch()
        self._sample = self._x[:1]
        self._optimizer = OPTIMIZER(module.parameters())

    def step(self) -> None:
        self._optimizer.zero_grad()
        torch.autograd.backward(Loss(self._module(self._x), self._y))
        self._optimizer.step()

    @torch.no_grad()
    def forward(self) -> None:
        self._module(self._sample)

    def state(self) -> dict[str, Tensor]:
        return {name: _whole(parameter.detach()).clone() for name, parameter in self._module.named_parameters()}


class One(Side):
    """One process, while the others wait."""

    def __init__(self, row: Row) -> None:
        self._plain = Plain(row.built(), row)

    def step(self) -> None:
        if dist.get_rank() == 0:
            self._plain.step()

    def forward(self) -> None:
        if dist.get_rank() == 0:
            self._plain.forward()

    def state(self) -> dict[str, Tensor]:
        found = self._plain.state()
        for value in found.values():
            dist.broadcast(value, 0)
        return found


def theirs(row: Row) -> Side | None:
    """torch's parallelize_module, on Gloo; None: it can't divide this model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

    if row.dtensor is None:
        return None
    module, ranks = row.built(), dist.get_world_size()
    kinds = {"column": ColwiseParallel, "row": RowwiseParallel}
    plan: dict[str, ParallelStyle] = {name: kinds[way]() for name, way in row.dtensor(module).items()}
    if isinstance(heads := getattr(module, "heads", None), int):
        module.heads = heads // ranks  # those of one rank: torch leaves that to whoever writes the model
    return Plain(parallelize_module(module, init_device_mesh("cpu", (ranks,)), plan), row)


def _whole(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

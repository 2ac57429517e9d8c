"""What a turn trains, and what it gives."""

import functools
from typing import NamedTuple

import torch
from models import SIZES, Size
from torch import Tensor

WARM_UP = 2
"""Steps that do not count."""

OPTIMIZER = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Job(NamedTuple):
    """Steps of one model on one mini-batch."""

    size: str
    steps: int
    """That count."""
    micro_batches: int
    backend: str = "gloo"
    """Carries what is sent between stages."""

    @property
    def model(self) -> Size:
        """What is trained."""
        return SIZES[self.size]

    @property
    def all_steps(self) -> int:
        """With those that don't count."""
        return WARM_UP + self.steps


class Turn(NamedTuple):
    """What one turn gave on this rank."""

    times: list[float]
    """Seconds of each step that counts."""
    state: dict[str, Tensor]
    """Parameters at the end, by name: all, or those that this rank has."""

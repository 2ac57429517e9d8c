"""What is trained, in which pieces, and on what."""

import functools
from typing import NamedTuple

import torch
from models import SIZES, Size

OPTIMIZER = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Job(NamedTuple):
    """Steps of one model on one mini-batch."""

    size: str
    micro_batches: int
    backend: str = "gloo"
    """Carries what is sent between stages."""

    @property
    def model(self) -> Size:
        """What is trained."""
        return SIZES[self.size]

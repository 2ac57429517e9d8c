"""Those who take turns at one stage: the contract that engines fulfil, and what is made with it.

Each has done its own micro-batches; so of a gradient, of a loss and of the statistics of a mini-batch each has a term.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor


class Copies(ABC):
    """One stage's, as one of them sees them; each has the same part of A.

    Args:
        first: whether it has the first micro-batch: of a batch too small for all, it has something to do.
    """

    def __init__(self, *, first: bool) -> None:
        self.first = first

    @abstractmethod
    def add_up(self, vector: Tensor, what: str) -> None:
        """Let a vector be its sum over all of them, who call it together.

        Args:
            vector: of the same length for all.
            what: in words that follow "waited for".
        """


def add_up(tensors: Sequence[Tensor], copies: Copies, what: str) -> None:
    """Let each tensor be its sum, with one message for each dtype."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        own = [tensor for tensor in tensors if tensor.dtype == dtype]
        total = torch.cat([tensor.reshape(-1) for tensor in own])
        copies.add_up(total, what)
        for tensor, found in zip(own, torch.split(total, [tensor.numel() for tensor in own]), strict=True):
            tensor.copy_(found.view_as(tensor))


def of_first(tensors: Sequence[Tensor], copies: Copies, what: str) -> None:
    """Let each tensor be what the first of them has."""
    if not copies.first:
        for tensor in tensors:
            tensor.zero_()
    add_up(tensors, copies, what)

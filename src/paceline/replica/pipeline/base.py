"""What a cut model consists of, and the contracts by which its workers communicate.

How values go from one worker of a pipeline to another: the contract that engines fulfil.

Those who take turns at one stage: the contract that engines fulfil, and what is made with it.

Each has done its own micro-batches; so of a gradient, of a loss and of the statistics of a mini-batch each has a term.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.fx import GraphModule

from paceline.replica.capture.capture import Captured


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value that one part makes and later parts need."""

    name: str
    """Of the node that makes it."""
    source: int
    consumers: tuple[int, ...]
    """Parts, ascending."""


@dataclass(frozen=True)
class Part:
    """A contiguous piece of a model."""

    number: int
    module: GraphModule
    """With the tensors that it uses alone, under their full names. Its forward takes ``inputs``, then ``received``; it
    returns a tuple of ``sent`` and, if it is the last part, of the leaves of the model's output."""
    inputs: tuple[int, ...]
    """Which leaves of the model's input it takes."""
    received: tuple[Crossing, ...]
    sent: tuple[Crossing, ...]


@dataclass(frozen=True)
class Cut:
    """All parts of a model."""

    captured: Captured
    parts: tuple[Part, ...]
    tied: Mapping[str, tuple[int, ...]]
    """The parameters that several parts hold, by full name: which parts."""


class Arrival(ABC):
    """A tensor that is expected."""

    @abstractmethod
    def take(self) -> Tensor:
        """The tensor, once it is there."""


class P2P(ABC):
    """One worker's.

    Two workers send and expect in one order that both know, since each knows the other's schedule: so messages need no
    names.
    """

    @abstractmethod
    def send(self, tensor: Tensor, to: int, what: str) -> None:
        """Begin to send; the tensor must stay as it is until :meth:`settle`.

        Args:
            tensor: contiguous.
            to: a worker of the same replica.
            what: in words that follow "waited for".
        """

    @abstractmethod
    def expect(self, shape: Sequence[int], dtype: torch.dtype, source: int, what: str) -> Arrival:
        """Begin to receive."""

    @abstractmethod
    def settle(self, but: int = 0) -> None:
        """Wait until all that was sent has gone, but the newest so many."""


@final
class NoP2P(P2P):
    """That of a pipeline of one worker, who has nobody to send to."""

    def send(self, tensor: Tensor, to: int, what: str) -> None:
        del tensor
        raise AssertionError(f"{what} is for worker {to}, and there is but one")

    def expect(self, shape: Sequence[int], dtype: torch.dtype, source: int, what: str) -> Arrival:
        del shape, dtype
        raise AssertionError(f"{what} is from worker {source}, and there is but one")

    def settle(self, but: int = 0) -> None:
        """Nothing was sent."""


class StageReplicaGroup(ABC):
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


def add_up(tensors: Sequence[Tensor], copies: StageReplicaGroup, what: str) -> None:
    """Let each tensor be its sum, with one message for each dtype."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        own = [tensor for tensor in tensors if tensor.dtype == dtype]
        total = torch.cat([tensor.reshape(-1) for tensor in own])
        copies.add_up(total, what)
        for tensor, found in zip(own, torch.split(total, [tensor.numel() for tensor in own]), strict=True):
            tensor.copy_(found.view_as(tensor))


def of_first(tensors: Sequence[Tensor], copies: StageReplicaGroup, what: str) -> None:
    """Let each tensor be what the first of them has."""
    if not copies.first:
        for tensor in tensors:
            tensor.zero_()
    add_up(tensors, copies, what)

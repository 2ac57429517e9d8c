"""Contracts of pipelines: a cut model, point-to-point messages between workers, and the replicas of one stage.

Replicas of a stage take turns: each runs its own micro-batches. So each has a term of every gradient, of the loss and
of the statistics of a mini-batch, and all of them are summed.

::

    input leaves --> part 0 --a--> part 1 --b--> part 2 --> output
                        `------------c------------^          c: straight from its producer to its consumer

Later parts need what earlier ones make, never the other way round.
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
    """A value that one part computes and later parts read."""

    name: str
    """Name of the node that computes it."""
    source: int
    consumers: tuple[int, ...]
    """Parts, ascending."""


@dataclass(frozen=True)
class Part:
    """A contiguous part of a model."""

    number: int
    module: GraphModule
    """Holds the tensors that the part uses, under their full names. Its forward takes ``inputs``, then ``received``; it
    returns a tuple of ``sent`` and, if it is the last part, of the leaves of the model's output."""
    inputs: tuple[int, ...]
    """Indices of the leaves of the model's input that it reads."""
    received: tuple[Crossing, ...]
    sent: tuple[Crossing, ...]


@dataclass(frozen=True)
class Cut:
    """All parts of a model."""

    captured: Captured
    parts: tuple[Part, ...]
    tied: Mapping[str, tuple[int, ...]]
    """Full names of the parameters that several parts hold -> those parts."""


class PendingRecv(ABC):
    """A receive that has been posted."""

    @abstractmethod
    def wait(self) -> Tensor:
        """Return the tensor once it has arrived."""


class P2P(ABC):
    """Non-blocking messages of one worker to and from the others of its replica.

    Two workers post their sends and receives in one order, which both derive from the schedule; so messages carry no
    tags.
    """

    @abstractmethod
    def isend(self, tensor: Tensor, destination: int, description: str) -> None:
        """Begin to send; the tensor must stay as it is until :meth:`wait_sends`.

        Args:
            tensor: contiguous.
            destination: a worker of the same replica.
            description: the message in words that follow "waited for".
        """

    @abstractmethod
    def irecv(self, shape: Sequence[int], dtype: torch.dtype, source: int, description: str) -> PendingRecv:
        """Post a receive."""

    @abstractmethod
    def wait_sends(self, newest: int = 0) -> None:
        """Wait until all sends have completed, except for the ``newest`` ones."""


@final
class NoP2P(P2P):
    """The messages of a pipeline of one worker: none."""

    def isend(self, tensor: Tensor, destination: int, description: str) -> None:
        del tensor
        raise AssertionError(f"{description} is for worker {destination}, and there is but one")

    def irecv(self, shape: Sequence[int], dtype: torch.dtype, source: int, description: str) -> PendingRecv:
        del shape, dtype
        raise AssertionError(f"{description} is from worker {source}, and there is but one")

    def wait_sends(self, newest: int = 0) -> None:
        """Return at once."""


class StageReplicaGroup(ABC):
    """The replicas of one stage, as one of them sees them; each holds the same part of A.

    Args:
        first: whether this is the one with the first micro-batch: it has some even if a batch is too small for all.
    """

    def __init__(self, *, first: bool) -> None:
        self.first = first

    @abstractmethod
    def all_reduce(self, vector: Tensor, description: str) -> None:
        """Replace a vector by its sum over all replicas, which call this together.

        Args:
            vector: of the same length on all of them.
            description: the sum in words that follow "waited for".
        """


def all_reduce(tensors: Sequence[Tensor], replicas: StageReplicaGroup, description: str) -> None:
    """Replace each tensor by its sum over the replicas, with one message for each dtype."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        own = [tensor for tensor in tensors if tensor.dtype == dtype]
        total = torch.cat([tensor.reshape(-1) for tensor in own])
        replicas.all_reduce(total, description)
        for tensor, summed in zip(own, torch.split(total, [tensor.numel() for tensor in own]), strict=True):
            tensor.copy_(summed.view_as(tensor))


def broadcast_first(tensors: Sequence[Tensor], replicas: StageReplicaGroup, description: str) -> None:
    """Replace each tensor by that of the first replica."""
    if not replicas.first:
        for tensor in tensors:
            tensor.zero_()
    all_reduce(tensors, replicas, description)

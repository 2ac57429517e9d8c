"""What every replica is, wherever its Δ is computed."""

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.core.delta import Accumulated, Change, Delta, Distance
from paceline.core.types import Clock
from paceline.program import Tree
from paceline.replica.flat_state import FlatState


class Batch(NamedTuple):
    """The data D of one micro-step."""

    input: Tree
    target: Tree
    samples: int
    """0: nothing fell to this replica in the data's last round; Δ is then zero."""


class Measured(NamedTuple):
    """What is known of a Δ beside its values."""

    loss: float
    """Mean over its samples; NaN where it has none."""
    samples: int
    finite: bool
    micro: "Micro | None" = None
    """What its micro-steps were each by itself, where that was asked for."""


class Micro(NamedTuple):
    """The gradients of a Δ's micro-steps, n_k samples each and n together."""

    square: float
    """Σ n_k/n · |g_k|²."""
    pieces: int
    """How many had samples."""


class Replica(ABC):
    """Computes Δ(A, D) in one or more micro-steps: adopt, advance, ..., advance, finish."""

    @abstractmethod
    def adopt(self, state: FlatState) -> None:
        """Take the A that was sent; ``state`` stays unchanged until :meth:`finish` has returned."""

    @abstractmethod
    def advance(self, batch: Batch, clock: Clock) -> float:
        """One micro-step, seeded by (program seed, replica, ``clock`` of the micro-step); returns its mean loss."""

    @abstractmethod
    def finish(self, out: FlatState) -> Measured:
        """Write Δ, and the buffers as they are now, into ``out``."""


class Sink(ABC):
    """Is given the gradients of a Δ one by one, each once it is final, while a backward pass still makes the others."""

    @abstractmethod
    def last(self) -> bool:
        """Whether the micro-step that begins is the last of its Δ."""

    @abstractmethod
    def ready(self, index: int, gradient: Tensor, samples: int) -> None:
        """A gradient is final; each is told of once for each Δ, in any order.

        Args:
            index: of the parameter, in the layout's order.
            gradient: read at once, or not at all.
            samples: of the whole Δ.
        """


def micro_steps(delta: Delta) -> int:
    """How many batches one Δ takes.

    >>> micro_steps(Accumulated(4)), micro_steps(Change(16))
    (4, 16)
    """
    if isinstance(delta, Accumulated):
        return delta.micro_steps
    return delta.steps if isinstance(delta, (Change, Distance)) else 1


def finite(vectors: list[Tensor], loss: float) -> bool:
    """Whether a loss and all elements are finite. One pass: a sum is finite if all it adds are."""
    if not math.isfinite(loss):
        return False
    return all(math.isfinite(abs(v.sum().item())) or bool(torch.isfinite(v).all()) for v in vectors)

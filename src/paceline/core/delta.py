"""Kinds of Δ, and of how a replica adopts the A that it receives: the vocabulary that policies and replicas share."""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Gradient:
    """Δ is the gradient of the mean loss of one batch."""


@dataclass(frozen=True, slots=True)
class Accumulated:
    """Δ is the gradient of the mean loss over ``micro_steps`` consecutive batches, all at one A."""

    micro_steps: int


@dataclass(frozen=True, slots=True)
class Change:
    """Δ is x - x_read: the distance that ``steps`` own optimizer steps moved the parameters from the A read.

    With several ``fragments`` Δ is that of one of as many parts of A, number t mod ``fragments`` for the Δ of A_t; the
    replica takes over what of A has changed, and the other parts of x stay as they are.
    """

    steps: int
    fragments: int = 1
    overlap: int = 0
    """Own steps after which the replica takes A over: they are made while it is summed."""


@dataclass(frozen=True, slots=True)
class Distance:
    """Δ is x - A: how far the replica's own parameters, after ``steps`` own steps, are from A as it is then."""

    steps: int


@dataclass(frozen=True, slots=True)
class InPlace:
    """Replicas share A and write it themselves, step by step: there is no Δ to send (Hogwild)."""


Delta: TypeAlias = Gradient | Accumulated | Change | Distance | InPlace


@dataclass(frozen=True, slots=True)
class Replace:
    """x becomes A."""


@dataclass(frozen=True, slots=True)
class Mix:
    """x becomes x - alpha * (x - A)."""

    alpha: float


@dataclass(frozen=True, slots=True)
class Keep:
    """x stays as it is."""


@dataclass(frozen=True, slots=True)
class Rebase:
    """x becomes A + (x - x_read): A lacks the Δ that was sent last, and no other of the replica's."""


Adopt: TypeAlias = Replace | Mix | Keep | Rebase

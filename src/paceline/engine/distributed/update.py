"""What one rank has of A.

How the Δs that ranks bring become the next A on each of them: the contract, and the plainest way.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import Tensor

from paceline.compression import Compression
from paceline.engine.distributed.reduce_buffer import ReduceBuffer
from paceline.engine.server_optimizer import ServerOptimizer
from paceline.engine.spmd.communicator import Communicator
from paceline.replica.flat_optimizer import FlatOptimizer
from paceline.replica.flat_state import FlatLayout, FlatState


class StateGather(Protocol):
    """How A is made of the parts of all ranks."""

    def __call__(self, *, wanted: bool) -> FlatState | None:
        """A copy of A where it is wanted, None elsewhere; all ranks call it together."""


@dataclass(frozen=True)
class ShardState:
    """One rank's.

    Args:
        state: its part of A.
        whole: the layout of A.
        counted: the names of the parameters that count here in the norm of Δ: what several parts have counts once.
        gather: makes A of all ranks' parts.
    """

    state: FlatState
    whole: FlatLayout
    counted: Sequence[str]
    gather: StateGather


def all_of(state: FlatState) -> ShardState:
    """Where every rank has all of A."""

    def copied(*, wanted: bool) -> FlatState | None:
        return state.clone() if wanted else None

    return ShardState(state, state.layout, state.layout.parameter_names, copied)


class Update(ABC):
    """One rank's part in each update of A."""

    @property
    @abstractmethod
    def reduced_vectors(self) -> list[Tensor]:
        """What is all-reduced whenever ranks meet; with all ranks' rows."""

    @property
    @abstractmethod
    def optimizer_bytes(self) -> int:
        """Of what the optimizer remembers here."""

    @abstractmethod
    def apply(self, factor: float, rate: float) -> None:
        """One update of A by ``factor`` · Σ Δ.

        The freight holds what ranks have met over, and the running buffers of the new A.

        Args:
            factor: makes of the sum what F asks for.
            rate: times the learning rate.
        """

    @abstractmethod
    def full_state(self, *, wanted: bool) -> FlatState | None:
        """A copy of A where it is wanted, None elsewhere; all ranks call it together."""


@final
class ReplicatedUpdate(Update):
    """Δs are summed as ranks meet, and each rank makes the whole update."""

    def __init__(self, freight: ReduceBuffer, owner: ServerOptimizer) -> None:
        self._freight, self._owner = freight, owner

    @property
    def reduced_vectors(self) -> list[Tensor]:
        return self._freight.vectors

    @property
    def stepper(self) -> FlatOptimizer:
        """Steps on A."""
        return self._owner.stepper

    @property
    def optimizer_bytes(self) -> int:
        return self._owner.stepper.nbytes

    def apply(self, factor: float, rate: float) -> None:
        self._owner.apply([(self._freight.state, factor)], rate, alone=True)

    def full_state(self, *, wanted: bool) -> FlatState | None:
        return self._owner.state.clone() if wanted else None


@final
class CompressedUpdate(Update):
    """Ranks meet over what must be exact; Δs are summed by a compression once an update is certain.

    So what a compression keeps for the next gradient moves on once an update, also where a round is made again.
    """

    def __init__(
        self, freight: ReduceBuffer, owner: ServerOptimizer, compression: Compression[Any], communicator: Communicator
    ) -> None:
        self._freight, self._compression, self._communicator = freight, compression, communicator
        self._whole = ReplicatedUpdate(freight, owner)
        self._states = [
            compression.start([tuple(e.shape) for e in block.entries], block.dtype)
            for block in freight.state.layout.parameters
        ]

    @property
    def reduced_vectors(self) -> list[Tensor]:
        return self._freight.tails

    @property
    def optimizer_bytes(self) -> int:
        return self._whole.optimizer_bytes

    def apply(self, factor: float, rate: float) -> None:
        communicator = self._communicator
        for state, vector in zip(self._states, self._freight.state.parameters, strict=True):
            communicator.sent_bytes += self._compression.all_reduce(state, vector, communicator.group.handle)
        self._whole.apply(factor, rate)

    def full_state(self, *, wanted: bool) -> FlatState | None:
        return self._whole.full_state(wanted=wanted)


def take_buffers(state: FlatState, brought: FlatState) -> None:
    """Let A's running buffers be what was brought; whole numbers never go back."""
    for mine, theirs in zip(state.buffers, brought.buffers, strict=True):
        mine.copy_(theirs if mine.is_floating_point() else torch.maximum(mine, theirs))

"""The step from Σ Δ to the next A on each rank: the contract, the replicated update, and that of a part of A."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from paceline.aggregation.base import Aggregation
from paceline.checkpoint.base import TensorChunk
from paceline.compression import Compression
from paceline.core.delta import Change, Distance
from paceline.core.types import Version
from paceline.device import CPU
from paceline.engine.distributed.exchange import ModelParallelSync
from paceline.engine.distributed.reduce_buffer import ReduceBuffer
from paceline.engine.server_optimizer import ServerOptimizer, update_rule
from paceline.engine.spmd.communicator import Communicator
from paceline.program import Program
from paceline.replica.autograd import GradientHandoff
from paceline.replica.flat_optimizer import FlatOptimizer
from paceline.replica.flat_state import FlatLayout, FlatState
from paceline.replica.gradient_clipping import (
    clip_by_square,
    clip_on_device,
    clip_scale,
    has_float64,
    square_norm,
    square_norm_on_device,
)
from paceline.replica.optimizer_factory import optimizer_of_part
from paceline.replica.own_parameters import fragments_of


@dataclass(frozen=True)
class ShardState:
    """The part of A that one rank has.

    Args:
        state: the part.
        full_layout: of A.
        counted: the parameters that count on this rank in the norm of Δ; one that several ranks have counts once.
    """

    state: FlatState
    full_layout: FlatLayout
    counted: Sequence[str]


class Update(ABC):
    """One rank's part in each update of A."""

    reduced_vectors: list[Tensor]
    """The parts of the reduce buffer that are all-reduced in the exchange of a step, the status table among them."""
    optimizer: FlatOptimizer | None = None
    """Steps on this rank's part of A; None: it has no parameters, or its replica steps by itself."""

    @abstractmethod
    def apply(self, factor: float, rate: float, version: Version) -> None:
        """Update A by ``factor`` · Σ Δ, after the exchange; the buffer has the running buffers of the new A.

        Args:
            factor: makes of the sum the combination that F asks for.
            rate: multiplies the learning rate.
            version: of A before the update.
        """


@final
class ReplicatedUpdate(Update):
    """Every rank has A and makes the whole update.

    With a compression, the exchange sums only what must be exact, and Δ is summed by the compression once an update is
    certain: so its error feedback moves once an update, also where a round is repeated.

    Args:
        buffer: holds Σ Δ after the exchange.
        owner: A and its optimizer.
        compression: sums Δ; None: the exchange does.
        communicator: of all ranks, for a compression.
    """

    def __init__(
        self,
        buffer: ReduceBuffer,
        owner: ServerOptimizer,
        compression: Compression[Any] | None = None,
        communicator: Communicator | None = None,
    ) -> None:
        self._buffer, self._owner, self._compression, self._communicator = buffer, owner, compression, communicator
        self.reduced_vectors = buffer.vectors if compression is None else buffer.tails()
        self.optimizer = owner.flat_optimizer
        self._compressed = list[tuple[Any, Tensor]]()
        if compression is not None and communicator is not None:
            self._compressed = [
                (compression.start([tuple(e.shape) for e in block.entries], block.dtype, communicator.device), vector)
                for block, vector in zip(buffer.state.layout.parameters, buffer.state.parameters, strict=True)
            ]

    def kept(self) -> tuple[list[TensorChunk], dict[str, Tensor]]:
        """Return what the compression keeps: residuals by full names of parameters, and by name what all ranks have."""
        residuals, shared = list[TensorChunk](), dict[str, Tensor]()
        blocks = self._buffer.state.layout.parameters
        for block, (state, _) in zip(blocks, self._compressed, strict=False):
            assert self._compression is not None, "it has made the state"
            residual, same = self._compression.kept(state)
            dtype = str(block.dtype).removeprefix("torch.")
            shared |= {f"{dtype}/{name}": tensor for name, tensor in same.items()}
            if residual is not None:
                views = zip(block.entries, block.views(residual), strict=True)
                residuals += [TensorChunk.whole(entry.name, view) for entry, view in views]
        return residuals, shared

    def apply(self, factor: float, rate: float, version: Version) -> None:
        if self._compression is not None and self._communicator is not None:
            group = self._communicator.group.handle
            for state, vector in self._compressed:
                moved = self._communicator.to_device(vector)
                self._communicator.traffic.sent_bytes += self._compression.all_reduce(state, moved, group)
                if moved is not vector:
                    vector.copy_(moved)
        self._owner.apply([(self._buffer.state, factor)], rate, alone=True, version=version)


@final
class ModelParallelUpdate(Update):
    """Each rank of a replica steps on its part of A.

    Args:
        program: gives optimizer, scheduler and clipping.
        policy: says what a Δ is.
        buffer: holds Σ Δ of this part.
        shard: this part of A.
        sync: knows the norm of the whole Δ.
        by_tensor: whether gradients may stay outside the buffer; see :attr:`handoff`.
    """

    def __init__(
        self,
        program: Program,
        policy: Aggregation[Any],
        buffer: ReduceBuffer,
        shard: ShardState,
        sync: ModelParallelSync,
        *,
        by_tensor: bool = False,
    ) -> None:
        self._buffer, self._state, self._sync = buffer, shard.state, sync
        self._moves = isinstance(policy.delta, (Change, Distance))
        self._clip_norm = None if self._moves else program.clip_norm
        self._fragments = fragments_of(policy.delta, shard.full_layout, shard.state.layout)
        self.reduced_vectors = []
        if shard.state.parameters:
            rule, schedule = update_rule(program, policy)
            make = optimizer_of_part(rule, shard.full_layout, shard.state.layout)
            self.optimizer = FlatOptimizer(make, schedule, shard.state, buffer.state)
        in_place = by_tensor and self._clip_norm is None
        self.handoff = GradientHandoff() if in_place and self.optimizer and self.optimizer.has_kernel else None
        """Takes the gradients, tensor by tensor; None: they are written into the buffer."""

    def apply(self, factor: float, rate: float, version: Version) -> None:
        gradients, square = self._buffer.state.parameters, self._sync.square
        if self._clip_norm is not None:
            if isinstance(square, Tensor):
                clip_on_device(gradients, square * factor**2, self._clip_norm)
            else:
                factor *= clip_scale(square * factor**2, self._clip_norm)
        factor = -factor if self._moves else factor
        if self.optimizer is not None and self.handoff is not None:
            self.optimizer.step_by_tensor(self.handoff.gradients, rate, weight=factor)
        elif self.optimizer is not None and self.optimizer.has_kernel:
            slices = self._fragments[version % len(self._fragments)] if self._fragments else None
            consumes = self._state.device != CPU
            self.optimizer.step(gradients, rate, weight=factor, slices=slices, consumes=consumes)
        elif self.optimizer is not None:
            torch._foreach_mul_(gradients, factor)
            self.optimizer.step(gradients, rate)
        self._buffer.copy_running_buffers(self._state)


def clip_across_ranks(
    gradients: list[Tensor], counted: Sequence[Tensor], bound: float, communicator: Communicator
) -> None:
    """Scale this rank's gradients so that the norm over all ranks' ``counted`` elements is at most ``bound``.

    Where collectives are a device's the norm stays on it, and the host does not wait.
    """
    if has_float64(communicator.device):
        square = square_norm_on_device(counted, communicator.device)
        clip_on_device(gradients, communicator.reduced(square, "the norm of Δ"), bound)
        return
    square = torch.tensor([square_norm(counted)], dtype=torch.float64)
    communicator.all_reduce([square], "the norm of Δ")
    clip_by_square(gradients, float(square), bound)

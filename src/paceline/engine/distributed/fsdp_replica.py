"""Δ and the update of a replica under ``shard_parameters=true``, whose gradients are summed within backward."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from paceline.core.errors import InputError
from paceline.core.types import Clock, Version
from paceline.engine.distributed.fsdp import FsdpModule
from paceline.engine.distributed.reduce_buffer import ReduceBuffer
from paceline.engine.distributed.update import Update, clip_across_ranks
from paceline.engine.spmd.communicator import Communicator
from paceline.program import Program
from paceline.replica.autograd import Autograd
from paceline.replica.base import Batch, Measured, Replica
from paceline.replica.flat_optimizer import FlatOptimizer
from paceline.replica.flat_state import FlatState
from paceline.replica.late_figures import LateFigures


@final
class FsdpUpdate(Update):
    """Each rank has its part of A, of Σ Δ and of the optimizer's state, and of nothing else.

    Args:
        program: gives optimizer, scheduler and clipping.
        module: this rank's part.
        buffer: contributes the running buffers.
        running: A's running buffers, which every rank has.
        communicator: of all ranks.
    """

    optimizer: FlatOptimizer

    def __init__(
        self, program: Program, module: FsdpModule, buffer: ReduceBuffer, running: FlatState, communicator: Communicator
    ) -> None:
        self._module, self._buffer, self._running, self._communicator = module, buffer, running, communicator
        self._clip_norm = program.clip_norm
        self.optimizer = FlatOptimizer(program.optimizer, program.scheduler, module.shard, module.gradient)
        self.reduced_vectors = buffer.tails()

    def apply(self, factor: float, rate: float, version: Version) -> None:
        del version
        gradients = self._module.take_gradients()
        torch._foreach_mul_(gradients, factor)
        if self._clip_norm is not None:
            clip_across_ranks(gradients, gradients, self._clip_norm, self._communicator)
        self.optimizer.step(gradients, rate)
        self._buffer.copy_running_buffers(self._running)


@final
@dataclass
class FsdpReplica(Replica):
    """Computes Δ on a sharded module; it writes the running buffers alone, since gradients are summed already.

    Args:
        _autograd: of the sharded module, its layout without parameters.
        _module: the parameters of that module.
        _weight: number of samples -> weight of such a batch in the sum.
    """

    _autograd: Autograd
    _module: FsdpModule
    _weight: Callable[[int], float]
    _losses: float = field(default=0.0, init=False)
    _unread: list[tuple[Tensor, int]] = field(default_factory=list, init=False)
    """Loss and samples of each micro-step of this Δ, where they are read late."""
    _samples: int = field(default=0, init=False)

    def adopt(self, state: FlatState) -> None:
        self._autograd.bind(state)
        self._losses, self._unread, self._samples = 0.0, [], 0
        self._module.begin_delta()

    def advance(self, batch: Batch, clock: Clock) -> float:
        if not batch.samples:
            return math.nan
        weight, loss = self._weight(batch.samples), math.nan
        try:
            if self._module.late:
                self._unread.append((self._autograd.differentiate(batch, clock, weight)[0], batch.samples))
            else:
                loss = self._autograd.backward(batch, clock, weight)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise InputError(
                "the model reads a parameter of a layer without calling that layer (as F.linear(x, self.head.weight)), "
                "but shard_parameters=True gathers a layer's parameters as it is called; call the layer, or write "
                "shard_optimizer=true instead"
            ) from error
        self._losses += loss * batch.samples
        self._samples += batch.samples
        return loss

    def finish(self, out: FlatState) -> Measured:
        with torch.no_grad():
            self._autograd.write_buffers(out)
        if not self._samples:
            return Measured(math.nan, 0, True)
        if self._module.late:
            return Measured(math.nan, self._samples, True, late=LateFigures(self._unread, self._module.largest))
        loss = self._losses / self._samples
        return Measured(loss, self._samples, self._module.all_finite() and math.isfinite(loss))

"""Synchronous training on divided parameters: Δ is summed as it is computed, and each rank steps on its part.

::

    rank 0   n0·loss --backward--> reduce-scatter of each layer --> its part of Σ n·Δ --+   rows of all -> policy
    rank 1   n1·loss --backward--> reduce-scatter of each layer --> its part of Σ n·Δ --+-> the same scale on all,
                                                                                            a step on each part

How many samples there are in all is known only when ranks meet after backward: so losses are weighed by their own
samples, and the sum is divided then.
"""

import math
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from paceline.core.errors import InputError
from paceline.core.types import Clock
from paceline.engine.distributed.divided import Divided
from paceline.engine.distributed.freight import Freight
from paceline.engine.distributed.update import Update, take_buffers
from paceline.engine.team.traffic import Traffic
from paceline.program import Program
from paceline.replica.autograd import Autograd
from paceline.replica.base import Batch, Measured, Replica
from paceline.replica.clipping import clip_scale, square_norm
from paceline.replica.state import State
from paceline.replica.stepper import Stepper


@final
class FullySharded(Update):
    """Each rank has its part of A, of Σ Δ and of the optimizer's state, and of nothing else.

    Args:
        program: gives optimizer, scheduler and clipping.
        divided: this rank's part.
        freight: brings the running buffers.
        running: A's running buffers, which every rank has.
        traffic: by which ranks meet.
    """

    def __init__(self, program: Program, divided: Divided, freight: Freight, running: State, traffic: Traffic) -> None:
        self._divided, self._freight, self._running, self._traffic = divided, freight, running, traffic
        self._clip_norm = program.clip_norm
        self._gradient = divided.like()
        self._stepper = Stepper(program.optimizer, program.scheduler, divided.part, self._gradient)

    @property
    def meeting(self) -> list[Tensor]:
        return self._freight.tails

    @property
    def optimizer_bytes(self) -> int:
        return self._stepper.nbytes

    def apply(self, factor: float, rate: float) -> None:
        self._divided.take_gradients(self._gradient)
        gradients = self._gradient.parameters
        torch._foreach_mul_(gradients, factor)
        if self._clip_norm is not None:
            square = torch.tensor([square_norm(gradients)], dtype=torch.float64)
            self._traffic.all_reduce([square], "the norm of Δ")
            torch._foreach_mul_(gradients, clip_scale(float(square), self._clip_norm))
        self._stepper.step(gradients, rate)
        take_buffers(self._running, self._freight.state)

    def whole(self, *, wanted: bool) -> State | None:
        found = self._divided.whole(wanted=wanted)
        if found is not None:
            for mine, running in zip(found.buffers, self._running.buffers, strict=True):
                mine.copy_(running)
        return found


@final
class Partial(Replica):
    """Computes Δ on a divided module; what it writes is the running buffers alone, since Δ is summed already.

    Args:
        autograd: of the divided module, its layout without parameters.
        divided: the parameters of that module.
        weigh: what a batch of so many samples counts in the sum.
    """

    def __init__(self, autograd: Autograd, divided: Divided, weigh: Callable[[int], float]) -> None:
        self._autograd, self._divided, self._weigh = autograd, divided, weigh
        self._losses = 0.0
        self._samples = 0

    def adopt(self, state: State) -> None:
        self._autograd.bind(state)
        self._losses, self._samples, self._divided.finite = 0.0, 0, True

    def advance(self, batch: Batch, clock: Clock) -> float:
        if not batch.samples:
            return math.nan
        loss = self._backward(batch, clock)
        self._losses += loss * batch.samples
        self._samples += batch.samples
        return loss

    def _backward(self, batch: Batch, clock: Clock) -> float:
        try:
            return self._autograd.backward(batch, clock, self._weigh(batch.samples))
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise InputError(
                "the model reads a parameter of a layer without calling that layer (as F.linear(x, self.head.weight)), "
                "but shard_parameters=True gathers a layer's parameters as it is called; call the layer, or write "
                "shard_optimizer=true instead"
            ) from error

    def finish(self, out: State) -> Measured:
        with torch.no_grad():
            self._autograd.write_buffers(out)
        if not self._samples:
            return Measured(math.nan, 0, True)
        loss = self._losses / self._samples
        return Measured(loss, self._samples, self._divided.finite and math.isfinite(loss))

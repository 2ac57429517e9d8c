"""Δ by shards: one shard, which computes its part of every gradient."""

import math
import time
import traceback
from typing import final

import torch
from torch import Tensor

from paceline.core.errors import PacelineError, WorkerError
from paceline.core.types import Clock, ReplicaId
from paceline.program import Program
from paceline.replica.activation_memory import StorageCounter
from paceline.replica.base import Batch, Measured, Replica, finite
from paceline.replica.flat_state import FlatLayout, FlatState
from paceline.replica.single import NO_RECORDER, Autograd, GradientHandoff, step_seed
from paceline.replica.tensor.placements import PARTIAL_GRAD
from paceline.replica.tensor.prepare import PreparedShard
from paceline.replica.tensor.tp_group import PartialGrads, TPCollectives
from paceline.trace.recorder import AnyRecorder


@final
class TensorParallel(Replica):
    """Δ is the gradient of the mean loss over a batch; each shard has the part of it that its parameters have.

    Args:
        program: says seed and precision.
        prepared: this shard of the model.
        shards: all of them.
        replica: whose they are.
        layout: of this shard's tensors.
        device: as torch writes it.
        recorder: of this shard's spans.
        micro_steps: calls of :meth:`advance` for one Δ.
        loose: takes the gradients, which then lie on the CPU; None: they are written into the slot.
    """

    def __init__(
        self,
        program: Program,
        prepared: PreparedShard,
        shards: TPCollectives,
        replica: ReplicaId,
        layout: FlatLayout,
        device: str = "cpu",
        *,
        recorder: AnyRecorder = NO_RECORDER,
        micro_steps: int = 1,
        loose: GradientHandoff | None = None,
    ) -> None:
        self._program, self._captured, self._shards = program, prepared.captured, shards
        self._replica, self._device, self._recorder, self._micro_steps = replica, device, recorder, micro_steps
        self._loose = loose
        self._module = prepared.shard.module
        self._tensors = Autograd(program, self._module, layout, replica, device)
        shared = [name for name, how in prepared.shard.parameters.items() if how == PARTIAL_GRAD]
        self._shared = PartialGrads(shards, layout, shared)
        self._losses, self._samples = 0.0, 0
        self._seen: set[tuple[torch.Size, ...]] = set()
        self.peak_saved_bytes = 0
        """The most that was kept for backward at one time, parameters, buffers and the batch itself not counted."""

    def adopt(self, state: FlatState) -> None:
        self._tensors.bind(state)
        self._losses, self._samples = 0.0, 0

    def advance(self, batch: Batch, clock: Clock) -> float:
        if not batch.samples:
            return math.nan
        torch.default_generator.manual_seed(step_seed(self._program.seed, self._replica, clock))
        self._shards.step = clock + 1
        try:
            value = self._pass(batch, clock)
        except PacelineError:
            raise
        except Exception as error:
            raise self._failed(error) from error
        self._losses += value * batch.samples
        self._samples += batch.samples
        return value

    def _pass(self, batch: Batch, clock: Clock) -> float:
        """Forward and backward; the mean loss."""
        weight = 1.0 if self._micro_steps == 1 else float(batch.samples)
        began = time.monotonic_ns()
        leaves = self._captured.flatten((batch.input, batch.target))
        with self._program.autocast(self._device):
            (loss,) = self._forward([leaf.to(self._device) for leaf in leaves])
        turned = time.monotonic_ns()
        (loss if weight == 1.0 else loss * weight).backward()  # type: ignore[no-untyped-call]
        value = float(loss.detach())
        self._recorder.record("forward", clock + 1, began, turned)
        self._recorder.record("backward", clock + 1, turned, time.monotonic_ns())
        return value

    def _forward(self, leaves: list[Tensor]) -> tuple[Tensor, ...]:
        """The loss; what is saved for backward is counted where shapes are new."""
        shapes = tuple(leaf.shape for leaf in leaves)
        if shapes in self._seen:
            made: tuple[Tensor, ...] = self._module(*leaves)
            return made
        counter = StorageCounter([*self._module.parameters(), *self._module.buffers(), *leaves])
        with counter.counting_saved():
            made = self._module(*leaves)
        self._seen.add(shapes)
        self.peak_saved_bytes = max(self.peak_saved_bytes, counter.nbytes)
        return made

    def _failed(self, error: Exception) -> WorkerError:
        told = "".join(traceback.format_exception(error))
        where = f"shard {self._shards.rank}, step {self._shards.step}"
        return WorkerError(f"{where}: {type(error).__name__}: {error}\n\n{told}")

    def finish(self, out: FlatState) -> Measured:
        gradients = self._tensors.take_gradients()
        with torch.no_grad():
            if self._samples:
                self._shared.all_reduce_(gradients)
            if self._micro_steps > 1 and self._samples:
                torch._foreach_div_(gradients, float(self._samples))
            if self._loose is not None:
                self._loose.gradients = gradients
            else:
                torch._foreach_copy_(out.views.parameters, gradients)
            self._tensors.write_buffers(out)
        if not self._samples:
            return Measured(math.nan, 0, True)
        loss = self._losses / self._samples
        vectors = out.parameters if self._loose is None else gradients
        return Measured(loss, self._samples, finite(vectors, loss))

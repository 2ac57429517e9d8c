"""Δ by tensor parallelism: one shard of a replica, which computes its part of every gradient."""

import functools
import math
import time
import traceback
from typing import final

import torch
from torch import Tensor

from paceline.core.errors import PacelineError, WorkerError
from paceline.core.types import Clock, Nanoseconds, ReplicaId
from paceline.device import moved, seed
from paceline.replica.activation_memory import ActivationMemory, StorageCounter
from paceline.replica.autograd import NO_RECORDER, Autograd, GradientHandoff, backpropagate, step_seed
from paceline.replica.base import Batch, Measured, Replica
from paceline.replica.capture.input_spec import shapes_of
from paceline.replica.compilation import CompiledPart
from paceline.replica.flat_state import FlatLayout, FlatState, finite
from paceline.replica.late_figures import LateFigures, zero_nonfinite
from paceline.replica.tensor.placements import PARTIAL_GRAD
from paceline.replica.tensor.prepare import PreparedShard
from paceline.replica.tensor.short_steps import ShortSteps
from paceline.replica.tensor.tp_group import PartialGrads
from paceline.trace.recorder import AnyRecorder, NullRecorder


@final
class TensorParallel(Replica):
    """One shard: Δ is the gradient of the mean loss over a batch, of which a shard has the part of its parameters.

    Args:
        prepared: this shard of the model.
        layout: layout of this shard's tensors.
        replica: id of the shards' replica.
        device: device, as torch writes it.
        recorder: records this shard's spans.
        micro_steps: calls of :meth:`advance` for one Δ.
        handoff: receives the gradients, on the CPU; None: they are copied into the buffer of Δ.
        compiled: the shard's compiled forward; None: its graph runs as it is.
        short: runs short steps as lists of operators; None: they are made as long ones are.
        late: whether loss and finite stay on the device for now: ``Measured.late``.
    """

    def __init__(
        self,
        prepared: PreparedShard,
        layout: FlatLayout,
        replica: ReplicaId,
        device: str = "cpu",
        *,
        recorder: AnyRecorder = NO_RECORDER,
        micro_steps: int = 1,
        handoff: GradientHandoff | None = None,
        compiled: CompiledPart | None = None,
        short: ShortSteps | None = None,
        late: bool = False,
    ) -> None:
        program, self._shards = prepared.program, prepared.shards
        self._seed, self._flatten = program.seed, prepared.captured.input_spec.flatten
        self._autocast = program.autocast(device)
        self._replica, self._device, self._micro_steps = replica, torch.device(device), micro_steps
        self._recorder = None if isinstance(recorder, NullRecorder) else recorder
        self._handoff, self._total_loss = handoff, prepared.loss
        self._module = prepared.shard.module
        self._compiled, self._run = compiled, self._module if compiled is None else compiled.function
        self._short, self._late = short, late
        self._unread = list[tuple[Tensor, int]]()
        """Loss and samples of each micro-step of this Δ, where they are read late."""
        self._autograd = Autograd(program, self._module, layout, replica, device)
        partial = [name for name, placement in prepared.shard.parameters.items() if placement == PARTIAL_GRAD]
        self._partial_grads = PartialGrads(self._shards, layout, partial) if partial else None
        self._loss_sum, self._samples = 0.0, 0
        self._seen_shapes: set[tuple[torch.Size, ...]] = set()
        self.memory = ActivationMemory()
        """Peak of what was saved for backward, without parameters, buffers and the batch itself."""

    @property
    def autograd(self) -> Autograd:
        """Computes the gradients."""
        return self._autograd

    def adopt(self, state: FlatState) -> None:
        self._autograd.bind(state)
        self._loss_sum, self._unread, self._samples = 0.0, [], 0

    def advance(self, batch: Batch, clock: Clock) -> float:
        if not batch.samples:
            return math.nan
        # All shards seed alike: dropout draws the numbers of the whole tensor on each of them.
        seed(step_seed(self._seed, self._replica, clock), self._device)
        self._shards.step = clock + 1
        began = time.monotonic_ns()
        try:
            leaves = [moved(leaf, self._device) for leaf in self._flatten((batch.input, batch.target))]
            # With several micro-steps losses are weighed by their samples; `finish` divides by the sum.
            weight = 1.0 if self._micro_steps == 1 else float(batch.samples)
            plain = functools.partial(self._differentiate, leaves, weight)
            loss, turned = plain() if self._short is None else self._short.differentiate(leaves, weight, plain)
            total, value = self._total_loss(loss), math.nan
            if self._late:
                self._unread.append((total, batch.samples))
            else:
                self._shards.reached("the loss")
                value = float(total)
        except PacelineError:
            raise
        except Exception as error:
            trace = "".join(traceback.format_exception(error))
            where = f"shard {self._shards.rank}, step {self._shards.step}"
            raise WorkerError(f"{where}: {type(error).__name__}: {error}\n\n{trace}") from error
        if self._recorder is not None:
            self._recorder.record("forward", clock + 1, began, turned)
            self._recorder.record("backward", clock + 1, turned, time.monotonic_ns())
        self._loss_sum += value * batch.samples
        self._samples += batch.samples
        return value

    def _differentiate(self, leaves: list[Tensor], weight: float) -> tuple[Tensor, Nanoseconds]:
        """Add the gradient of ``weight`` · loss; return the loss or a term of it, and when forward had ended."""
        with self._autocast:
            if self._compiled is not None:
                self._compiled.check_new(shapes_of(leaves), leaves)
            loss = self._forward(leaves)
        turned = time.monotonic_ns()
        backpropagate(loss, weight)
        return loss.detach(), turned

    def _forward(self, leaves: list[Tensor]) -> Tensor:
        """Return the loss; count what is saved for backward where the batch has new shapes."""
        shapes = tuple(leaf.shape for leaf in leaves)  # the hooks of a counter are too slow for every step
        if shapes in self._seen_shapes:
            return self._run(*leaves)[0]  # type: ignore[no-any-return]
        counter = StorageCounter([*self._module.parameters(), *self._module.buffers(), *leaves])
        with counter.counting_saved():
            loss: Tensor = self._run(*leaves)[0]
        self._seen_shapes.add(shapes)
        self.memory.peak_bytes = max(self.memory.peak_bytes, counter.nbytes)
        return loss

    def finish(self, out: FlatState) -> Measured:
        gradients = self._autograd.take_gradients()
        with torch.no_grad():
            if self._partial_grads is not None and self._samples:  # the same on all shards: all of them reduce, or none
                self._partial_grads.all_reduce_(gradients)
            if self._micro_steps > 1 and self._samples and gradients:  # a shard may have nothing to train
                torch._foreach_div_(gradients, float(self._samples))
            if self._handoff is not None:
                self._handoff.gradients = gradients
            elif gradients:  # the buffer of Δ may be in shared memory
                self._autograd.write_gradients(gradients, out)
            self._autograd.write_buffers(out)
        if not self._samples:
            return Measured(math.nan, 0, True)
        if self._late:
            figures = LateFigures(self._unread, out.parameters)
            zero_nonfinite(out.parameters)
            return Measured(math.nan, self._samples, True, late=figures)
        loss = self._loss_sum / self._samples
        vectors = out.parameters if self._handoff is None else gradients
        return Measured(loss, self._samples, finite(vectors, loss))

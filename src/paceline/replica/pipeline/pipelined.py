"""Δ computed by stages: one worker of a pipeline, whose weights stay as they are during a mini-batch."""

import math
import time
from collections.abc import Mapping, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from paceline.core.types import Clock
from paceline.replica.autograd import Autograd, GradientHandoff
from paceline.replica.base import Batch, Measured, Replica
from paceline.replica.flat_state import FlatState, finite
from paceline.replica.late_figures import LateFigures, zero_nonfinite
from paceline.replica.pipeline.comm_plan import PipelineContext
from paceline.replica.pipeline.p2p_queue import StageReplicaGroup
from paceline.replica.pipeline.stage_runtime import StageRuntime
from paceline.replica.tensor.tp_group import PartialGrads


def all_reduce(tensors: Sequence[Tensor], replicas: StageReplicaGroup, description: str) -> None:
    """Replace each tensor by its sum over the replicas, with one message for each dtype."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        own = [tensor for tensor in tensors if tensor.dtype == dtype]
        total = torch.cat([tensor.reshape(-1) for tensor in own])
        replicas.all_reduce(total, description)
        for tensor, summed in zip(own, torch.split(total, [tensor.numel() for tensor in own]), strict=True):
            tensor.copy_(summed.view_as(tensor))


class TiedGradients:
    """Sums the gradients of parameters that several stages hold.

    Each sends its gradient to each other and adds all up in the same order, so all get the same sum to the bit::

        worker 0    g0 ----> 2          g0 + g2
        worker 2    g2 ----> 0          g0 + g2

    Args:
        context: of this worker.
    """

    def __init__(self, context: PipelineContext) -> None:
        plan, replicas = context.plan, context.plan.stage_replicas
        own = replicas.at(context.worker)
        holders = {name: sorted({plan.stage_of(part) for part in parts}) for name, parts in plan.tied.items()}
        self.holders = {n: stages for n, stages in sorted(holders.items()) if own.stage in stages and len(stages) > 1}
        """Parameter -> the stages that hold it, of those that this worker and another one hold."""
        self._stage, self._p2p, self._recorder = own.stage, context.p2p, context.recorder
        others = {stage for stages in self.holders.values() for stage in stages if stage != own.stage}
        # Each replica of a stage receives from one replica of each other stage, and sends to those that receive of it.
        self._source = {stage: replicas.number(replicas.partner(own, stage)) for stage in others}
        self._destinations = {
            stage: [n for n in replicas.of_stage(stage) if replicas.partner(replicas.at(n), own.stage) == own]
            for stage in others
        }

    def all_reduce(self, gradients: Mapping[str, Tensor]) -> None:
        """Replace each gradient by its sum over the stages that hold it, which call this together.

        Args:
            gradients: this worker's, by the parameter's full name.
        """
        p2p = self._p2p
        assert p2p is not None, "several stages are several workers"
        others = [(name, stage) for name, stages in self.holders.items() for stage in stages if stage != self._stage]
        descriptions = {name: f"the gradient of {name}, which several stages hold" for name in self.holders}
        receives = {
            (name, stage): p2p.irecv(
                gradients[name].shape, gradients[name].dtype, self._source[stage], descriptions[name]
            )
            for name, stage in others
        }
        # Copies, since they are being sent while the sums are written.
        own = {name: gradients[name].clone() for name in self.holders}
        for name, stage in others:
            for destination in self._destinations[stage]:
                p2p.isend(own[name], destination, descriptions[name])
        began = time.monotonic_ns()
        received = {place: receive() for place, receive in receives.items()}
        p2p.wait_sends()
        self._recorder.waited_ns += time.monotonic_ns() - began
        for name, stages in self.holders.items():  # by ascending stage: all of them get the same bits
            first, *rest = (own[name] if each == self._stage else received[name, each] for each in stages)
            gradients[name].copy_(first)
            for each in rest:
                gradients[name].add_(each)


class Pipelined(Replica):
    """Δ is the gradient of the mean loss over a mini-batch, summed over its micro-batches: Δ = Σ n_i/n · ∇loss_i.

    Weights stay as they are from :meth:`adopt` to :meth:`finish`, so every schedule gives what one process gives that
    runs the same micro-batches, up to the order in which gradients are added up. Each worker writes its part of Δ; only
    the worker with the last part computes the loss.

    Args:
        context: of this worker.
        micro_steps: calls of :meth:`advance` for one Δ.
        partial_grads: where operators are sharded: sums the gradients of which each shard has a term.
        handoff: receives the gradients, on the CPU; None: they are copied into the buffer of Δ.
        late: whether loss and finite stay on the device for now (``Measured.late``); not of stages that are replicated.
    """

    def __init__(
        self,
        context: PipelineContext,
        *,
        micro_steps: int = 1,
        partial_grads: PartialGrads | None = None,
        handoff: GradientHandoff | None = None,
        late: bool = False,
    ) -> None:
        self._context, self._micro_steps, self._partial_grads = context, micro_steps, partial_grads
        self._handoff, self._late = handoff, late
        self._unread = list[tuple[Tensor, int]]()
        """Loss and samples of each micro-batch of this Δ, where they are read late."""
        self._runtime, self._tied = StageRuntime(context), TiedGradients(context)
        self._tensors, self.memory = self._runtime.tensors, self._runtime.memory
        self._losses, self._samples = 0.0, 0

    @property
    def autograd(self) -> Autograd:
        """Holds the parameters and the gradients of this worker's parts."""
        return self._tensors

    def adopt(self, state: FlatState) -> None:
        self._tensors.bind(state)
        for stage in self._runtime.stages.values():  # a cancelled attempt may have left passes
            stage.clear()
        self._losses, self._unread, self._samples = 0.0, [], 0

    def advance(self, batch: Batch, clock: Clock) -> float:
        if not batch.samples:
            return math.nan
        runtime = self._runtime
        total = float(batch.samples) if self._micro_steps == 1 else 1.0
        micro_batches = runtime.micro_batches(batch, total, clock)
        program = self._context.plan.worker_program(self._context.worker, len(micro_batches))
        runtime.queue.begin(program.incoming, [each.shapes for each in micro_batches])
        losses: list[tuple[int, Tensor]] = []
        for task, following in zip_longest(program.actions, program.actions[1:]):
            micro_batch = micro_batches[task.action.micro_batch]
            loss = runtime.execute(task, following, micro_batch, clock + 1)
            if loss is not None:
                losses.append((micro_batch.samples, loss))

        # Sent tensors are views of activations, which the next mini-batch may not reuse before they have gone.
        began = time.monotonic_ns()
        runtime.queue.wait_sends()
        mean, total_loss = math.nan, 0.0
        if self._late:
            self._unread += [(loss, samples) for samples, loss in losses]
        else:
            runtime.queue.reached()
        if runtime.takes_target and not self._late:
            total_loss = sum(samples * float(loss) for samples, loss in losses)
            if (replicas := self._context.stage_replicas) is not None:  # each has the losses of its own micro-batches
                term = torch.tensor([total_loss], dtype=torch.float64)
                replicas.all_reduce(term, "the loss of other micro-batches")
                total_loss = float(term)
            mean = total_loss / batch.samples
        runtime.waited(clock + 1, began)
        for stage in runtime.stages.values():
            stage.end_mini_batch()
        self._losses += total_loss
        self._samples += batch.samples
        return mean

    def finish(self, out: FlatState) -> Measured:
        gradients = self._tensors.take_gradients()
        with torch.no_grad():
            if self._samples:
                self._all_reduce(gradients)
                if self._micro_steps > 1 and gradients:  # a stage may have nothing to train
                    torch._foreach_div_(gradients, float(self._samples))
            if self._handoff is not None:
                self._handoff.gradients = gradients
            elif gradients:
                self._tensors.write_gradients(gradients, out)
            self._tensors.write_buffers(out)
            replicas = self._context.stage_replicas
            if replicas is not None and self._samples and out.buffers:
                if not replicas.first:  # the sum is then what the first one has
                    torch._foreach_zero_(out.buffers)
                all_reduce(out.buffers, replicas, "running buffers")
        if not self._samples:
            return Measured(math.nan, 0, True)
        if self._late:
            figures = LateFigures(self._unread, out.parameters)
            zero_nonfinite(out.parameters)
            return Measured(math.nan, self._samples, True, late=figures)
        loss = self._losses / self._samples if self._runtime.takes_target else math.nan
        vectors = out.parameters if self._handoff is None else gradients
        return Measured(loss, self._samples, finite(vectors, loss if self._runtime.takes_target else 0.0))

    def _all_reduce(self, gradients: list[Tensor]) -> None:
        """Sum this worker's gradients over replicas of the stage, shards and tied stages, each of which has a term."""
        if (replicas := self._context.stage_replicas) is not None:
            began = time.monotonic_ns()
            all_reduce(gradients, replicas, "gradients of other micro-batches")
            self._runtime.record("all_reduce", 0, began)
        if self._partial_grads is not None:
            self._partial_grads.all_reduce_(gradients)
        if self._tied.holders:
            began = time.monotonic_ns()
            self._tied.all_reduce(dict(zip(self._tensors.layout.parameter_names, gradients, strict=True)))
            self._runtime.record("all_reduce", 0, began)

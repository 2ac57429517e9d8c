"""Runtime of one worker of a pipeline: its stages, its queue of messages, and the execution of scheduled actions."""

import time
import traceback
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from paceline.core.errors import PacelineError, WorkerError
from paceline.core.types import Clock
from paceline.device import CPU, placed
from paceline.replica.activation_memory import ActivationMemory
from paceline.replica.autograd import Autograd, step_seed
from paceline.replica.base import Batch
from paceline.replica.module_utils import get_or_create_submodule, tensors_of
from paceline.replica.pipeline.comm_plan import PipelineContext, ScheduledAction
from paceline.replica.pipeline.cut import Part
from paceline.replica.pipeline.micro_batches import MicroBatch, micro_batches
from paceline.replica.pipeline.p2p_queue import P2PQueue, Received
from paceline.replica.pipeline.stage import PipelineStage
from paceline.trace import spans
from paceline.trace.recorder import NullRecorder


class StageRuntime:
    """Runs the scheduled actions of one worker of a pipeline.

    Args:
        context: of the worker.
        stream: whether micro-batches go on from mini-batch to mini-batch.
    """

    def __init__(self, context: PipelineContext, *, stream: bool = False) -> None:
        self._context, parts, plan = context, context.parts, context.plan
        placed(*(part.module for part in parts), device=torch.device(context.device))
        for part in parts:
            part.module.train()
        self.tensors = Autograd(context.program, merged_module(parts), context.layout, context.replica, context.device)
        self.memory = ActivationMemory()
        self.stages = {part.number: PipelineStage(part, context, self.memory) for part in parts}
        self.queue = P2PQueue(context.p2p, stream_rounds=len(plan.stage_replicas) if stream else None)
        self.takes_target = any(stage.is_last for stage in self.stages.values())
        """True if this worker computes the loss."""
        self._leaves = {leaf for part in parts for leaf in part.inputs}
        self._on_cpu = self.tensors.device == CPU
        self._recorder = None if type(context.recorder) is NullRecorder else context.recorder

    def micro_batches(self, batch: Batch, total: float, clock: Clock) -> list[MicroBatch]:
        """Cut a batch and move what this worker needs of it to its device.

        Args:
            batch: with at least one sample.
            total: samples that a micro-batch's weight is its share of.
            clock: of the micro-step, from which random numbers are seeded.
        """
        context = self._context
        seed = step_seed(context.program.seed, context.replica, clock)
        cut = micro_batches(batch, context.plan.micro_batches, context.captured.input_spec.flatten)
        cut = [replace(each, weight=each.samples / total, seed=seed) for each in cut]
        if self._on_cpu:
            return cut
        return [each.to(context.device, self._leaves, target=self.takes_target) for each in cut]

    def execute(
        self, task: ScheduledAction, following: ScheduledAction | None, micro_batch: MicroBatch, step: int
    ) -> Tensor | None:
        """Execute one action; returns the micro-batch's loss if it is the forward of the last part.

        Args:
            task: an action that is no update.
            following: the one after it, whose receives are posted already, as far as that takes no waiting.
            micro_batch: that of the action.
            step: of the recorded spans.

        Raises:
            WorkerError: it failed; the message names stage, micro-batch and action.
        """
        action = task.action
        # Data for the next action then arrive while this one computes.
        if following is not None and following.receives:
            self.queue.post_receives(max(message.rank for message in following.receives), wait=False)
        try:
            if action.kind == "forward":
                return self._forward(task, following, micro_batch, step)
            if action.kind == "backward_weight":
                began = time.monotonic_ns()
                self.stages[action.stage].backward_weight(micro_batch)
                self.record("backward_weight", step, began, micro_batch.index)
            else:
                self._backward(task, micro_batch, step)
            return None
        except PacelineError:
            raise
        except Exception as error:
            trace = "".join(traceback.format_exception(error))
            raise WorkerError(
                f"stage {action.stage}, micro-batch {action.micro_batch}, {action}: {type(error).__name__}: {error}"
                f"\n\n{trace}"
            ) from error

    def record(self, action: spans.Action, step: int, began: int, index: int = 0, moved_bytes: int = 0) -> None:
        """Record a span from ``began`` to now."""
        if self._recorder is not None:
            self._recorder.record(action, step, began, time.monotonic_ns(), index, moved_bytes)

    def waited(self, step: int, began: int, index: int = 0) -> None:
        """Count the time from ``began`` to now as waiting, and record it."""
        self._context.recorder.wait(step, began, time.monotonic_ns(), index)

    def _forward(
        self, task: ScheduledAction, following: ScheduledAction | None, micro_batch: MicroBatch, step: int
    ) -> Tensor | None:
        stage, received = self.stages[task.action.stage], list[Received]()
        if task.receives:
            began = time.monotonic_ns()
            by_name = {message.name: self.queue.receive(message) for message in task.receives}
            self.waited(step, began, micro_batch.index)
            # Messages come by rank, the part takes its values in the order of its crossings.
            received = [by_name[crossing.name] for crossing in stage.part.received]

        if (compiled := self._context.compiled.get(task.action.stage)) is not None:
            values = [v.detach().requires_grad_(g) if isinstance(v, Tensor) else v for v, g in received]
            with self._context.program.autocast(self._context.device):
                inputs = (micro_batch.inputs[leaf] for leaf in stage.part.inputs)
                compiled.check_new(micro_batch.shapes, [*inputs, *values])

        began, key = time.monotonic_ns(), (task.action.stage, micro_batch.index)
        backward_follows = following is not None and key == (following.action.stage, following.action.micro_batch)
        outputs, loss = stage.forward(micro_batch, received, backward_follows=backward_follows)
        self.record("forward", step, began, micro_batch.index)

        if task.sends:
            began, moved = time.monotonic_ns(), 0
            output_of = {crossing.name: each for crossing, each in zip(stage.part.sent, outputs, strict=True)}
            for message in task.sends:
                value, differentiable = output_of[message.name]
                moved += self.queue.send(message, value, differentiable=differentiable)
            self.record("send", step, began, micro_batch.index, moved)
        return loss

    def _backward(self, task: ScheduledAction, micro_batch: MicroBatch, step: int) -> None:
        stage, began = self.stages[task.action.stage], time.monotonic_ns()
        if stage.recompute(micro_batch):
            self.record("recompute", step, began, micro_batch.index)

        sums: dict[str, Tensor] = {}
        differentiable = stage.differentiable_outputs(micro_batch)
        expected = [message for message in task.receives if message.name in differentiable]
        if expected:
            began = time.monotonic_ns()
            for message in expected:  # of one value by ascending consumer, so every run adds in one order
                gradient, _ = self.queue.receive(message)
                assert isinstance(gradient, Tensor)
                # Not in place: a gradient of a part of this worker is still the other part's own tensor.
                sums[message.name] = sums[message.name] + gradient if message.name in sums else gradient
            self.waited(step, began, micro_batch.index)

        began, split = time.monotonic_ns(), task.action.kind == "backward_input"
        moved = stage.backward(micro_batch, sums, task.sends, self.queue.send_gradient, split=split)
        self.record("backward_input" if split else "backward", step, began, micro_batch.index, moved)


def merged_module(parts: Iterable[Part]) -> nn.Module:
    """Return a module without a forward that holds the parts' tensors; one that several name becomes one tensor."""
    whole = nn.Module()
    for part in parts:
        for name, tensor in tensors_of(part.module).items():
            path, _, leaf = name.rpartition(".")
            owner = get_or_create_submodule(whole, path)
            if leaf in owner._parameters or leaf in owner._buffers:
                setattr(part.module.get_submodule(path), leaf, getattr(owner, leaf))
            elif isinstance(tensor, nn.Parameter):
                owner.register_parameter(leaf, tensor)
            else:
                owner.register_buffer(leaf, tensor)
    return whole

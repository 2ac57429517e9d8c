"""One part of a model on one worker: forward, recomputation and backward of each micro-batch.

::

    recompute      forward                   backward
    none           the graph is kept         | backward |
    boundaries     the inputs are kept       | forward again | backward |
    all            the inputs of pieces of   | backward, each piece's forward again before it |
                   the part are kept

Gradients of inputs are sent while the backward pass goes on (``portals.py``). Where passes are short and many, forward
and backward are run as lists of operators instead, without Python and autograd (``stage_graph.py``).
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from paceline.core.errors import InputError
from paceline.device import seed
from paceline.program import Tree, leaves
from paceline.replica.activation_memory import ActivationMemory, StorageCounter
from paceline.replica.autograd import step_seed
from paceline.replica.capture.input_spec import Shapes
from paceline.replica.pipeline.batchnorm import DeferredBatchNorms
from paceline.replica.pipeline.checkpointing import CheckpointedPart, preserve_buffers
from paceline.replica.pipeline.comm_plan import PipelineContext
from paceline.replica.pipeline.cut import Part
from paceline.replica.pipeline.micro_batches import MicroBatch
from paceline.replica.pipeline.p2p_queue import P2PMessage, Received, Value
from paceline.replica.pipeline.portals import InputPortals, SendGradient
from paceline.replica.pipeline.split_backward import DeferredWeightGrads, Splitter, replace_ops
from paceline.replica.pipeline.stage_graph import MOST_SPLIT_BYTES, PartGraph, ShortPasses
from paceline.replica.tensor.tp_group import CollectiveModule


@dataclass
class ForwardPass:
    """One forward pass with its graph.

    Args:
        outputs: detached values for other parts; released by whoever has sent them.
        edges: name of a sent value -> where its gradient enters the graph.
        nbytes: kept for backward.
        transient_bytes: there for a while during backward, on top.
        graph: that made the pass, and what it has kept, after backward for gradients of weights; None: autograd
            keeps that.
    """

    outputs: list[Received]
    edges: Mapping[str, GradientEdge | None]
    loss: Tensor | None
    portals: InputPortals
    weight_grads: DeferredWeightGrads | None
    nbytes: int = 0
    transient_bytes: int = 0
    graph: tuple[PartGraph, list[Tensor]] | None = None


@dataclass(frozen=True)
class KeptInputs:
    """The inputs of a forward pass that is to be run again."""

    received: Sequence[Received]
    versions: list[int]
    nbytes: int


class PipelineStage:
    """One part of a model, run on one worker.

    Args:
        part: its module is in training mode, and is changed in place.
        context: of the worker.
        memory: counts the bytes that are kept.
    """

    def __init__(self, part: Part, context: PipelineContext, memory: ActivationMemory) -> None:
        self.part, self._program, self._device, self._memory = part, context.program, context.device, memory
        self._autocasts = context.program.precision != "fp32"
        compiled = context.compiled.get(part.number)
        self._forward = part.module if compiled is None else compiled.function
        schedule, self._captured = context.plan.schedule, context.captured
        self.is_last = part.number == schedule.parts(len(context.plan.stage_replicas.copies)) - 1
        """True if this is the model's last part, which computes the loss."""

        names = {entry.name for block in context.layout.buffers for entry in block.entries}
        buffers = {name: buffer for name, buffer in part.module.named_buffers() if name in names}
        self._running = list(buffers.values())
        self._recomputes = context.recompute == "boundaries"
        self._checkpointed, modules = None, [part.module]
        if context.recompute == "all":
            self._checkpointed = CheckpointedPart(part, self._captured, self._running)
            modules = self._checkpointed.modules

        as_it_is = compiled is None and context.recompute == "none" and schedule.flushes and context.device == "cpu"
        # The others of a stage's shards would not know when one of them makes a pass to compare with.
        as_it_is &= not any(isinstance(module, CollectiveModule) for module in part.module.modules())
        if schedule.splits_backward:
            as_it_is &= sum(parameter.nbytes for parameter in part.module.parameters()) <= MOST_SPLIT_BYTES
        self._splitter: Splitter | None = None
        self._batchnorms: DeferredBatchNorms | None = None
        if schedule.splits_backward:
            splitter = Splitter(self._device, fused=not as_it_is)  # bits don't depend on when there is a graph
            if replace_ops(modules, splitter.replacements):
                self._splitter = splitter
                if self._checkpointed is not None:
                    self._checkpointed.recompute_context = lambda: splitter.deferring_to(splitter.target)
        if context.batchnorm == "mini-batch":
            counters = [buffer for name, buffer in buffers.items() if name.endswith("num_batches_tracked")]
            batchnorms = DeferredBatchNorms(counters, context.stage_replicas)
            if replace_ops(modules, batchnorms.replacements):
                self._batchnorms = batchnorms

        as_it_is &= self._batchnorms is None
        loss = self.with_loss if self.is_last else None
        self._short = ShortPasses(part, loss, partial(context.program.autocast, context.device)) if as_it_is else None
        self._kept: dict[int, ForwardPass | KeptInputs] = {}
        self._differentiable: dict[Shapes, list[bool]] = {}
        self._saved_bytes: dict[Shapes, tuple[int, int]] = {}
        self._deferred_bytes: dict[Shapes, int] = {}

    def clear(self) -> None:
        """Release what a cancelled mini-batch has left."""
        for index in list(self._kept):
            self._release(index)

    def forward(
        self, micro_batch: MicroBatch, received: Sequence[Received], *, backward_follows: bool
    ) -> tuple[list[Received], Tensor | None]:
        """Run a micro-batch forward; returns the values for later parts and, in the last part, the loss.

        Args:
            micro_batch: on the worker's device.
            received: in the order of the part's crossings.
            backward_follows: whether its backward is the worker's next action; then recomputing would save nothing.
        """
        if not self._recomputes or backward_follows:
            run = self._run(micro_batch, received)
            self._keep(micro_batch.index, run)
            # From here on only the sender keeps the outputs, so that they are released once they have been sent.
            outputs, run.outputs = run.outputs, []
            return outputs, None if run.loss is None else run.loss.detach()

        shapes, versions = micro_batch.shapes, _versions(micro_batch, received)
        if shapes in self._differentiable:
            with torch.no_grad(), ExitStack() as stack:
                self._enter(stack, micro_batch, None, again=False)
                values, loss = self._call(micro_batch, [value for value, _ in received], None)
            outputs = list(map(Received, values, self._differentiable[shapes]))
        else:  # only a pass with a graph shows which outputs are differentiable
            run = self._run(micro_batch, received)
            outputs, loss = run.outputs, None if run.loss is None else run.loss.detach()
            self._differentiable[shapes] = [differentiable for _, differentiable in outputs]
        # Not by shapes: what is kept may be, or may not be, in memory that is ignored.
        counter = self._counter(micro_batch)
        counter.add(value for value, _ in received)
        self._keep(micro_batch.index, KeptInputs(received, versions, counter.nbytes))
        return outputs, loss

    def recompute(self, micro_batch: MicroBatch) -> bool:
        """Run a forward pass again if only its inputs were kept; returns whether they were.

        The same random numbers are drawn, and running buffers stay as they are.

        Raises:
            InputError: the part has written its inputs in place.
        """
        kept = self._kept[micro_batch.index]
        if isinstance(kept, ForwardPass):
            return False
        if kept.versions != _versions(micro_batch, kept.received):
            raise InputError(
                f"stage {self.part.number} writes its input in place, so its forward pass can't be made again; write "
                "inplace=False there, or recompute='none'"
            )
        self._release(micro_batch.index)
        with preserve_buffers(self._running):  # they have moved in the first pass
            run = self._run(micro_batch, kept.received, again=True)
        run.outputs.clear()
        self._keep(micro_batch.index, run)
        return True

    def differentiable_outputs(self, micro_batch: MicroBatch) -> Mapping[str, object]:
        """Return the values, by name, that were sent and whose gradients will come back."""
        return self._run_of(micro_batch).edges

    def backward(
        self,
        micro_batch: MicroBatch,
        gradients: Mapping[str, Tensor],
        messages: Sequence[P2PMessage],
        send: SendGradient,
        *,
        split: bool,
    ) -> int:
        """Compute the gradients of inputs, which are sent, and of parameters; returns the bytes sent.

        Args:
            micro_batch: one that has been run forward, and again if :meth:`recompute` has to.
            gradients: of the values that were sent, by name.
            messages: those by which gradients of inputs go back, by rank.
            send: sends one.
            split: whether to leave the gradients of weights to :meth:`backward_weight`.
        """
        run = self._run_of(micro_batch)
        run.portals.open(messages, send)
        # A graph takes them in the order of its outputs.
        names = list(gradients if run.graph is None else run.edges)
        roots: list[object] = [run.edges[name] for name in names]
        upstream = [gradients[name] for name in names]
        if run.loss is not None:
            roots.append(run.loss)
            upstream.append(torch.full_like(run.loss, micro_batch.weight))
        # Recomputed pieces exist one at a time, so the largest of them counts on top of what is kept.
        self._memory.add(run.transient_bytes)
        shapes = micro_batch.shapes
        defers_first = run.weight_grads is not None and shapes not in self._deferred_bytes
        before = [(p, p.grad, _version(p.grad)) for p in self.part.module.parameters()] if defers_first else []
        if run.graph is not None and self._short is not None:
            run.graph = run.graph[0], self._short.differentiate(*run.graph, upstream, run.portals)
        elif roots:  # else nothing before this part needs a gradient, and nothing in it
            torch.autograd.backward(roots, upstream)  # type: ignore[arg-type]
        run.portals.close()
        self._memory.add(-run.transient_bytes)
        # The graph goes; what deferred gradients are computed of stays, as many bytes for every input of these shapes.
        self._release(micro_batch.index)
        run.edges, run.loss = {}, None
        if run.weight_grads is not None and defers_first:
            counter = self._counter(micro_batch)
            counter.add(value for _, arguments in run.weight_grads.calls for value in arguments)
            self._deferred_bytes[shapes] = counter.nbytes
            self._put_off(run.weight_grads, before)
        run.nbytes = self._deferred_bytes.get(shapes, 0)
        self._keep(micro_batch.index, run)
        if not split:
            self.backward_weight(micro_batch)
        return run.portals.sent_bytes

    def backward_weight(self, micro_batch: MicroBatch) -> None:
        """Compute the gradients of weights that were deferred."""
        run = self._run_of(micro_batch)
        if run.graph is not None and self._short is not None:
            self._short.differentiate_weights(*run.graph)
        elif run.weight_grads is not None:
            run.weight_grads.run()
        self._release(micro_batch.index)

    def _put_off(
        self, weight_grads: DeferredWeightGrads, before: Sequence[tuple[nn.Parameter, Tensor | None, int]]
    ) -> None:
        """Have graphs put off the same gradients, so that each is added at the same moment, with or without a graph.

        Args:
            weight_grads: that a backward pass has deferred.
            before: parameters, with their ``grad`` and its version, before that pass.
        """
        if self._short is None:
            return
        given = [argument for _, arguments in weight_grads.calls for argument in arguments]
        deferred = [id(each) for each in given if isinstance(each, nn.Parameter) and each.requires_grad]
        added = {id(p) for p, grad, version in before if p.grad is not grad or _version(grad) != version}
        if len(set(deferred)) < len(deferred) or not added.isdisjoint(deferred):
            self._short = None  # of a weight that is used twice, a graph has the sum
            return
        parameters = self.part.module.named_parameters(remove_duplicate=False)
        self._short.put_off |= {name for name, parameter in parameters if id(parameter) in deferred}

    def end_mini_batch(self) -> None:
        """Move the running statistics of BatchNorms that do so once a mini-batch."""
        assert not self._kept, "each forward has had its backward"
        if self._batchnorms is not None:
            self._batchnorms.commit()

    def _run(self, micro_batch: MicroBatch, received: Sequence[Received], *, again: bool = False) -> ForwardPass:
        """Run a forward pass with its graph; where shapes are new, count the bytes that it saves."""
        form, graph = (
            (None, None) if self._short is None else self._short.of(micro_batch, received, idle=not self._kept)
        )
        if graph is not None:
            return self._run_graph(graph, micro_batch, received)
        began, portals, shapes = time.perf_counter(), InputPortals(), micro_batch.shapes
        weight_grads = DeferredWeightGrads() if self._splitter is not None else None
        values = [
            portals.enter(crossing.name, value) if differentiable and isinstance(value, Tensor) else value
            for crossing, (value, differentiable) in zip(self.part.received, received, strict=True)
        ]
        with ExitStack() as stack:
            counter = None
            if shapes not in self._saved_bytes:
                counter = self._counter(micro_batch)
                stack.enter_context(counter.counting_saved())
            self._enter(stack, micro_batch, weight_grads, again=again)
            outputs, loss = self._call(micro_batch, values, counter)
        if counter is not None:
            self._saved_bytes[shapes] = counter.nbytes, counter.transient_bytes
        if self._short is not None:
            self._short.passed(form, time.perf_counter() - began)
        # An edge keeps the graph, but not the output itself, which may go once it has been sent.
        edges = {
            crossing.name: get_gradient_edge(value)
            for crossing, value in zip(self.part.sent, outputs, strict=True)
            if isinstance(value, Tensor) and value.requires_grad
        }
        detached = [
            Received(value.detach(), value.requires_grad) if isinstance(value, Tensor) else Received(value, False)
            for value in outputs
        ]
        return ForwardPass(detached, edges, loss, portals, weight_grads, *self._saved_bytes[shapes])

    def _run_graph(self, graph: PartGraph, micro_batch: MicroBatch, received: Sequence[Received]) -> ForwardPass:
        """Run a forward pass by its graph."""
        assert self._short is not None
        portals = InputPortals()
        for crossing, (value, differentiable) in zip(self.part.received, received, strict=True):
            if differentiable and isinstance(value, Tensor):
                portals.expect(crossing.name, value)
        seed(step_seed(micro_batch.seed, self.part.number, micro_batch.index), torch.device(self._device))
        outputs, kept = self._short.run(graph, micro_batch, received)
        loss = outputs.pop() if self.is_last else None
        sent = [Received(*each) for each in zip(outputs, graph.differentiable, strict=False)]
        edges = {each.name: None for each, (_, needed) in zip(self.part.sent, sent, strict=True) if needed}
        saved = self._saved_bytes[micro_batch.shapes]  # autograd kept the same, before there was a graph
        return ForwardPass(sent, edges, loss, portals, None, *saved, graph=(graph, kept))

    def _enter(
        self, stack: ExitStack, micro_batch: MicroBatch, weight_grads: DeferredWeightGrads | None, *, again: bool
    ) -> None:
        """Seed torch's generators and enter the contexts of a forward pass."""
        # From batch, part and micro-batch alone: a recomputed pass draws the same numbers, in any schedule.
        seed(step_seed(micro_batch.seed, self.part.number, micro_batch.index), torch.device(self._device))
        if self._autocasts:
            stack.enter_context(self._program.autocast(self._device))
        if self._batchnorms is not None:
            stack.enter_context(self._batchnorms.forward(again=again))
        if self._splitter is not None:
            stack.enter_context(self._splitter.deferring_to(weight_grads))

    def _call(
        self, micro_batch: MicroBatch, values: Sequence[Value], counter: StorageCounter | None
    ) -> tuple[list[Value], Tensor | None]:
        arguments = [*(micro_batch.inputs[leaf] for leaf in self.part.inputs), *values]
        if self._checkpointed is None:
            outputs = list(self._forward(*arguments))
        else:
            outputs = list(self._checkpointed.run(arguments, counter))
        return self.with_loss(outputs, micro_batch.target) if self.is_last else (outputs, None)

    def with_loss(self, outputs: list[Any], target: Tree) -> tuple[list[Value], Tensor]:
        """Return what the last part sends, and the loss."""
        sent = len(self.part.sent)
        loss = self._program.loss(self._captured.rebuild(outputs[sent:]), target)
        if loss.numel() != 1:
            raise InputError(
                f"the loss has shape {list(loss.shape)}, but it must be one number, the mean over the samples; write "
                "loss=torch.nn.functional.cross_entropy, or add .mean()"
            )
        return outputs[:sent], loss

    def _counter(self, micro_batch: MicroBatch) -> StorageCounter:
        module = self.part.module
        ignored = [*module.parameters(), *module.buffers(), *micro_batch.inputs, *leaves(micro_batch.target)]
        return StorageCounter(ignored)

    def _run_of(self, micro_batch: MicroBatch) -> ForwardPass:
        run = self._kept[micro_batch.index]
        assert isinstance(run, ForwardPass)
        return run

    def _keep(self, index: int, kept: ForwardPass | KeptInputs) -> None:
        self._kept[index] = kept
        self._memory.add(kept.nbytes)

    def _release(self, index: int) -> ForwardPass | KeptInputs:
        kept = self._kept.pop(index)
        self._memory.add(-kept.nbytes)
        return kept


def _versions(micro_batch: MicroBatch, received: Sequence[Received]) -> list[int]:
    """Return the inputs' version counters, which grow whenever a tensor is written in place."""
    return [_version(value) for value in [*micro_batch.inputs, *(value for value, _ in received)]]


def _version(value: object) -> int:
    return value._version if isinstance(value, Tensor) else 0

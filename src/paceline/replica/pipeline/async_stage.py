"""Asynchronous pipelines (PipeDream): one worker whose weights move within a stream of micro-batches.

Weight stashing keeps one worker's weights after each of its updates as long as a micro-batch needs them::

    version     3             4             5
    weights   | vectors | -> | vectors | -> | vectors |     an update writes its result into vectors that are free
                ^ micro-batch 5, in flight    ^ newest

A parameter is pointed at the version that a pass needs before that pass. Backward needs that too: of a parameter itself
autograd saves no values, but the parameter (torch 2.13); of a view of it, a transposed weight say, it saves the values
in place, which are not written as long as the version is kept.
"""

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from paceline.core.types import Clock, Version
from paceline.replica.base import Batch, Measured, Replica
from paceline.replica.flat_optimizer import FlatOptimizer
from paceline.replica.flat_state import FlatLayout, FlatState, finite
from paceline.replica.optimizer_factory import OptimizerFactory, optimizer_of_part
from paceline.replica.pipeline.comm_plan import PipelineContext, ScheduledAction
from paceline.replica.pipeline.micro_batches import MicroBatch
from paceline.replica.pipeline.stage_runtime import StageRuntime


class WeightStash:
    """Keeps the versions of one worker's weights that micro-batches in flight read (Narayanan et al. 2019, 1806.03377).

    Args:
        parameters: of the worker's parts, in the layout's order.
        start: their values at version 0, on their device, without buffers; taken over.
        make: the optimizer.
        scheduler: stepped with it.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        start: FlatState,
        make: OptimizerFactory,
        scheduler: Callable[[Any], LRScheduler] | None,
    ) -> None:
        self._parameters, self._states = parameters, {0: start}
        self._spare: list[FlatState] = []
        self._gradient = self._empty()
        self.optimizer = FlatOptimizer(make, scheduler, start, self._gradient) if start.parameters else None
        self._bound: Version | None = None
        self.newest: Version = 0
        self.most = 1
        """The most versions that were kept at one time."""

    @property
    def state(self) -> FlatState:
        """The newest version."""
        return self._states[self.newest]

    def bind(self, version: Version) -> None:
        """Let the parameters be views of a version."""
        if version != self._bound:  # in a steady state actions alternate between versions
            self._bound = version
            for parameter, view in zip(self._parameters, self._states[version].views.parameters, strict=True):
                parameter.data = view

    def release(self, in_flight: Collection[Version], since: Version) -> None:
        """Release all versions but the newest, those ``in_flight``, and those from ``since`` on."""
        unused = [v for v in self._states if v != self.newest and v < since and v not in in_flight]
        # Their memory is used again by the next version.
        self._spare += [self._states.pop(version) for version in unused]

    def update(self, gradients: Sequence[Tensor], *, keep: bool) -> bool:
        """Compute the next version by one step of the optimizer; returns whether the gradients were finite.

        Args:
            gradients: one for each parameter.
            keep: whether the newest version is still needed; else it is written over.
        """
        before = self.state if keep else self._states.pop(self.newest)
        after = (self._spare.pop() if self._spare else self._empty()) if keep else before
        self.newest += 1
        self._states[self.newest] = after
        self.most = max(self.most, len(self._states))
        if self.optimizer is None:
            return True
        with torch.no_grad():
            torch._foreach_copy_(self._gradient.views.parameters, list(gradients))
            self.optimizer.step(self._gradient.parameters, out=after)
        return finite(self._gradient.parameters, 0.0)

    def _empty(self) -> FlatState:
        state = next(iter(self._states.values()))
        return FlatState(state.layout, [torch.empty_like(vector) for vector in state.parameters], [])


class AsyncStage(Replica):
    """Each worker steps on its own weights once it has its part of a gradient, without waiting for the others.

    With worker w of p, PipeDream is (Narayanan et al. 2019, 1806.03377; 2BW: 2020, 2006.09503)::

        w(t+1) = w(t) - lr · ∇f(w_0(t - p + 1), w_1(t - p + 2), ..., w_{p-1}(t))        pipedream, of a micro-batch
        w(t+1) = w(t) - lr · ∇f(w(t - 1))                                               pipedream-2bw, of a mini-batch

    where lr · ∇f stands for whatever step the optimizer makes. One :meth:`advance` takes a batch and runs all actions
    that the schedule has before it needs the next one; :meth:`drain` runs the rest once no batch comes. A micro-batch
    goes forward and backward with one version of the weights. There is no Δ to hand over: :meth:`finish` reports the
    steps alone.

    A batch with fewer samples than m makes fewer micro-batches, the last ones of their mini-batch.

    Args:
        context: of this worker; no parameter is held by several workers.
        whole: the layout of all of A, for the optimizer.
    """

    def __init__(self, context: PipelineContext, whole: FlatLayout) -> None:
        self._context, self._whole = context, whole
        self._runtime = StageRuntime(context, stream=True)
        self._tensors, self.memory = self._runtime.tensors, self._runtime.memory
        self._stream = context.plan.actions(context.worker)
        self._ahead: ScheduledAction | None = None
        """The next action, once it has been derived."""
        self._micro_batches: dict[int, MicroBatch] = {}
        """Those in flight, by their place in the stream."""
        self._versions: dict[int, Version] = {}
        """The version that each of them reads."""
        self._given = self._begun = self._step = 0
        self._draining = False
        self._gradient_version: Version | None = None
        """Version of which there is a gradient that has not been applied."""
        self._losses: list[tuple[int, Tensor]] = []
        self._samples, self._loss, self._finite = 0, math.nan, True
        self.stash: WeightStash | None = None
        """This worker's weights, once A_0 has been adopted."""
        self.staleness = 0
        """The most updates between the weights that a gradient was computed with and those that it was applied to."""
        self._after: tuple[Version, Callable[[], None]] | None = None
        """What to call after which update."""

    def adopt(self, state: FlatState) -> None:
        """Take A_0; from then on this worker's part of A is in :attr:`stash`."""
        if self.stash is None:
            self._tensors.bind(state)
            device, program = torch.device(self._context.device), self._context.program
            layout = FlatLayout(state.layout.parameters, ())
            start = FlatState(layout, [v.to(device, copy=True) for v in state.parameters], [])
            make = optimizer_of_part(program.optimizer, self._whole, layout)
            self.stash = WeightStash(self._tensors.parameters, start, make, program.scheduler)

    def advance(self, batch: Batch, clock: Clock) -> float:
        self._samples, self._loss, self._finite = batch.samples, math.nan, True
        if not batch.samples:
            return math.nan
        self._step = clock + 1
        queue, cut = self._runtime.queue, self._runtime.micro_batches(batch, batch.samples, clock)
        # In the stream each mini-batch has m places; one with fewer micro-batches takes the last of them.
        first = self._given + self._context.plan.micro_batches - len(cut)
        for skipped in range(self._given, first):
            queue.drop_micro_batch(skipped)
        for each in cut:
            micro_batch = replace(each, index=first + each.index)
            self._micro_batches[micro_batch.index] = micro_batch
            queue.add_micro_batch(micro_batch.index, micro_batch.shapes)
        self._given = first + len(cut)

        self._run()
        self._runtime.queue.reached()
        if self._runtime.takes_target:
            self._loss = sum(samples * float(loss) for samples, loss in self._losses) / batch.samples
            self._losses.clear()
            self._finite &= math.isfinite(self._loss)
        return self._loss

    def finish(self, out: FlatState) -> Measured:
        """Write the running buffers as they are now; Δ has been applied, or will be."""
        with torch.no_grad():
            self._tensors.write_buffers(out)
        return Measured(self._loss, self._samples, self._finite)

    def drain(self) -> bool:
        """Run all actions that are left, once no further batch comes; returns whether the gradients were finite."""
        self._finite = self._draining = True  # from now on actions of micro-batches that never came are skipped
        self._run()
        self._runtime.queue.wait_sends()
        return self._finite

    def call_after(self, version: Version, act: Callable[[], None]) -> None:
        """Call ``act`` once, when this worker has made so many updates in this stream; it has not made them yet."""
        self._after = version, act

    def _run(self) -> None:
        """Run all actions up to the first one that needs a batch that hasn't been given."""
        while (task := self._next()) is not None:
            index, stash, self._ahead = task.action.micro_batch, self.stash, None
            assert stash is not None, "A_0 has been adopted"
            if task.action.kind == "update":
                self._update(stash, index)
                continue
            micro_batch = self._micro_batches[index]
            if task.action.kind == "forward":
                self._begun = index + 1
                self._versions[index] = self._version_of(index)
            stash.bind(self._versions[index])
            loss = self._runtime.execute(task, self._next(), micro_batch, self._step)
            if loss is not None:
                self._losses.append((micro_batch.samples, loss))
            if task.action.kind == "backward":
                self._gradient_version = self._versions.pop(index)
                del self._micro_batches[index]
                self._runtime.queue.drop_micro_batch(index)
                stash.release(set(self._versions.values()), self._version_of(self._begun))

    def _next(self) -> ScheduledAction | None:
        """Return the next action; None: it needs a batch that hasn't been given, or nothing is left."""
        while self._micro_batches or self._gradient_version is not None:
            if self._ahead is None:
                self._ahead = next(self._stream)
                flying, given = self._micro_batches, self._given
                left = (m for m in self._ahead.incoming if m.micro_batch in flying or m.micro_batch >= given)
                self._runtime.queue.announce(left)
            index = self._ahead.action.micro_batch
            if index in self._micro_batches or (self._ahead.action.kind == "update" and index < self._given):
                return self._ahead
            if index >= self._given and not self._draining:
                return None
            self._ahead = None  # of a micro-batch that was skipped, or that never comes
        return None

    def _update(self, stash: WeightStash, micro_batch: int) -> None:
        began = time.monotonic_ns()
        assert self._gradient_version is not None, "an update follows a backward"
        self.staleness = max(self.staleness, stash.newest - self._gradient_version)
        # The newest version may be overwritten only if no micro-batch in flight, nor the next to begin, reads it.
        keep = stash.newest in self._versions.values() or stash.newest >= self._version_of(self._begun)
        self._gradient_version = None
        self._finite &= stash.update(self._tensors.take_gradients(), keep=keep)
        self._runtime.record("apply", self._step, began, micro_batch)
        if self._after is not None and self._after[0] == stash.newest:
            self._after[1]()
            self._after = None

    def _version_of(self, micro_batch: int) -> Version:
        """Return the version of the weights that a micro-batch reads on this worker."""
        plan = self._context.plan
        return plan.schedule.version(micro_batch, self._context.worker, len(plan.stage_replicas))

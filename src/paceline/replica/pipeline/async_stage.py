"""Weights that move within a stream of micro-batches (PipeDream): one worker of a pipeline that never runs empty.

Weights that move within a stream of micro-batches: one worker of a pipeline that never runs empty.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from paceline.core.types import Clock, Version
from paceline.program import Program
from paceline.replica.base import Batch, Measured, Replica, finite
from paceline.replica.capture.capture import Captured
from paceline.replica.flat_optimizer import FlatOptimizer, Make, of_part
from paceline.replica.flat_state import FlatLayout, FlatState
from paceline.replica.pipeline.base import P2P, Part
from paceline.replica.pipeline.comm_plan import CommPlan, ScheduledAction
from paceline.replica.pipeline.forward import Job
from paceline.replica.pipeline.p2p_queue import P2PQueue
from paceline.replica.pipeline.stage import ActionExecutor
from paceline.replica.pipeline.stage_builder import Recompute, StageRuntime, WorkerId
from paceline.replica.single import NO_RECORDER, step_seed
from paceline.trace.recorder import AnyRecorder


class WeightStash:
    """One worker's, from version 0 on.

    Args:
        parameters: of the worker's parts, in the layout's order.
        start: their values at version 0, where they compute, without buffers; it is taken over.
        make: the optimizer.
        scheduler: stepped with it.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        start: FlatState,
        make: Make,
        scheduler: Callable[[Any], LRScheduler] | None,
    ) -> None:
        self._parameters, self._states = parameters, {0: start}
        self._spare: list[FlatState] = []
        self._gradient = _like(start)
        self._stepper = FlatOptimizer(make, scheduler, start, self._gradient) if start.parameters else None
        self._used: Version | None = None
        self.newest: Version = 0
        self.most = 1
        """The most versions that were there at one time."""

    @property
    def state(self) -> FlatState:
        """The newest version."""
        return self._states[self.newest]

    @property
    def optimizer_bytes(self) -> int:
        """Of what the optimizer remembers."""
        return 0 if self._stepper is None else self._stepper.nbytes

    def use(self, version: Version) -> None:
        """Let the parameters be those of a version."""
        if version != self._used:
            self._used = version
            for parameter, view in zip(self._parameters, self._states[version].views.parameters, strict=True):
                parameter.data = view

    def keep(self, in_flight: Collection[Version], since: Version) -> None:
        """Let go of what neither these need, nor what begins with version ``since`` or a later one."""
        unused = [v for v in self._states if v != self.newest and v < since and v not in in_flight]
        self._spare += [self._states.pop(version) for version in unused]

    def update(self, gradients: Sequence[Tensor], *, keeps: bool) -> bool:
        """Make the next version by one step of the optimizer; whether the gradients were finite.

        Args:
            gradients: one a parameter.
            keeps: whether the version that was newest is still needed; else it is written over.
        """
        before = self.state if keeps else self._states.pop(self.newest)
        there = (self._spare.pop() if self._spare else _like(before)) if keeps else before
        self.newest += 1
        self._states[self.newest] = there
        self.most = max(self.most, len(self._states))
        if self._stepper is None:
            return True
        with torch.no_grad():
            torch._foreach_copy_(self._gradient.views.parameters, list(gradients))
            self._stepper.step(self._gradient.parameters, out=there)
        return finite(self._gradient.parameters, 0.0)


def _like(state: FlatState) -> FlatState:
    return FlatState(state.layout, [torch.empty_like(vector) for vector in state.parameters], [])


class AsyncStage(Replica):
    """Each worker steps on its own weights, when its part of a gradient is there; nobody waits for the others.

    With worker w of p, PipeDream is (Narayanan et al. 2019, 1806.03377; 2BW: 2020, 2006.09503)::

        w(t+1) = w(t) - lr · ∇f(w_0(t - p + 1), w_1(t - p + 2), ..., w_{p-1}(t))        pipedream, of a micro-batch
        w(t+1) = w(t) - lr · ∇f(w(t - 1))                                               pipedream-2bw, of a mini-batch

    where lr · ∇f stands for whatever step the optimizer makes. One :meth:`advance` gives a batch and does all that
    comes before the schedule needs the next one; :meth:`drain` does what is left once none comes. A micro-batch goes
    forward and backward with one version of the weights. There is no Δ to hand over: :meth:`finish` tells of the steps
    alone.

    A batch with fewer samples than m makes fewer micro-batches, the last ones of their mini-batch.

    Args:
        program: says seed, precision, loss, optimizer and scheduler.
        plan: the same on all workers of the replica; no parameter lies on several of them.
        captured: what the parts were cut from; of it, only the forms of input and output are used.
        parts: those of this worker. Their modules are changed in place.
        seat: of this worker.
        wire: to the other workers of the replica.
        whole: the layout of all of A, for the optimizer.
        layout: of the tensors of this worker's parts.
        recorder: of this worker's spans.
        recompute: as :class:`~paceline.replica.pipeline.runtime.Pipelined` has it.
    """

    def __init__(
        self,
        program: Program,
        plan: CommPlan,
        captured: Captured,
        parts: Sequence[Part],
        seat: WorkerId,
        wire: P2P,
        whole: FlatLayout,
        layout: FlatLayout,
        *,
        recorder: AnyRecorder = NO_RECORDER,
        recompute: Recompute = "none",
    ) -> None:
        self._program, self._plan, self._seat, self._recorder = program, plan, seat, recorder
        self._whole = whole
        self._place = StageRuntime(program, plan, captured, parts, seat, layout, recompute=recompute)
        self._tensors = self._place.tensors
        self._mail = P2PQueue(wire, rounds=plan.workers)
        self._performer = ActionExecutor(self._place.stages, self._mail, recorder)
        self._way = plan.stream(seat.worker)
        self._ahead: deque[ScheduledAction] = deque()
        self._jobs: dict[int, Job] = {}
        self._reads: dict[int, Version] = {}
        self._given = self._begun = self._step = 0
        self._draining = False
        self._read: Version | None = None
        self._losses: list[tuple[int, Tensor]] = []
        self._samples, self._loss, self._finite = 0, math.nan, True
        self._versions: WeightStash | None = None
        self.staleness = 0
        """How many updates the weights had had, at most, between those that a gradient is of and its own."""

    # ------------------------------------------------------------------------------------------------ what it tells

    @property
    def peak_saved_bytes(self) -> int:
        """The most that was kept for backward at one time, parameters and the batch itself not counted."""
        return self._place.holdings.peak_bytes

    @property
    def optimizer_bytes(self) -> int:
        """Of what this worker's optimizer remembers."""
        return 0 if self._versions is None else self._versions.optimizer_bytes

    @property
    def begun(self) -> bool:
        """Whether it has A_0."""
        return self._versions is not None

    @property
    def most_versions(self) -> int:
        """The most versions of the weights that were there at one time."""
        return self._started.most

    @property
    def updates(self) -> int:
        """How many this worker has made."""
        return self._started.newest

    @property
    def weights(self) -> FlatState:
        """This worker's weights as they are, without buffers."""
        return self._started.state

    # ----------------------------------------------------------------------------------------------- what it is told

    def adopt(self, state: FlatState) -> None:
        """Take A_0; from then on this worker's part of A is here."""
        if self._versions is None:
            self._tensors.bind(state)
            device = torch.device(self._seat.device)
            layout = FlatLayout(state.layout.parameters, ())
            here = FlatState(layout, [v.to(device, copy=True) for v in state.parameters], [])
            make = of_part(self._program.optimizer, self._whole, layout)
            self._versions = WeightStash(self._tensors.parameters, here, make, self._program.scheduler)

    def advance(self, batch: Batch, clock: Clock) -> float:
        self._samples, self._loss, self._finite = batch.samples, math.nan, True
        if not batch.samples:
            return math.nan
        self._step = clock + 1
        self._give(self._jobs_of(batch, clock))
        self._go_on()
        if self._place.takes_target:
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
        """No further batch comes: do what is left; whether the gradients were finite."""
        self._finite = self._draining = True
        self._go_on()
        self._mail.settle()
        return self._finite

    # ---------------------------------------------------------------------------------------------------- the stream

    def _jobs_of(self, batch: Batch, clock: Clock) -> list[Job]:
        """The batch's micro-batches under their places in the stream, where each mini-batch has m."""
        cut = self._place.micro_batches(batch)
        first = self._given + self._plan.micro_batches - len(cut)
        seed = step_seed(self._program.seed, self._seat.replica, clock)
        placed = [replace(each, index=first + each.index) for each in cut]
        return [Job(each, each.samples / batch.samples, seed) for each in placed]

    def _give(self, jobs: Sequence[Job]) -> None:
        for left_out in range(self._given, jobs[0].index):
            self._mail.forget(left_out)
        for job in jobs:
            self._jobs[job.index] = job
            self._mail.give(job.index, job.micro_batch.shapes)
        self._given = jobs[-1].index + 1

    def _go_on(self) -> None:
        while (task := self._head()) is not None:
            self._ahead.popleft()
            self._perform(task)

    def _head(self) -> ScheduledAction | None:
        """The next task; None: it needs a batch that hasn't been given, or nothing is left."""
        while self._jobs or self._read is not None:
            if not self._ahead:
                self._derive()
            action = self._ahead[0].action
            if action.micro_batch in self._jobs or (action.kind == "update" and action.micro_batch < self._given):
                return self._ahead[0]
            if action.micro_batch >= self._given and not self._draining:
                return None
            self._ahead.popleft()  # of a micro-batch that was left out, or that never comes
        return None

    def _derive(self) -> None:
        task, incoming = next(self._way)
        self._ahead.append(task)
        self._mail.announce(m for m in incoming if m.micro_batch in self._jobs or m.micro_batch >= self._given)

    # ----------------------------------------------------------------------------------------------------- its tasks

    def _perform(self, task: ScheduledAction) -> None:
        if task.action.kind == "update":
            self._update(task.action.micro_batch)
            return
        job = self._jobs[task.action.micro_batch]
        if task.action.kind == "forward":
            self._begun = job.index + 1
            self._reads[job.index] = self._version(job.index)
        self._started.use(self._reads[job.index])
        loss = self._performer.do(task, self._head(), job, self._step)
        if loss is not None:
            self._losses.append((job.micro_batch.samples, loss))
        if task.action.kind == "backward":
            self._read = self._reads.pop(job.index)
            del self._jobs[job.index]
            self._mail.forget(job.index)
            self._started.keep(set(self._reads.values()), self._version(self._begun))

    def _update(self, micro_batch: int) -> None:
        assert self._read is not None, "an update follows a backward"
        versions, began = self._started, time.monotonic_ns()
        self.staleness = max(self.staleness, versions.newest - self._read)
        keeps = versions.newest in self._reads.values() or versions.newest >= self._version(self._begun)
        self._read = None
        self._finite &= versions.update(self._tensors.take_gradients(), keeps=keeps)
        self._recorder.record("apply", self._step, began, time.monotonic_ns(), micro_batch)

    def _version(self, micro_batch: int) -> Version:
        """Whose weights a micro-batch uses here."""
        return self._plan.schedule.version(micro_batch, self._seat.worker, self._plan.workers)

    @property
    def _started(self) -> WeightStash:
        assert self._versions is not None, "A_0 has not been adopted"
        return self._versions

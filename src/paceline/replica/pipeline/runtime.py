"""Δ by stages: one worker of a pipeline, which does what the schedule says with the parts that it holds.

Δ by stages: one worker of a pipeline, which does what the schedule says with the parts that it holds.
"""

import math
import time
from collections.abc import Mapping, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from paceline.core.types import Clock
from paceline.program import Program
from paceline.replica.base import Batch, Measured, Replica, finite
from paceline.replica.capture.capture import Captured
from paceline.replica.flat_state import FlatLayout, FlatState
from paceline.replica.pipeline.base import P2P, Part, StageReplicaGroup, add_up, of_first
from paceline.replica.pipeline.comm_plan import CommPlan, WorkerProgram
from paceline.replica.pipeline.forward import Job
from paceline.replica.pipeline.p2p_queue import P2PQueue
from paceline.replica.pipeline.stage import ActionExecutor
from paceline.replica.pipeline.stage_builder import Batchnorm, Recompute, StageRuntime, WorkerId
from paceline.replica.single import NO_RECORDER, step_seed
from paceline.replica.tensor.tp_group import PartialGrads
from paceline.trace.recorder import AnyRecorder


class TiedGradients:
    """Those of one worker.

    Args:
        plan: says which parts hold what.
        worker: this one.
        wire: to the others.
    """

    def __init__(self, plan: CommPlan, worker: int, wire: P2P) -> None:
        self._columns, self._mine, self._wire = plan.columns, plan.columns.column(worker), wire
        holders = {name: sorted({plan.stage_of(part) for part in parts}) for name, parts in plan.tied.items()}
        self._holders = {n: who for n, who in sorted(holders.items()) if self._mine.stage in who and len(who) > 1}

    def __bool__(self) -> bool:
        return bool(self._holders)

    def add_up(self, gradients: Mapping[str, Tensor]) -> None:
        """Let each gradient be the sum over its holders; all of them call it together.

        Args:
            gradients: this worker's, by the parameter's full name.
        """
        mine = self._mine.stage
        others = [(name, other) for name, who in self._holders.items() for other in who if other != mine]
        coming = {
            (name, other): self._wire.expect(
                gradients[name].shape, gradients[name].dtype, self._source(other), _what(name)
            )
            for name, other in others
        }
        own = {name: gradients[name].clone() for name in self._holders}
        for name, other in others:
            for hearer in self._hearers(other):
                self._wire.send(own[name], hearer, _what(name))
        for name, who in self._holders.items():
            first, *rest = (own[name] if each == mine else coming[name, each].take() for each in who)
            gradients[name].copy_(first)
            for each in rest:
                gradients[name].add_(each)
        self._wire.settle()

    def _source(self, stage: int) -> int:
        """From whom of another stage this worker hears."""
        return self._columns.number(self._columns.turn(self._mine, stage))

    def _hearers(self, stage: int) -> list[int]:
        """Who of another stage hear from this worker."""
        return [
            number
            for number in self._columns.same(stage)
            if self._columns.turn(self._columns.column(number), self._mine.stage) == self._mine
        ]


def _what(name: str) -> str:
    return f"the gradient of {name}, which several stages hold"


class Pipelined(Replica):
    """Δ is the gradient of the mean loss over a mini-batch, made of its micro-batches: Δ = Σ n_i/n · ∇loss_i.

    Weights stay as they are from :meth:`adopt` to :meth:`finish`, so every schedule gives what one process gives that
    goes through the same micro-batches, up to the order in which gradients are added up. Each worker writes its part of
    Δ; the loss is known to the worker with the last part alone.

    Args:
        program: says seed, precision and loss.
        plan: the same on all workers of the replica.
        captured: what the parts were cut from; of it, only the forms of input and output are used.
        parts: those of this worker, ascending. Their modules are changed in place.
        seat: of this worker.
        wire: to the other workers of the replica.
        layout: of the tensors of this worker's parts.
        recorder: of this worker's spans.
        micro_steps: calls of :meth:`advance` for one Δ.
        recompute: "none" keeps all that backward needs. "boundaries" keeps what comes into a part, and makes its
            forward pass again before its backward: least is kept between the two. "all" cuts a part into √n pieces,
            keeps what comes into each, and makes their forward passes again one by one during backward: more is kept
            between, but never all of a part at once. The same random numbers are drawn again; running buffers move
            once. Where a backward follows at once upon its forward, "boundaries" makes nothing again.
        batchnorm: whether running statistics move with each micro-batch, or once, by those of the whole mini-batch.
        shared: where operators are divided: the gradients of which each shard has a term.
        copies: who take turns at this worker's stage; None: nobody else does.
    """

    def __init__(
        self,
        program: Program,
        plan: CommPlan,
        captured: Captured,
        parts: Sequence[Part],
        seat: WorkerId,
        wire: P2P,
        layout: FlatLayout,
        *,
        recorder: AnyRecorder = NO_RECORDER,
        micro_steps: int = 1,
        recompute: Recompute = "none",
        batchnorm: Batchnorm = "micro-batch",
        shared: PartialGrads | None = None,
        copies: StageReplicaGroup | None = None,
    ) -> None:
        self._program, self._plan, self._seat = program, plan, seat
        self._recorder, self._micro_steps = recorder, micro_steps
        self._place = StageRuntime(
            program, plan, captured, parts, seat, layout, recompute=recompute, batchnorm=batchnorm, copies=copies
        )
        self._tensors, self._stages = self._place.tensors, self._place.stages
        self._mail, self._ties = P2PQueue(wire), TiedGradients(plan, seat.worker, wire)
        self._performer = ActionExecutor(self._stages, self._mail, recorder)
        self._shared, self._copies = shared, copies
        self._itineraries: dict[int, WorkerProgram] = {}
        self._losses, self._samples = 0.0, 0

    @property
    def peak_saved_bytes(self) -> int:
        """The most that was kept for backward at one time, parameters and the batch itself not counted."""
        return self._place.holdings.peak_bytes

    def adopt(self, state: FlatState) -> None:
        self._tensors.bind(state)
        for stage in self._stages.values():
            stage.clear()
        self._losses, self._samples = 0.0, 0

    def advance(self, batch: Batch, clock: Clock) -> float:
        if not batch.samples:
            return math.nan
        loss = self._through(self._jobs(batch, clock), clock + 1)
        for stage in self._stages.values():
            stage.end()
        self._losses += loss * batch.samples
        self._samples += batch.samples
        return loss

    def finish(self, out: FlatState) -> Measured:
        gradients = self._tensors.take_gradients()
        with torch.no_grad():
            if self._copies is not None and self._samples:
                self._add_up_copies(self._copies, gradients)
            if self._shared is not None and self._samples:
                self._shared.all_reduce_(gradients)
            if self._ties and self._samples:
                self._add_up_tied(gradients)
            if self._micro_steps > 1 and self._samples:
                torch._foreach_div_(gradients, float(self._samples))
            if gradients:  # a stage may have nothing to train
                torch._foreach_copy_(out.views.parameters, gradients)
            self._tensors.write_buffers(out)
            if self._copies is not None and self._samples and out.buffers:
                of_first(out.buffers, self._copies, "running buffers")
        if not self._samples:
            return Measured(math.nan, 0, True)
        loss = self._losses / self._samples
        return Measured(loss, self._samples, finite(out.parameters, loss if self._place.takes_target else 0.0))

    def _through(self, jobs: Sequence[Job], step: int) -> float:
        """One mini-batch, from end to end; its mean loss where it is known."""
        way = self._itinerary(len(jobs))
        self._mail.begin(way.incoming, [job.micro_batch.shapes for job in jobs])
        losses: list[tuple[int, Tensor]] = []
        for task, following in zip_longest(way.tasks, way.tasks[1:]):
            job = jobs[task.action.micro_batch]
            found = self._performer.do(task, following, job, step)
            if found is not None:
                losses.append((job.micro_batch.samples, found))
        began = time.monotonic_ns()
        self._mail.settle()
        loss = self._mean(losses, sum(job.micro_batch.samples for job in jobs))
        self._recorder.record("wait", step, began, time.monotonic_ns())
        return loss

    def _mean(self, losses: Sequence[tuple[int, Tensor]], samples: int) -> float:
        """Over all samples, where the loss is known."""
        if not self._place.takes_target:
            return math.nan
        total = sum(count * float(loss) for count, loss in losses)
        if self._copies is not None:
            term = torch.tensor([total], dtype=torch.float64)
            self._copies.add_up(term, "the loss of other micro-batches")
            total = float(term)
        return total / samples

    def _jobs(self, batch: Batch, clock: Clock) -> list[Job]:
        seed = step_seed(self._program.seed, self._seat.replica, clock)
        whole = float(batch.samples) if self._micro_steps == 1 else 1.0
        return [Job(each, each.samples / whole, seed) for each in self._place.micro_batches(batch)]

    def _itinerary(self, count: int) -> WorkerProgram:
        if count not in self._itineraries:
            self._itineraries[count] = self._plan.itinerary(self._seat.worker, count)
        return self._itineraries[count]

    def _add_up_copies(self, copies: StageReplicaGroup, gradients: Sequence[Tensor]) -> None:
        began = time.monotonic_ns()
        add_up(gradients, copies, "gradients of other micro-batches")
        self._recorder.record("all_reduce", 0, began, time.monotonic_ns())

    def _add_up_tied(self, gradients: Sequence[Tensor]) -> None:
        entries = [entry for block in self._tensors.layout.parameters for entry in block.entries]
        began = time.monotonic_ns()
        self._ties.add_up({entry.name: gradient for entry, gradient in zip(entries, gradients, strict=True)})
        self._recorder.record("all_reduce", 0, began, time.monotonic_ns())

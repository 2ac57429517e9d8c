"""Δ by stages: one worker of a pipeline, which does what the schedule says with the parts that it holds."""

import math
import time
from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from paceline.core.types import Clock
from paceline.program import Program
from paceline.replica.autograd import NO_RECORDER, step_seed
from paceline.replica.base import Batch, Measured, Replica, finite
from paceline.replica.capture import Captured
from paceline.replica.pipeline.base import Part
from paceline.replica.pipeline.copies import Copies, add_up, of_first
from paceline.replica.pipeline.forward import Job
from paceline.replica.pipeline.mail import Mail
from paceline.replica.pipeline.messages import Itinerary, Plan
from paceline.replica.pipeline.performer import Performer
from paceline.replica.pipeline.stages import Batchnorm, Recompute
from paceline.replica.pipeline.ties import Ties
from paceline.replica.pipeline.wire import Wire
from paceline.replica.pipeline.workplace import Seat, Workplace
from paceline.replica.state import Layout, State
from paceline.replica.tensor.shared import SharedTerms
from paceline.trace.recorder import AnyRecorder


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
        plan: Plan,
        captured: Captured,
        parts: Sequence[Part],
        seat: Seat,
        wire: Wire,
        layout: Layout,
        *,
        recorder: AnyRecorder = NO_RECORDER,
        micro_steps: int = 1,
        recompute: Recompute = "none",
        batchnorm: Batchnorm = "micro-batch",
        shared: SharedTerms | None = None,
        copies: Copies | None = None,
    ) -> None:
        self._program, self._plan, self._seat = program, plan, seat
        self._recorder, self._micro_steps = recorder, micro_steps
        self._place = Workplace(
            program, plan, captured, parts, seat, layout, recompute=recompute, batchnorm=batchnorm, copies=copies
        )
        self._tensors, self._stages = self._place.tensors, self._place.stages
        self._mail, self._ties = Mail(wire), Ties(plan, seat.worker, wire)
        self._performer = Performer(self._stages, self._mail, recorder)
        self._shared, self._copies = shared, copies
        self._itineraries: dict[int, Itinerary] = {}
        self._losses, self._samples = 0.0, 0

    @property
    def peak_saved_bytes(self) -> int:
        """The most that was kept for backward at one time, parameters and the batch itself not counted."""
        return self._place.holdings.peak_bytes

    def adopt(self, state: State) -> None:
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

    def finish(self, out: State) -> Measured:
        gradients = self._tensors.take_gradients()
        with torch.no_grad():
            if self._copies is not None and self._samples:
                self._add_up_copies(self._copies, gradients)
            if self._shared is not None and self._samples:
                self._shared.add_up(gradients)
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

    def _itinerary(self, count: int) -> Itinerary:
        if count not in self._itineraries:
            self._itineraries[count] = self._plan.itinerary(self._seat.worker, count)
        return self._itineraries[count]

    def _add_up_copies(self, copies: Copies, gradients: Sequence[Tensor]) -> None:
        began = time.monotonic_ns()
        add_up(gradients, copies, "gradients of other micro-batches")
        self._recorder.record("all_reduce", 0, began, time.monotonic_ns())

    def _add_up_tied(self, gradients: Sequence[Tensor]) -> None:
        entries = [entry for block in self._tensors.layout.parameters for entry in block.entries]
        began = time.monotonic_ns()
        self._ties.add_up({entry.name: gradient for entry, gradient in zip(entries, gradients, strict=True)})
        self._recorder.record("all_reduce", 0, began, time.monotonic_ns())

"""Forward passes of one part, and what is kept of each."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from paceline.core.errors import InputError
from paceline.program import Program, Tree, leaves
from paceline.replica.autograd import step_seed
from paceline.replica.pipeline.base import Part
from paceline.replica.pipeline.batchnorm import Deferred
from paceline.replica.pipeline.header import Value
from paceline.replica.pipeline.mail import Received
from paceline.replica.pipeline.micro_batches import MicroBatch, Shapes
from paceline.replica.pipeline.pieces import Body
from paceline.replica.pipeline.portal import Portals
from paceline.replica.pipeline.split_backward import Later, Splitter
from paceline.replica.saved import Tally

Rebuild: TypeAlias = Callable[[Sequence[Tensor]], Tree]


@dataclass(frozen=True)
class Job:
    """One micro-batch, as all parts of a worker see it."""

    micro_batch: MicroBatch
    weight: float
    """Of its mean loss in what is minimised."""
    seed: int

    @property
    def index(self) -> int:
        """Which micro-batch."""
        return self.micro_batch.index


@dataclass
class Pass:
    """One forward pass, with its graph."""

    made: list[Received]
    """What other parts need; to be let go of by whoever has sent it."""
    edges: dict[str, GradientEdge]
    """Where the gradients of what was sent go in, by name."""
    loss: Tensor | None
    portals: Portals
    later: Later
    nbytes: int = 0
    """Kept for backward."""
    passing_bytes: int = 0
    """There for a while during backward, on top."""


@dataclass(frozen=True)
class Means:
    """What the forward passes of a part are made with beside the part.

    Args:
        body: runs the part.
        program: says seed, precision and loss.
        rebuild: output leaves -> output; None: this is not the last part.
        device: as torch writes it.
        splitter: what splits backward passes, where that is done.
        deferred: the part's BatchNorms, where their statistics wait for the end of a mini-batch.
    """

    body: Body
    program: Program
    rebuild: Rebuild | None
    device: str
    splitter: Splitter | None = None
    deferred: Deferred | None = None


class Forward:
    """Makes the forward passes of one part, whose module is in training mode."""

    def __init__(self, part: Part, means: Means) -> None:
        self._part, self._means = part, means
        self._sizes: dict[Shapes, tuple[int, int]] = {}

    def __call__(self, job: Job, received: Sequence[Received], *, again: bool = False) -> Pass:
        """With its graph; ``again``: it has been made before."""
        portals, later = Portals(), Later()
        values = [
            portals.enter(crossing.name, value) if differentiable and isinstance(value, Tensor) else value
            for crossing, (value, differentiable) in zip(self._part.received, received, strict=True)
        ]
        with self._measured(job) as tally, self._around(job, later, again=again):
            made, loss = self._call(job, values, tally)
        if tally is not None:
            self._sizes[job.micro_batch.shapes] = tally.nbytes, tally.passing_bytes
        edges = {
            crossing.name: get_gradient_edge(value)
            for crossing, value in zip(self._part.sent, made, strict=True)
            if isinstance(value, Tensor) and value.requires_grad
        }
        return Pass(list(map(_detached, made)), edges, loss, portals, later, *self._sizes[job.micro_batch.shapes])

    def blind(self, job: Job, received: Sequence[Received]) -> tuple[list[Value], Tensor | None]:
        """Without a graph."""
        with torch.no_grad(), self._around(job, None, again=False):
            return self._call(job, [value for value, _ in received], None)

    def tally(self, micro_batch: MicroBatch) -> Tally:
        """An empty one, to which what is there anyway does not count."""
        module = self._part.module
        return Tally([*module.parameters(), *module.buffers(), *micro_batch.inputs, *leaves(micro_batch.target)])

    def _call(self, job: Job, values: Sequence[Value], tally: Tally | None) -> tuple[list[Value], Tensor | None]:
        inputs = [job.micro_batch.inputs[leaf] for leaf in self._part.inputs]
        made = list(self._means.body.run([*inputs, *values], tally))
        if self._means.rebuild is None:
            return made, None
        sent = len(self._part.sent)
        output: Any = made[sent:]
        return made[:sent], self._loss(self._means.rebuild(output), job.micro_batch.target)

    def _loss(self, output: Tree, target: Tree) -> Tensor:
        loss = self._means.program.loss(output, target)
        if loss.numel() != 1:
            raise InputError(
                f"the loss has shape {list(loss.shape)}, but it must be one number, the mean over the samples; write "
                "loss=torch.nn.functional.cross_entropy, or add .mean()"
            )
        return loss

    @contextmanager
    def _around(self, job: Job, later: Later | None, *, again: bool) -> Iterator[None]:
        """Random numbers, precision, and functions that stand in for others."""
        means = self._means
        _seed(step_seed(job.seed, self._part.number, job.index), means.device)
        with ExitStack() as stack:
            stack.enter_context(means.program.autocast(means.device))
            if means.deferred is not None:
                stack.enter_context(means.deferred.forward(again=again))
            if means.splitter is not None:
                stack.enter_context(means.splitter.putting_off(later))
            yield

    @contextmanager
    def _measured(self, job: Job) -> Iterator[Tally | None]:
        """Count what is saved, where shapes are new."""
        if job.micro_batch.shapes in self._sizes:
            yield None
            return
        tally = self.tally(job.micro_batch)
        with tally.watching():
            yield tally


def _detached(value: Value) -> Received:
    if isinstance(value, Tensor):
        return Received(value.detach(), value.requires_grad)
    return Received(value, False)


def _seed(seed: int, device: str) -> None:
    torch.default_generator.manual_seed(seed)
    if torch.device(device).type == "cuda":
        torch.cuda.manual_seed(seed)

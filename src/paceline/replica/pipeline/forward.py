"""Forward passes of one part: its inputs by portals, its body, activation checkpointing, and what is kept of each pass.

What runs a part: all of it at once, or piece by piece, with each piece's activations forgotten in between.

::

    whole     keeps   | a b c d e f g h i |
    pieces    keeps   | a     | d     | g     |     in backward of a piece, those after its first are made again

Forward passes of one part, and what is kept of each.
"""

import math
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import checkpoint

from paceline.core.errors import InputError
from paceline.program import Program, Tree, leaves
from paceline.replica.activation_memory import Tally
from paceline.replica.capture.capture import Captured
from paceline.replica.pipeline.base import Cut, Part
from paceline.replica.pipeline.batchnorm import Deferred
from paceline.replica.pipeline.comm_plan import Message
from paceline.replica.pipeline.cut import cut
from paceline.replica.pipeline.cut_groups import group
from paceline.replica.pipeline.micro_batches import MicroBatch, Shapes
from paceline.replica.pipeline.p2p_queue import Received, Value
from paceline.replica.pipeline.split_backward import DeferredWeightGrads, Splitter
from paceline.replica.single import step_seed

Give: TypeAlias = Callable[[Message, Tensor], None]


class Portals:
    """Those by which the differentiable values of one micro-batch come into one part."""

    def __init__(self) -> None:
        self._alike: dict[str, Callable[[], Tensor]] = {}
        self._returns: Returns | None = None

    def enter(self, name: str, value: Tensor) -> Tensor:
        """What the part is to be given for a value: the same memory, of which nobody is the leaf."""
        self._alike[name] = partial(torch.zeros, value.shape, dtype=value.dtype, device=value.device)
        entered: Tensor = _Portal.apply(_anchor(), self, name, [value])  # type: ignore[no-untyped-call]
        assert entered.grad_fn is not None
        # Autograd goes on with the youngest node that is ready; a gradient that others wait for is to overtake it.
        entered.grad_fn._set_sequence_nr(_URGENT)  # type: ignore[attr-defined]
        return entered

    def returning(self, messages: Sequence[Message], give: Give) -> "Returns":
        """A backward pass begins, and gradients go back by these messages."""
        self._returns = Returns([m for m in messages if m.name in self._alike], self._alike, give)
        return self._returns

    def made(self, name: str, gradient: Tensor) -> None:
        """The gradient of a value is there."""
        assert self._returns is not None, "there is one backward pass, and it has been announced"
        self._returns.made(name, gradient)


class Returns:
    """The gradients of one backward pass on their way back: each goes as soon as those before it have gone.

    Args:
        messages: by which they go, by rank.
        alike: makes zeros as a value has elements.
        give: sends one.
    """

    def __init__(self, messages: Sequence[Message], alike: Mapping[str, Callable[[], Tensor]], give: Give) -> None:
        self._alike, self._give = alike, give
        self._there: dict[str, Tensor] = {}
        self._lines: dict[int, deque[Message]] = defaultdict(deque)
        for message in messages:
            self._lines[message.receiver].append(message)
        self._line_of = {message.name: self._lines[message.receiver] for message in messages}

    def made(self, name: str, gradient: Tensor) -> None:
        """Send it, and those that have waited for it; but not before those that stand before it."""
        self._there[name] = gradient
        line = self._line_of[name]
        while line and line[0].name in self._there:
            message = line.popleft()
            self._give(message, self._there.pop(message.name))

    def close(self) -> None:
        """The pass has ended: what has no gradient gets zeros, since its maker waits for one."""
        for line in self._lines.values():
            for message in list(line):
                if message.name not in self._there:
                    self.made(message.name, self._alike[message.name]())


class _Portal(torch.autograd.Function):
    """A value in a list is none of the function's inputs, so the output is the value itself and no view of it."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, portals: Portals, name: str, value: list[Tensor]) -> Tensor:
        ctx.portals, ctx.name = portals, name
        return value[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.portals.made(ctx.name, gradients[0])
        return None, None, None, None


def _anchor() -> Tensor:
    """What makes an output differentiable that has no differentiable input."""
    return torch.empty(0, requires_grad=True)


_URGENT = 2**62


Again: TypeAlias = Callable[[], AbstractContextManager[None]]
"""Called in a forward pass: the context in which it is made again."""


class Body(ABC):
    """A part as it is run."""

    @property
    @abstractmethod
    def modules(self) -> Sequence[nn.Module]:
        """What is called, for functions to be replaced in."""

    @abstractmethod
    def run(self, given: Sequence[Value], tally: Tally | None) -> Sequence[Value]:
        """The part's forward.

        Args:
            given: inputs and what was received.
            tally: where shapes are new: is told what is kept that autograd does not save.
        """


@final
class Whole(Body):
    """All at once."""

    def __init__(self, part: Part) -> None:
        self._module = part.module

    @property
    def modules(self) -> Sequence[nn.Module]:
        return [self._module]

    def run(self, given: Sequence[Value], tally: Tally | None) -> Sequence[Value]:  # noqa: ARG002
        found: Sequence[Value] = self._module(*given)
        return found


@final
class Checkpointed(Body):
    """√n pieces of equally many units: what is kept for n of them is then least (Chen et al. 2016, arXiv 1604.06174).

    Args:
        part: any.
        captured: what it was cut from.
        running: its buffers that training changes; what is made again leaves them as they are.
    """

    def __init__(self, part: Part, captured: Captured, running: Sequence[Tensor]) -> None:
        self._cut = in_pieces(part, captured)
        self._running = running
        self.again: Again = nullcontext

    @property
    def modules(self) -> Sequence[nn.Module]:
        return [piece.module for piece in self._cut.parts]

    def run(self, given: Sequence[Value], tally: Tally | None) -> Sequence[Value]:
        values: dict[str, Value] = {}
        made: Sequence[Value] = ()
        for piece in self._cut.parts:
            taken = [given[index] for index in piece.inputs] + [values[crossing.name] for crossing in piece.received]
            if tally is not None:
                tally.add_all(taken)
            made = self._piece(piece, taken, tally)
            values.update((crossing.name, value) for crossing, value in zip(piece.sent, made, strict=False))
        return made

    def _piece(self, piece: Part, taken: Sequence[Value], tally: Tally | None) -> Sequence[Value]:
        if tally is not None:  # to be measured, it is kept this once
            with tally.passing():
                return piece.module(*taken)  # type: ignore[no-any-return]
        return checkpoint(piece.module, *taken, use_reentrant=False, context_fn=self._contexts)  # type: ignore[no-any-return]

    def _contexts(self) -> tuple[Any, Any]:
        """Of the first time, and of when it is made again."""
        return nullcontext(), _undone(self.again(), self._running)


@contextmanager
def _undone(context: AbstractContextManager[None], buffers: Sequence[Tensor]) -> Iterator[None]:
    """The context, after which buffers are as they were."""
    with ExitStack() as stack:
        stack.enter_context(context)
        stack.enter_context(keeping(buffers))
        yield


@contextmanager
def keeping(buffers: Sequence[Tensor]) -> Iterator[None]:
    """Whatever is written into them while it is entered, they are then as they were."""
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            # Not seen by autograd: a BatchNorm has saved it, though its backward does not read it (torch 2.13).
            buffer.data.copy_(value)


def in_pieces(part: Part, captured: Captured) -> Cut:
    """A part cut as a model is."""
    units = group(replace(captured, module=part.module))
    count = len(units.groups)
    pieces = max(1, math.isqrt(count))
    return cut(units, [count * k // pieces for k in range(1, pieces)])


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
    later: DeferredWeightGrads
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
        portals, later = Portals(), DeferredWeightGrads()
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
    def _around(self, job: Job, later: DeferredWeightGrads | None, *, again: bool) -> Iterator[None]:
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

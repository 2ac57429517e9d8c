"""Replicas with an optimizer of their own: they walk some steps by themselves before they push."""

import math

import torch
from torch.optim import Optimizer

from paceline.core.delta import Adopt, Keep, Mix
from paceline.core.types import Clock
from paceline.program import Program
from paceline.replica.base import Batch, Measured, Replica, finite
from paceline.replica.clipping import clip
from paceline.replica.flat_optimizer import FlatOptimizer
from paceline.replica.flat_state import FlatState
from paceline.replica.single import Autograd


class _Walk:
    """The optimizer steps that a replica makes by itself, and what it met on the way."""

    def __init__(self, program: Program, autograd: Autograd) -> None:
        self._program, self._autograd = program, autograd
        self._gradient = autograd.layout.new()
        self._stepper: FlatOptimizer | None = None
        self.forget()

    def begin(self, state: FlatState) -> None:
        """Move ``state``, to which the parameters are bound, with an optimizer that has not made a step."""
        program, autograd = self._program, self._autograd
        if autograd.on_host:
            self._stepper = FlatOptimizer(program.optimizer, program.scheduler, state, self._gradient)
        else:  # there the parameters are copies, and an optimizer has to step on these
            self._optimizer: Optimizer = program.optimizer(autograd.parameters)
            self._scheduler = program.scheduler(self._optimizer) if program.scheduler is not None else None

    def forget(self) -> None:
        self._losses, self._samples = 0.0, 0

    def step(self, batch: Batch, clock: Clock) -> float:
        if not batch.samples:
            return math.nan
        loss = self._autograd.backward(batch, clock)
        if self._stepper is not None:
            self._step(self._stepper)
        else:
            self._step_on_device()
        self._losses += loss * batch.samples
        self._samples += batch.samples
        return loss

    def _step(self, stepper: FlatOptimizer) -> None:
        gradient = self._gradient
        torch._foreach_copy_(gradient.views.parameters, self._autograd.take_gradients())
        if self._program.clip_norm is not None:
            clip(gradient.parameters, self._program.clip_norm)
        stepper.step(gradient.parameters)

    def _step_on_device(self) -> None:
        for parameter in self._autograd.parameters:
            if parameter.grad is None:  # as on the host: it counts as a gradient of zero
                parameter.grad = torch.zeros_like(parameter)
        if self._program.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._autograd.parameters, self._program.clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._scheduler is not None:
            self._scheduler.step()

    def measured(self, out: FlatState) -> Measured:
        if not self._samples:
            return Measured(math.nan, 0, True)
        loss = self._losses / self._samples
        return Measured(loss, self._samples, finite(out.parameters, loss))


class LocalSGD(Replica):
    """Keeps parameters x and an optimizer of its own; moves x, and sends how far (LocalSteps) or where to (elastic).

    Args:
        adopt: what x becomes when an A is sent: A itself, a mixture, or x as it was.
        distance: False: Δ = x - x_read (:class:`~paceline.aggregation.base.Change`); True: x itself, from which the
            owner takes its A of that moment (:class:`~paceline.aggregation.base.Distance`).

    After a Δ that is not finite nothing of its own is of use: it begins anew with the A that it is sent next.
    """

    def __init__(self, program: Program, autograd: Autograd, adopt: Adopt, *, distance: bool) -> None:
        self._autograd, self._rule, self._distance = autograd, adopt, distance
        self._own: FlatState | None = None
        self._walk = _Walk(program, autograd)

    def adopt(self, state: FlatState) -> None:
        if self._own is None:
            self._own = state.clone()
            self._read = state.clone()
            self._walk.begin(self._own)
        else:
            take_on(self._own, state, self._rule)
            self._read.copy_(self._own)
        self._autograd.bind(self._own)
        self._walk.forget()

    def advance(self, batch: Batch, clock: Clock) -> float:
        return self._walk.step(batch, clock)

    def finish(self, out: FlatState) -> Measured:
        assert self._own is not None, "finish before adopt"
        with torch.no_grad():
            torch._foreach_copy_(out.views.parameters, [p.detach() for p in self._autograd.parameters])
            if not self._distance:
                torch._foreach_sub_(out.parameters, self._read.parameters)
            self._autograd.write_buffers(out)
            if not self._autograd.on_host:
                torch._foreach_copy_(self._own.views.parameters, [p.detach() for p in self._autograd.parameters])
            if self._own.buffers:
                self._autograd.write_buffers(self._own)
        measured = self._walk.measured(out)
        if not measured.finite:
            self._own = None
        return measured


class WritesInPlace(Replica):
    """Its parameters are the A that it is given, which it writes step by step with an optimizer of its own: Hogwild."""

    def __init__(self, program: Program, autograd: Autograd) -> None:
        self._autograd, self._walk = autograd, _Walk(program, autograd)
        self._bound: FlatState | None = None

    def adopt(self, state: FlatState) -> None:
        if self._bound is not state:
            self._autograd.bind(state)
            self._walk.begin(state)
            self._bound = state
        self._walk.forget()

    def advance(self, batch: Batch, clock: Clock) -> float:
        return self._walk.step(batch, clock)

    def finish(self, out: FlatState) -> Measured:
        return self._walk.measured(out)


def take_on(own: FlatState, sent: FlatState, rule: Adopt) -> None:
    """Let a replica's own parameters and buffers be what the rule makes of them and of the A that was sent."""
    if isinstance(rule, Keep):
        return
    alpha = rule.alpha if isinstance(rule, Mix) else 1.0
    with torch.no_grad():
        for mine, theirs in zip(own.parameters, sent.parameters, strict=True):
            if alpha == 1.0:
                mine.copy_(theirs)
            else:
                mine.add_(theirs - mine, alpha=alpha)
        for mine, theirs in zip(own.buffers, sent.buffers, strict=True):
            mine.copy_(theirs)

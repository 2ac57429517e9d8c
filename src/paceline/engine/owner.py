"""Holds A and the optimizer's state, and executes the log of decisions."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.aggregation.base import Aggregation
from paceline.aggregation.local_steps import LocalSteps, Outer
from paceline.core.delta import Change, Distance
from paceline.engine.kernels import kernel_of
from paceline.program import Program
from paceline.replica.state import State

ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop)
"""Optimizers that treat each element alone and make their state at the first step: on A as one flat vector they do to
the bit what they do on its tensors, in a fraction of the time."""


class Owner:
    """A, its update rule, and nothing else.

    Args:
        program: gives optimizer, scheduler and clipping.
        policy: says what a Δ is: a gradient (an optimizer step on it), or a change (A moves by it, or an outer
            optimizer steps on its negative).
        state: A, which is updated in place.
    """

    def __init__(self, program: Program, policy: Aggregation[Any], state: State) -> None:
        self.state = state
        self._distance = isinstance(policy.delta, Distance)
        self._moves = isinstance(policy.delta, (Change, Distance))
        self._clip_norm: float | None = None
        self._scheduler: LRScheduler | None = None
        self._combined = state.clone()
        if self._moves:
            self._optimizer = _outer(policy.outer if isinstance(policy, LocalSteps) else None, state, self._combined)
        else:
            self._optimizer = optimizer_of(program, state, self._combined)
            self._scheduler = program.scheduler(self._optimizer) if program.scheduler else None
            self._clip_norm = program.clip_norm
        self._kernel = kernel_of(self._optimizer, state.parameters)
        looked_at = self._moves or self._clip_norm is not None or "agreement" in policy.needs
        self._direct = not looked_at and not state.buffers

    @property
    def combined(self) -> list[Tensor]:
        """Σ weight·Δ of the last update, clipped, one vector for each dtype; kept for policies that need agreement."""
        return self._combined.parameters

    def apply(self, deltas: Iterable[tuple[State, float]], rate: float = 1.0, *, alone: bool = False) -> None:
        """One update of A by Σ weight·Δ, summed in the order given; each Δ is looked at once, then let go.

        Args:
            deltas: may compute each Δ as it is asked for.
            rate: times the learning rate.
            alone: whether there is but one, of weight 1.
        """
        if alone and self._direct and self._kernel is not None:
            self._kernel.step(next(iter(deltas))[0].parameters, rate)  # to the bit what the long way does
            return
        self._combine(deltas)
        if self._clip_norm is not None:
            _clip(self._combined.parameters, self._clip_norm)
        if self._moves:
            torch._foreach_neg_(self._combined.parameters)
        if self._kernel is None:
            self._step(rate)
        else:
            self._kernel.step(self._combined.parameters, rate)

    def _combine(self, deltas: Iterable[tuple[State, float]]) -> None:
        buffers = _Buffers(self.state)
        for j, (delta, weight) in enumerate(deltas):
            for i, total in enumerate(self._combined.parameters):
                vector = delta.parameters[i] - self.state.parameters[i] if self._distance else delta.parameters[i]
                if j:
                    total.add_(vector, alpha=weight)
                else:
                    torch.mul(vector, weight, out=total)
            buffers.add(delta, weight)
        buffers.settle()

    def _step(self, rate: float) -> None:
        groups = self._optimizer.param_groups
        before = [group["lr"] for group in groups]
        for group, lr in zip(groups, before, strict=True):
            group["lr"] = lr * rate
        self._optimizer.step()
        for group, lr in zip(groups, before, strict=True):
            group["lr"] = lr
        if self._scheduler is not None:
            self._scheduler.step()


def optimizer_of(program: Program, state: State, gradient: State) -> Optimizer:
    """The program's optimizer over A: on its flat vectors where that comes to the same, else on its tensors.

    Their ``grad`` is ``gradient``, now and for ever.
    """
    tensors = _parameters(state.views.parameters, gradient.views.parameters)
    optimizer = program.optimizer(tensors)
    groups = optimizer.param_groups
    whole = len(groups) == 1 and len(groups[0]["params"]) == len(tensors)
    if whole and type(optimizer) in ELEMENTWISE and not optimizer.state:
        groups[0]["params"] = _parameters(state.parameters, gradient.parameters)
    return optimizer


def _outer(outer: Outer | None, state: State, gradient: State) -> Optimizer:
    rule = outer or Outer(lr=1.0, momentum=0.0, nesterov=False)
    vectors = _parameters(state.parameters, gradient.parameters)
    return torch.optim.SGD(vectors, lr=rule.lr, momentum=rule.momentum, nesterov=rule.nesterov)


def _parameters(tensors: list[Tensor], gradients: list[Tensor]) -> list[nn.Parameter]:
    parameters = [nn.Parameter(tensor) for tensor in tensors]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return parameters


def _clip(vectors: list[Tensor], bound: float) -> None:
    """Scale so that the Euclidean norm over all vectors is at most ``bound``, as torch's clip_grad_norm_ does."""
    norm = math.hypot(*(float(torch.linalg.vector_norm(v)) for v in vectors))
    scale = bound / (norm + 1e-6)
    if scale < 1.0:
        torch._foreach_mul_(vectors, scale)


class _Buffers:
    """Running buffers of A: the weighted mean of the replicas'; whole numbers (counters): the largest, A's included."""

    def __init__(self, state: State) -> None:
        self._mine = state.buffers
        self._sums = [torch.zeros_like(b) if b.is_floating_point() else b.clone() for b in self._mine]
        self._weight = 0.0

    def add(self, delta: State, weight: float) -> None:
        """Take one replica's into account."""
        for total, theirs in zip(self._sums, delta.buffers, strict=True):
            if total.is_floating_point():
                total.add_(theirs, alpha=weight)
            else:
                torch.maximum(total, theirs, out=total)
        self._weight += weight

    def settle(self) -> None:
        """Make them A's."""
        for mine, total in zip(self._mine, self._sums, strict=True):
            mine.copy_(total / self._weight if mine.is_floating_point() else total)

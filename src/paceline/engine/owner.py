"""Holds A and the optimizer's state, and executes the log of decisions."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.aggregation.base import Aggregation
from paceline.aggregation.local_steps import LocalSteps, Outer
from paceline.core.delta import Change, Distance
from paceline.engine.kernels import Kernel, Rule, rule_of
from paceline.program import Program
from paceline.replica.state import State

ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop)
"""Optimizers that treat each element alone and make their state at the first step: on A as one flat vector they do to
the bit what they do on its tensors, in a fraction of the time."""

Weighted: TypeAlias = Sequence[tuple[State, float]]
"""Δs and their weights."""


class Owner:
    """A, its update rule, and nothing else.

    An update writes the new A over the old one, or into other vectors where ``out`` is given: then nobody who still
    reads the old one is disturbed.

    Args:
        program: gives optimizer, scheduler and clipping.
        policy: says what a Δ is: a gradient (an optimizer step on it), or a change (A moves by it, or an outer
            optimizer steps on its negative).
        state: A.
    """

    def __init__(self, program: Program, policy: Aggregation[Any], state: State) -> None:
        self.state = state
        self._distance = isinstance(policy.delta, Distance)
        self._moves = isinstance(policy.delta, (Change, Distance))
        self._combined = state.layout.new()
        self.clip_norm = None if self._moves else program.clip_norm
        if self._moves:
            outer = policy.outer if isinstance(policy, LocalSteps) else None
            self._optimizer, self._targets = _outer(outer, state, self._combined)
        else:
            self._optimizer, self._targets = optimizer_of(program, state, self._combined)
        self._rule = rule_of(self._optimizer, state.parameters)
        make = None if self._moves else program.scheduler
        self._scheduler: LRScheduler | None = make(self._optimizer) if make else None
        if self._rule is not None:
            self._optimizer._opt_called = True  # type: ignore[attr-defined]  # else the scheduler warns of no step
        self.steps = 0
        """How many updates a rule of ours has made."""
        self.memory = [[torch.zeros_like(v) for _ in range(self.remembers)] for v in state.parameters]
        """What the optimizer remembers, for each vector of A; where a rule of ours makes its steps."""
        looked_at = self._moves or self.clip_norm is not None or "agreement" in policy.needs
        self._direct = self._rule is not None and not looked_at and not state.buffers
        self.divisible = self._rule is not None and not self._distance and "agreement" not in policy.needs
        """Whether others can make an update, each a part of it: :meth:`divide`."""

    @property
    def remembers(self) -> int:
        """How many vectors of memory there are for each vector of A."""
        return self._rule.remembers if self._rule is not None else 0

    @property
    def combined(self) -> list[Tensor]:
        """Σ weight·Δ of the last update, clipped, one vector for each dtype; kept for policies that need agreement."""
        return self._combined.parameters

    def move_to(self, there: State) -> None:
        """Let A lie in other vectors from now on."""
        self.state = there.copy_(self.state)
        self._targets.point_at(there)

    def apply(
        self, deltas: Iterable[tuple[State, float]], rate: float = 1.0, *, alone: bool = False, out: State | None = None
    ) -> None:
        """One update of A by Σ weight·Δ, summed in the order given; each Δ is looked at once, then let go.

        Args:
            deltas: may compute each Δ as it is asked for.
            rate: times the learning rate.
            alone: whether there is but one, of weight 1.
            out: becomes A; None: A's own vectors.
        """
        there = out or self.state
        if alone and self._direct:
            self._step(next(iter(deltas))[0].parameters, rate, there)
        else:
            self._combine(deltas, there)
            if self.clip_norm is not None:
                torch._foreach_mul_(self.combined, clip_scale(square_norm(self.combined), self.clip_norm))
            if self._moves:
                torch._foreach_neg_(self.combined)
            self._step(self.combined, rate, there)
        self._moved(there)

    def divide(
        self, deltas: Weighted, rate: float, out: State, carry: Callable[[Kernel, Sequence[float]], None]
    ) -> None:
        """As :meth:`apply`, but ``carry`` makes the new parameters and the new memory.

        It is given the kernel, and the weight of each Δ in the gradient.
        """
        assert self._rule is not None, "an update that can't be divided"
        buffers = _Buffers(self.state)
        for delta, weight in deltas:
            buffers.add(delta, weight)
        buffers.settle(out)
        sign = -1.0 if self._moves else 1.0
        carry(self._next_kernel(self._rule, rate), [sign * weight for _, weight in deltas])
        self._moved(out)

    def _combine(self, deltas: Iterable[tuple[State, float]], there: State) -> None:
        buffers = _Buffers(self.state)
        for j, (delta, weight) in enumerate(deltas):
            for i, total in enumerate(self.combined):
                vector = delta.parameters[i] - self.state.parameters[i] if self._distance else delta.parameters[i]
                if j:
                    total.add_(vector, alpha=weight)
                else:
                    torch.mul(vector, weight, out=total)
            buffers.add(delta, weight)
        buffers.settle(there)

    def _step(self, gradients: Sequence[Tensor], rate: float, there: State) -> None:
        if self._rule is None:
            self._step_by_torch(rate, there)
            return
        kernel = self._next_kernel(self._rule, rate)
        for i, gradient in enumerate(gradients):
            kernel.step(self.state.parameters[i], there.parameters[i], gradient, self.memory[i])

    def _next_kernel(self, rule: Rule, rate: float) -> Kernel:
        self.steps += 1
        return rule.kernel(self.steps, rate)

    def _step_by_torch(self, rate: float, there: State) -> None:
        if there is not self.state:
            torch._foreach_copy_(there.parameters, self.state.parameters)
            self._targets.point_at(there)
        groups = self._optimizer.param_groups
        before = [group["lr"] for group in groups]
        for group, lr in zip(groups, before, strict=True):
            group["lr"] = lr * rate
        self._optimizer.step()
        for group, lr in zip(groups, before, strict=True):
            group["lr"] = lr

    def _moved(self, there: State) -> None:
        self.state = there
        if self._scheduler is not None:
            self._scheduler.step()


class Targets:
    """The parameters that an optimizer steps on: A's vectors, or their tensors; their ``grad`` is one state, for ever.

    Args:
        state: A.
        gradient: of the same layout.
        flat: whether they are whole vectors.
    """

    def __init__(self, state: State, gradient: State, *, flat: bool) -> None:
        self._flat = flat
        self.parameters = [nn.Parameter(tensor) for tensor in self._tensors(state)]
        for parameter, tensor in zip(self.parameters, self._tensors(gradient), strict=True):
            parameter.grad = tensor

    def point_at(self, state: State) -> None:
        """From now on the optimizer steps on this A."""
        for parameter, tensor in zip(self.parameters, self._tensors(state), strict=True):
            parameter.data = tensor

    def _tensors(self, state: State) -> list[Tensor]:
        return state.parameters if self._flat else state.views.parameters


def optimizer_of(program: Program, state: State, gradient: State) -> tuple[Optimizer, Targets]:
    """The program's optimizer over A: on its flat vectors where that comes to the same, else on its tensors."""
    targets = Targets(state, gradient, flat=False)
    optimizer = program.optimizer(targets.parameters)
    groups = optimizer.param_groups
    whole = len(groups) == 1 and len(groups[0]["params"]) == len(targets.parameters)
    if whole and type(optimizer) in ELEMENTWISE and not optimizer.state:
        targets = Targets(state, gradient, flat=True)
        groups[0]["params"] = targets.parameters
    return optimizer, targets


def square_norm(vectors: Iterable[Tensor]) -> float:
    """The square of the Euclidean norm over all vectors."""
    return sum(float(torch.linalg.vector_norm(v)) ** 2 for v in vectors)


def clip_scale(square: float, bound: float) -> float:
    """What a vector of this squared norm is to be multiplied by, for its norm to be at most ``bound``.

    As torch's clip_grad_norm_ has it.

    >>> round(clip_scale(25.0, 1.0), 3), clip_scale(0.25, 1.0)
    (0.2, 1.0)
    """
    return min(1.0, bound / (math.sqrt(square) + 1e-6))


def _outer(outer: Outer | None, state: State, gradient: State) -> tuple[Optimizer, Targets]:
    rule = outer or Outer(lr=1.0, momentum=0.0, nesterov=False)
    targets = Targets(state, gradient, flat=True)
    optimizer = torch.optim.SGD(targets.parameters, lr=rule.lr, momentum=rule.momentum, nesterov=rule.nesterov)
    return optimizer, targets


class _Buffers:
    """Running buffers of A: the weighted mean of the replicas'; whole numbers (counters): the largest, A's included."""

    def __init__(self, state: State) -> None:
        self._sums = [torch.zeros_like(b) if b.is_floating_point() else b.clone() for b in state.buffers]
        self._weight = 0.0

    def add(self, delta: State, weight: float) -> None:
        """Take one replica's into account."""
        for total, theirs in zip(self._sums, delta.buffers, strict=True):
            if total.is_floating_point():
                total.add_(theirs, alpha=weight)
            else:
                torch.maximum(total, theirs, out=total)
        self._weight += weight

    def settle(self, there: State) -> None:
        """Make them those of the new A."""
        for new, total in zip(there.buffers, self._sums, strict=True):
            new.copy_(total / self._weight if new.is_floating_point() else total)

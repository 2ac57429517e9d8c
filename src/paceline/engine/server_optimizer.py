"""Hold A and the optimizer's state, execute the log of decisions, compute the statistics of Δs for policies.

What a policy asked to be told of each Δ; nothing is computed unasked.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from paceline.aggregation.base import NOTHING, Aggregation
from paceline.aggregation.local_steps import LocalSteps, Outer
from paceline.core.delta import Change, Distance
from paceline.core.types import Seconds
from paceline.program import Program
from paceline.replica.clipping import clip
from paceline.replica.flat_optimizer import FlatOptimizer, OptimizerFactory
from paceline.replica.flat_state import FlatState
from paceline.replica.noise_estimator import NoiseEstimator
from paceline.replica.optimizer_kernels import StepKernel

Weighted: TypeAlias = Sequence[tuple[FlatState, float]]
"""Δs and their weights."""


class ServerOptimizer:
    """A, its update rule, and nothing else.

    An update writes the new A over the old one, or into other vectors where ``out`` is given: then nobody who still
    reads the old one is disturbed.

    Args:
        program: gives optimizer, scheduler and clipping.
        policy: says what a Δ is: a gradient (an optimizer step on it), or a change (A moves by it, or an outer
            optimizer steps on its negative).
        state: A.
        meter: looks at what is applied; None: nobody has asked.
    """

    def __init__(
        self, program: Program, policy: Aggregation[Any], state: FlatState, meter: NoiseEstimator | None = None
    ) -> None:
        self.state = state
        self._distance = isinstance(policy.delta, Distance)
        self._moves = isinstance(policy.delta, (Change, Distance))
        self._combined = state.layout.new()
        self.clip_norm = None if self._moves else program.clip_norm
        outer = policy.outer if isinstance(policy, LocalSteps) else None
        make, schedule = (_outer(outer), None) if self._moves else (program.optimizer, program.scheduler)
        self.stepper = FlatOptimizer(make, schedule, state, self._combined)
        looked_at = self._moves or self.clip_norm is not None or "agreement" in policy.needs
        self._direct = self.stepper.has_kernel and not looked_at and not state.buffers
        self._meter = meter
        if meter is not None:
            meter.measure_by(self.stepper)
        whole = "agreement" in policy.needs or meter is not None
        self.divisible = self.stepper.has_kernel and not self._distance and not whole
        """Whether others can make an update, each a part of it: :meth:`divide`."""

    @property
    def combined(self) -> list[Tensor]:
        """Σ weight·Δ of the last update, clipped, one vector for each dtype; kept for policies that need agreement."""
        return self._combined.parameters

    def move_to(self, there: FlatState) -> None:
        """Let A lie in other vectors from now on."""
        self.state = there.copy_(self.state)
        self.stepper.point_at(there)

    def apply(
        self,
        deltas: Iterable[tuple[FlatState, float]],
        rate: float = 1.0,
        *,
        alone: bool = False,
        out: FlatState | None = None,
    ) -> None:
        """One update of A by Σ weight·Δ, summed in the order given; each Δ is looked at once, then let go.

        Args:
            deltas: may compute each Δ as it is asked for.
            rate: times the learning rate.
            alone: whether there is but one.
            out: becomes A; None: A's own vectors.
        """
        there = out or self.state
        if alone and self._direct:
            delta, weight = next(iter(deltas))
            self.stepper.step(delta.parameters, rate, there, weight)
        else:
            self._combine(deltas, there)
            if self._meter is not None:
                self._meter.combined(self.combined)
            if self.clip_norm is not None:
                clip(self.combined, self.clip_norm)
            if self._moves:
                torch._foreach_neg_(self.combined)
            self.stepper.step(self.combined, rate, there)
        self.state = there

    def divide(
        self, deltas: Weighted, rate: float, out: FlatState, carry: Callable[[StepKernel, Sequence[float]], None]
    ) -> None:
        """As :meth:`apply`, but ``carry`` makes the new parameters and the new memory.

        It is given the kernel, and the weight of each Δ in the gradient.
        """
        buffers = _Buffers(self.state)
        for delta, weight in deltas:
            buffers.add(delta, weight)
        buffers.settle(out)
        sign = -1.0 if self._moves else 1.0
        carry(self.stepper.kernel(rate), [sign * weight for _, weight in deltas])
        self.stepper.end_step(out)
        self.state = out

    def _combine(self, deltas: Iterable[tuple[FlatState, float]], there: FlatState) -> None:
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


def _outer(outer: Outer | None) -> OptimizerFactory:
    rule = outer or Outer(lr=1.0, momentum=0.0, nesterov=False)
    return lambda parameters: torch.optim.SGD(parameters, lr=rule.lr, momentum=rule.momentum, nesterov=rule.nesterov)


class _Buffers:
    """Running buffers of A: the weighted mean of the replicas'; whole numbers (counters): the largest, A's included."""

    def __init__(self, state: FlatState) -> None:
        self._sums = [torch.zeros_like(b) if b.is_floating_point() else b.clone() for b in state.buffers]
        self._weight = 0.0

    def add(self, delta: FlatState, weight: float) -> None:
        """Take one replica's into account."""
        for total, theirs in zip(self._sums, delta.buffers, strict=True):
            if total.is_floating_point():
                total.add_(theirs, alpha=weight)
            else:
                torch.maximum(total, theirs, out=total)
        self._weight += weight

    def settle(self, there: FlatState) -> None:
        """Make them those of the new A."""
        for new, total in zip(there.buffers, self._sums, strict=True):
            new.copy_(total / self._weight if new.is_floating_point() else total)


class DeltaStatistics:
    """Makes ``Arrival.observed`` for one run.

    Args:
        policy: its ``needs`` say what is observed.
        owner: whose last update Δs are compared with.
    """

    def __init__(self, policy: Aggregation[Any], owner: ServerOptimizer | None) -> None:
        self._needs, self._owner = policy.needs - {"loss"}, owner
        self._last: list[Tensor] | None = None
        self._busy: Seconds = 0.0
        self._asked_s: Seconds = 0.0

    @property
    def looks_inside(self) -> bool:
        """Whether Δ itself must be there to be looked at."""
        return bool(self._needs - {"server"})

    def observe(self, delta: FlatState | None, now_s: Seconds) -> Mapping[str, float]:
        """The facts of one Δ that has just arrived."""
        if not self._needs:
            return NOTHING
        seen: dict[str, float] = {}
        if "norm" in self._needs and delta is not None:
            seen["norm"] = _norm(delta.parameters)
        if "agreement" in self._needs and delta is not None:
            seen["agreement"] = _cosine(delta.parameters, self._last) if self._last is not None else 0.0
        if "server" in self._needs:
            since = now_s - self._asked_s
            seen["server"] = min(1.0, self._busy / since) if since > 0 else 0.0
            self._busy, self._asked_s = 0.0, now_s
        return seen

    def applied(self, busy_s: Seconds) -> None:
        """An update took this long."""
        self._busy += busy_s
        if "agreement" in self._needs:
            assert self._owner is not None, "a policy without an owner has no Δ to agree"
            self._last = [v.clone() for v in self._owner.combined]


def _norm(vectors: list[Tensor]) -> float:
    return float(torch.stack([torch.linalg.vector_norm(v) for v in vectors]).norm())


def _cosine(a: list[Tensor], b: list[Tensor]) -> float:
    product = sum(float(torch.dot(x, y)) for x, y in zip(a, b, strict=True))
    norms = _norm(a) * _norm(b)
    return product / norms if norms else 0.0

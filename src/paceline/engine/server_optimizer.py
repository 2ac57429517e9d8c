"""A and its update rule at a parameter server, and the statistics of Δs that policies ask for."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.aggregation.base import NOTHING, Aggregation
from paceline.aggregation.decoupled import Decoupled
from paceline.aggregation.local_steps import LocalSteps, Outer
from paceline.checkpoint.base import TensorChunk
from paceline.checkpoint.reader import Checkpoint
from paceline.core.delta import Change, Distance
from paceline.core.types import Seconds, Version
from paceline.engine.run_state import ResumePoint
from paceline.program import Program
from paceline.replica.flat_optimizer import FlatOptimizer
from paceline.replica.flat_state import FlatLayout, FlatState
from paceline.replica.gradient_clipping import clip
from paceline.replica.noise_estimator import NoiseEstimator, Preconditioner
from paceline.replica.optimizer_kernels import StepKernel
from paceline.replica.optimizer_state import whole_chunks
from paceline.replica.own_parameters import fragments_of

# Names of the last update begin so.
_LAST = "delta/last/"

# Makes an optimizer, and a scheduler of it.
UpdateRule: TypeAlias = tuple[Callable[..., Optimizer], Callable[[Optimizer], Any] | None]

# Δs and their weights.
Weighted: TypeAlias = Sequence[tuple[FlatState, float]]


def update_rule(program: Program, policy: Aggregation[Any]) -> UpdateRule:
    """Return what makes the optimizer of A, and its scheduler; it steps on Σ weight·Δ, of changes on the negative."""
    if not isinstance(policy.delta, (Change, Distance)):
        return program.optimizer, program.scheduler
    outer = policy.outer if isinstance(policy, LocalSteps | Decoupled) else None
    rule = outer or Outer(lr=1.0, momentum=0.0, nesterov=False)
    return partial(torch.optim.SGD, **asdict(rule)), None


class ServerOptimizer:
    """A and the optimizer that updates it.

    An update writes the new A over the old one, or into the vectors of ``out``: then a reader of the old one is not
    disturbed.

    Args:
        program: gives optimizer, scheduler and clipping.
        policy: says what a Δ is: a gradient (an optimizer step on it), or a change (A moves by it, or an outer
            optimizer steps on its negative).
        state: A.
        noise: observes what is applied; None: the noise scale is not measured.
        subtracts: whether a distance arrives as x, from which A is subtracted here.
    """

    def __init__(
        self,
        program: Program,
        policy: Aggregation[Any],
        state: FlatState,
        noise: NoiseEstimator | None = None,
        *,
        subtracts: bool = True,
    ) -> None:
        self.state = state
        self._distance = isinstance(policy.delta, Distance) and subtracts
        self._moves = isinstance(policy.delta, (Change, Distance))
        combined = state.layout.new()
        self.combined = combined.parameters
        """Σ weight·Δ of the last update, clipped, one vector for each dtype."""
        self.clip_norm = None if self._moves else program.clip_norm
        self.flat_optimizer = FlatOptimizer(*update_rule(program, policy), state, combined)
        needs_sum = self._moves or self.clip_norm is not None or "agreement" in policy.needs
        self._direct = self.flat_optimizer.has_kernel and not needs_sum and not state.buffers
        self._noise = noise
        if noise is not None:
            noise.preconditioner = Preconditioner(self.flat_optimizer)
        self._fragments = fragments_of(policy.delta, state.layout, state.layout)
        """Slices of A's vectors that are updated in turn; empty: all of A at once."""
        needs_all = "agreement" in policy.needs or noise is not None or bool(self._fragments)
        self.divisible = self.flat_optimizer.has_kernel and not self._distance and not needs_all
        """True if an update can be split among workers: :meth:`divide`."""

    def apply(
        self,
        deltas: Iterable[tuple[FlatState, float]],
        rate: float = 1.0,
        *,
        alone: bool = False,
        out: FlatState | None = None,
        version: Version = 0,
    ) -> None:
        """Update A by Σ weight·Δ, summed in the order given; each Δ is read once, then released.

        Args:
            deltas: may compute each Δ when it is taken.
            rate: factor of the learning rate.
            alone: True if there is exactly one.
            out: becomes A; None: A's own vectors.
            version: of A before the update, which says what fragment of it Δs are of.
        """
        destination = out or self.state
        slices = self._fragments[version % len(self._fragments)] if self._fragments else None
        if alone and self._direct:
            delta, weight = next(iter(deltas))
            self.flat_optimizer.step(delta.parameters, rate, destination, weight)
        else:
            self._combine(deltas, destination, slices)
            if self._noise is not None:
                self._noise.combined(self.combined)
            if self.clip_norm is not None:
                clip(self.combined, self.clip_norm)
            if self._moves:
                torch._foreach_neg_(self.combined)
            self.flat_optimizer.step(self.combined, rate, destination, slices=slices)
        self.state = destination

    def chunks(self) -> list[TensorChunk]:
        """Return A, and the vectors of the optimizer's state."""
        return [*whole_chunks(self.state), *self.flat_optimizer.chunks()]

    def restore(self, resume: ResumePoint) -> None:
        """Go on with the A and the optimizer of a checkpoint; A is read into its present vectors."""
        checkpoint = resume.checkpoint
        checkpoint.read_into(whole_chunks(self.state))
        self.flat_optimizer.restore(resume.optimizer, checkpoint, options=resume.options)

    def divide(
        self, deltas: Weighted, rate: float, out: FlatState, execute: Callable[[StepKernel, Sequence[float]], None]
    ) -> None:
        """Update A like :meth:`apply`, but ``execute`` computes the new parameters and the new optimizer state.

        It is called with the kernel, and the weight of each Δ in the gradient.
        """
        buffers = _BufferMean(self.state)
        for delta, weight in deltas:
            buffers.add(delta, weight)
        buffers.write(out)
        sign = -1.0 if self._moves else 1.0
        execute(self.flat_optimizer.kernel(rate), [sign * weight for _, weight in deltas])
        self.flat_optimizer.end_step(out)
        self.state = out

    def _combine(
        self, deltas: Iterable[tuple[FlatState, float]], destination: FlatState, slices: Sequence[slice] | None
    ) -> None:
        buffers = _BufferMean(self.state)
        totals = self.combined if slices is None else [v[s] for v, s in zip(self.combined, slices, strict=True)]
        for j, (delta, weight) in enumerate(deltas):
            for i, total in enumerate(totals):
                vector = delta.parameters[i] if slices is None else delta.parameters[i][slices[i]]
                vector = vector - self.state.parameters[i] if self._distance else vector
                if j:  # in the order given, so that a run is reproducible
                    total.add_(vector, alpha=weight)
                else:
                    torch.mul(vector, weight, out=total)
            buffers.add(delta, weight)
        buffers.write(destination)


class _BufferMean:
    """Running buffers of A: the weighted mean of the replicas'; of integers (counters) the largest, A's included."""

    def __init__(self, state: FlatState) -> None:
        self._sums = [torch.zeros_like(b) if b.is_floating_point() else b.clone() for b in state.buffers]
        self._weight = 0.0

    def add(self, delta: FlatState, weight: float) -> None:
        """Add one replica's buffers."""
        for total, buffer in zip(self._sums, delta.buffers, strict=True):
            if total.is_floating_point():
                total.add_(buffer, alpha=weight)
            else:
                torch.maximum(total, buffer, out=total)
        self._weight += weight

    def write(self, destination: FlatState) -> None:
        """Write the result to the buffers of the new A."""
        for new, total in zip(destination.buffers, self._sums, strict=True):
            new.copy_(total / self._weight if new.is_floating_point() else total)


class DeltaStatistics:
    """Computes ``Arrival.observed`` for one run: only what the policy ``needs``.

    Args:
        policy: its ``needs`` say what is computed.
        optimizer: Δs are compared with its last update; None where replicas write A in place.
    """

    def __init__(self, policy: Aggregation[Any], optimizer: ServerOptimizer | None) -> None:
        self._needs, self._optimizer = policy.needs - {"loss"}, optimizer
        self.looks_inside = bool(self._needs - {"server"})
        """True if Δ itself must be there to be examined."""
        self._last: list[Tensor] | None = None
        self._busy: Seconds = 0.0
        self._since_s: Seconds = 0.0

    def observe(self, delta: FlatState | None, now_s: Seconds) -> Mapping[str, float]:
        """Return the statistics of a Δ that has just arrived."""
        if not self._needs:
            return NOTHING
        statistics: dict[str, float] = {}
        if "norm" in self._needs and delta is not None:
            statistics["norm"] = _norm(delta.parameters)
        if "agreement" in self._needs and delta is not None:
            agreement = 0.0
            if self._last is not None:  # the cosine of Δ and the last update
                product = sum(float(torch.dot(x, y)) for x, y in zip(delta.parameters, self._last, strict=True))
                norms = _norm(delta.parameters) * _norm(self._last)
                agreement = product / norms if norms else 0.0
            statistics["agreement"] = agreement
        if "server" in self._needs:
            elapsed = now_s - self._since_s
            statistics["server"] = min(1.0, self._busy / elapsed) if elapsed > 0 else 0.0
            self._busy, self._since_s = 0.0, now_s
        return statistics

    def chunks(self) -> list[TensorChunk]:
        """Return the last update, if a Δ is compared with it."""
        return [] if self._last is None else whole_chunks(self._as_state(self._last), _LAST)

    def state_json(self) -> dict[str, Any]:
        """Return what is no tensor."""
        return {"busy_s": self._busy, "since_s": self._since_s, "last": self._last is not None}

    def restore(self, saved: Mapping[str, Any], checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint; ``saved`` is what :meth:`state_json` returned."""
        self._busy, self._since_s = saved["busy_s"], saved["since_s"]
        if saved["last"] and "agreement" in self._needs:
            assert self._optimizer is not None, "it has had an update"
            last = [torch.zeros_like(v) for v in self._optimizer.combined]
            checkpoint.read_into(whole_chunks(self._as_state(last), _LAST))
            self._last = last

    def _as_state(self, vectors: list[Tensor]) -> FlatState:
        assert self._optimizer is not None, "it has had an update"
        return FlatState(FlatLayout(self._optimizer.state.layout.parameters, ()), vectors, [])

    def applied(self, busy_s: Seconds) -> None:
        """Note that an update took this long."""
        self._busy += busy_s
        if "agreement" in self._needs:
            assert self._optimizer is not None, "without an optimizer there is no update to agree with"
            self._last = [v.clone() for v in self._optimizer.combined]


def _norm(vectors: list[Tensor]) -> float:
    return float(torch.stack([torch.linalg.vector_norm(v) for v in vectors]).norm())

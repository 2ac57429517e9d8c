"""A and its update rule at a parameter server, and the statistics of Δs that policies ask for."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.aggregation.base import NOTHING, Aggregation, Apply
from paceline.aggregation.local_steps import Outer
from paceline.checkpoint.base import TensorChunk
from paceline.checkpoint.reader import Checkpoint, TensorSource
from paceline.compression import parse
from paceline.core.delta import Change, Distance
from paceline.core.types import Seconds, Version
from paceline.engine.run_context import RunContext
from paceline.engine.run_state import ResumePoint
from paceline.program import Program
from paceline.reduction import Reducer, Reduction
from paceline.reduction.base import combine, statistics_of
from paceline.replica.flat_optimizer import FlatOptimizer
from paceline.replica.flat_slices import FlatSlice, slices_of
from paceline.replica.flat_state import FlatLayout, FlatState, is_averaged
from paceline.replica.gradient_clipping import clip, clip_by_square, square_norm
from paceline.replica.noise_estimator import NoiseEstimator, Preconditioner
from paceline.replica.optimizer_kernels import StepKernel
from paceline.replica.optimizer_state import describe_whole, whole_chunks
from paceline.replica.own_parameters import fragments_of
from paceline.replica.step_options import BUFFER

# Names of the last update begin so.
_LAST = "delta/last/"

# Makes an optimizer, and a scheduler of it.
UpdateRule: TypeAlias = tuple[Callable[..., Optimizer], Callable[[Optimizer], Any] | None]

# Sums of numbers over all servers of A, each of which has a slice of it.
Summed: TypeAlias = Callable[[list[float]], list[float]]

# Δs and their weights.
Weighted: TypeAlias = Sequence[tuple[FlatState, float]]


def update_rule(program: Program, policy: Aggregation[Any]) -> UpdateRule:
    """Return what makes the optimizer of A, and its scheduler; it steps on Σ weight·Δ, of changes on the negative."""
    if not isinstance(policy.delta, (Change, Distance)):
        return program.optimizer, program.scheduler
    outer: Outer | None = getattr(policy, "outer", None)
    rule = outer or Outer(lr=1.0, momentum=0.0, nesterov=False)
    return partial(torch.optim.SGD, **asdict(rule)), None


# Parameters of a slice of A from which on a server on another host is worth its messages (benchmarks/hosts).
LEAST_SLICE_BYTES = 4 << 20


def usual_servers(hosts: int, parameter_bytes: int) -> int:
    """Return how many servers there are where nobody says: as many as hosts, as far as each has enough of A.

    >>> usual_servers(4, 100 << 20), usual_servers(4, 9 << 20), usual_servers(4, 1000)
    (4, 2, 1)
    """
    return min(hosts, max(1, parameter_bytes // LEAST_SLICE_BYTES))


def server_slices(context: RunContext, layout: FlatLayout, servers: int) -> list[FlatSlice]:
    """Return the slices of A, of this layout, that so many servers have."""
    make, _ = update_rule(context.job.program, context.policy)
    whole = parse(context.job.strategy.compression).whole_parameters
    return slices_of(layout, servers, make, whole_parameters=whole)


class ServerOptimizer:
    """A and the optimizer that updates it.

    An update writes the new A over the old one, or into the vectors of ``out``: then a reader of the old one is not
    disturbed.

    Args:
        program: gives optimizer, scheduler and clipping.
        policy: says what a Δ is: a gradient (an optimizer step on it), or a change (A moves by it, or an outer
            optimizer steps on its negative).
        state: A, or the slice of it that this server has.
        noise: observes what is applied; None: the noise scale is not measured.
        subtracts: whether a distance arrives as x, from which A is subtracted here.
        combined: in which Σ weight·Δ is computed; may be the only Δ's own vectors. None: new ones.
        part: that slice; None: all of A.
        summed: returns the sums, over all servers, of numbers that each has of its slice.
        own_steps: returns whether loops may compute gradients themselves, so that what their optimizers say is to be
            read; on a device the host waits for that.
        one_replica: whether all Δs are of one replica, each computed from the newest A.
    """

    def __init__(
        self,
        program: Program,
        policy: Aggregation[Any],
        state: FlatState,
        noise: NoiseEstimator | None = None,
        *,
        subtracts: bool = True,
        combined: FlatState | None = None,
        part: FlatSlice | None = None,
        summed: Summed = list,
        own_steps: Callable[[], bool] = lambda: True,
        one_replica: bool = False,
    ) -> None:
        self.state, self.part, self.summed, self._own_steps = state, part, summed, own_steps
        self._one_replica = one_replica
        self._distance = isinstance(policy.delta, Distance) and subtracts
        self._moves = isinstance(policy.delta, (Change, Distance))
        combined = combined or state.empty_like()
        self.combined = combined.parameters
        """Σ weight·Δ of the last update, clipped, one vector for each dtype."""
        self.clip_norm = None if self._moves else program.clip_norm
        make, schedule = update_rule(program, policy)
        make = make if part is None else part.optimizer(make)
        self._describe = describe_whole if part is None else part.describe
        self.flat_optimizer = FlatOptimizer(make, schedule, state, combined)
        self._on_losses = self.flat_optimizer.on_losses
        if self._on_losses is not None:
            self._on_losses.summed = summed
        self._reducer = policy.reducer
        needs_sum = (
            self._reducer is not None or self._moves or self.clip_norm is not None or "agreement" in policy.needs
        )
        self._direct = self.flat_optimizer.has_kernel and not needs_sum
        names = [entry.name for block in state.layout.buffers for entry in block.entries]
        self._options = names.index(BUFFER) if BUFFER in names and not self._moves else None
        """Number of the running buffer that has the options of own loops' optimizers; None: there is none."""
        self._noise = noise
        if noise is not None:
            noise.preconditioner = Preconditioner(self.flat_optimizer)
        self._fragments = fragments_of(policy.delta, state.layout if part is None else part.whole, state.layout)
        """Slices of A's vectors that are updated in turn; empty: all of A at once."""
        needs_all = (
            self._reducer is not None or "agreement" in policy.needs or noise is not None or bool(self._fragments)
        )
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
        read: Sequence[FlatState] = (),
        loss: float | None = None,
    ) -> None:
        """Update A by Σ weight·Δ, summed in the order given; each Δ is read once, then released.

        A policy's reducer, if it has one, combines all Δs at once instead.

        Args:
            deltas: may compute each Δ when it is taken.
            rate: factor of the learning rate.
            alone: True if there is exactly one.
            out: becomes A; None: A's own vectors.
            version: of A before the update, which says what fragment of it Δs are of.
            read: A as the replica of each Δ has read it, where the reducer needs it.
            loss: :meth:`mean_loss` of the Δs, where the optimizer needs it.
        """
        destination = out or self.state
        slices = self._fragments[version % len(self._fragments)] if self._fragments else None
        if alone and self._direct:
            delta, weight = next(iter(deltas))
            consumes = delta.parameters is self.combined
            self._write_buffers([(delta, weight)], destination)
            self.flat_optimizer.step(delta.parameters, rate, destination, weight, consumes=consumes)
        else:
            if self._reducer is not None:
                self._reduce(self._reducer, list(deltas), destination, read)
            else:
                self._combine(deltas, destination, slices)
            if self._noise is not None:
                self._noise.combined(self.combined)
            if self.clip_norm is not None and self.part is None:
                clip(self.combined, self.clip_norm)
            elif self.clip_norm is not None:
                [square] = self.summed([square_norm(self.combined)])
                clip_by_square(self.combined, square, self.clip_norm)
            if self._moves:
                torch._foreach_neg_(self.combined)
            self.flat_optimizer.step(self.combined, rate, destination, slices=slices, loss=loss)
        self.state = destination

    def mean_loss(self, action: Apply) -> float | None:
        """Return Σ weight·loss of the Δs of an update; None where the optimizer does not need it."""
        if self._on_losses is None:
            return None
        return sum(weight * a.loss for a, weight in action.deltas if a.loss is not None)

    def finish(self, new: Callable[[], FlatState]) -> bool:
        """End the run: an optimizer on losses leaves the trial that A is; return whether it has.

        Args:
            new: returns the state that becomes A then.
        """
        if self._on_losses is None:
            return False
        self.state = new()
        self.flat_optimizer.finish(self.state)
        return True

    def chunks_of(self, state: FlatState, prefix: str = "") -> list[TensorChunk]:
        """Return the tensors of a state of this layout as a checkpoint names them."""
        return whole_chunks(state, prefix) if self.part is None else self.part.chunks(state, prefix)

    def chunks(self) -> list[TensorChunk]:
        """Return A, and the vectors of the optimizer's state."""
        return [*self.chunks_of(self.state), *self.flat_optimizer.chunks(self._describe)]

    def state_json(self) -> dict[str, Any]:
        """Return what of the optimizer's state is no vector."""
        return self.flat_optimizer.state_json(self._describe)

    def restore(self, resume: ResumePoint) -> None:
        """Go on with the A and the optimizer of a checkpoint."""
        self.go_on_with(resume.optimizer, resume.checkpoint, options=resume.options)

    def go_on_with(self, optimizer: Mapping[str, Any], source: TensorSource, *, options: bool = True) -> None:
        """Go on with another A and its optimizer; A is read into the present vectors.

        Args:
            optimizer: what :meth:`state_json` has returned.
            source: has the tensors.
            options: whether the optimizer's options become those of then.
        """
        source.read_into(self.chunks_of(self.state))
        self.flat_optimizer.restore(optimizer, source, self._describe, options=options)

    def divide(
        self, deltas: Weighted, rate: float, out: FlatState, execute: Callable[[StepKernel, Sequence[float]], None]
    ) -> None:
        """Update A like :meth:`apply`, but ``execute`` computes the new parameters and the new optimizer state.

        It is called with the kernel, and the weight of each Δ in the gradient.
        """
        self._write_buffers(deltas, out)
        sign = -1.0 if self._moves else 1.0
        execute(self.flat_optimizer.kernel(rate), [sign * weight for _, weight in deltas])
        self.flat_optimizer.end_step(out)
        self.state = out

    def _reduce(self, reducer: Reducer, deltas: Weighted, destination: FlatState, read: Sequence[FlatState]) -> None:
        weights = [weight for _, weight in deltas]
        vectors = [[delta.parameters[i] for delta, _ in deltas] for i in range(len(self.combined))]
        statistics = self.summed(
            [sum(each) for each in zip(*(statistics_of(reducer, each) for each in vectors), strict=True)]
        )
        for i, (each, total) in enumerate(zip(vectors, self.combined, strict=True)):
            seen = [state.parameters[i] for state in read]
            combine(reducer, Reduction(each, weights, self.state.parameters[i], seen, statistics), total)
        self._write_buffers(deltas, destination)

    def _write_buffers(self, deltas: Weighted, destination: FlatState) -> None:
        if not destination.buffers:
            return
        buffers = _BufferMean(self.state, one_replica=self._one_replica)
        for delta, weight in deltas:
            buffers.add(delta, weight)
        self._finish_buffers(buffers, destination)

    def _finish_buffers(self, buffers: "_BufferMean", destination: FlatState) -> None:
        """Write the running buffers of the new A; the optimizer takes over what own loops' optimizers say."""
        if self._options is None or not self._own_steps():
            buffers.write(destination)
            return
        before = self.state.views.buffers[self._options].clone()
        buffers.write(destination)
        mean = destination.views.buffers[self._options]
        self.flat_optimizer.take_options(mean)
        mean.copy_(self.flat_optimizer.options_after(before, mean))

    def _combine(
        self, deltas: Iterable[tuple[FlatState, float]], destination: FlatState, slices: Sequence[slice] | None
    ) -> None:
        buffers = _BufferMean(self.state, one_replica=self._one_replica)
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
        self._finish_buffers(buffers, destination)


class _BufferMean:
    """Running buffers of A: the weighted mean of the replicas'; of integers (counters) the largest, A's included.

    Args:
        state: A before.
        one_replica: whether all Δs are of one replica that reads the newest A: its integers are those of the new A.
    """

    def __init__(self, state: FlatState, *, one_replica: bool) -> None:
        self._before, self._one_replica = state.buffers, one_replica
        self._sums = [torch.zeros_like(b) if is_averaged(b.dtype) else b.clone() for b in state.buffers]
        self._weight = 0.0

    def add(self, delta: FlatState, weight: float) -> None:
        """Add one replica's buffers."""
        for total, buffer in zip(self._sums, delta.buffers, strict=True):
            if is_averaged(total.dtype):
                total.add_(buffer, alpha=weight)
            elif self._one_replica:
                total.copy_(buffer)
            else:
                torch.maximum(total, buffer, out=total)
        self._weight += weight

    def write(self, destination: FlatState) -> None:
        """Write the result to the buffers of the new A, where it is one: not if weights add up to 0."""
        for new, before, total in zip(destination.buffers, self._before, self._sums, strict=True):
            if is_averaged(new.dtype):
                new.copy_(total / self._weight if self._weight else before)
            else:
                new.copy_(total)


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
        if delta is not None and self.looks_inside:
            square, product, last_square = self._sums(delta)
            if "norm" in self._needs:
                statistics["norm"] = math.sqrt(square)
            if "agreement" in self._needs:  # the cosine of Δ and the last update
                norms = math.sqrt(square) * math.sqrt(last_square)
                statistics["agreement"] = product / norms if norms else 0.0
        if "server" in self._needs:
            elapsed = now_s - self._since_s
            statistics["server"] = min(1.0, self._busy / elapsed) if elapsed > 0 else 0.0
            self._busy, self._since_s = 0.0, now_s
        return statistics

    def _sums(self, delta: FlatState) -> list[float]:
        """Return the squared norm of a Δ, its product with the last update, and that update's squared norm."""
        last, product = self._last or [], 0.0
        for vector, other in zip(delta.parameters, last, strict=False):
            product += float(torch.dot(vector, other))
        sums = [square_norm(delta.parameters), product, square_norm(last)]
        return sums if self._optimizer is None else self._optimizer.summed(sums)

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

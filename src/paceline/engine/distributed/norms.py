"""Norms of Δs and of their sum for the gradient noise scale, exchanged in the status rows of a step.

::

    rank 0   |Δ_0|², before it is weighted --+--> statuses of all --> an observation of the noise, on every rank alike
    rank 1   |Δ_1|² ------------------------+        |Σ w·Δ|² is measured on the sum that all ranks have

Where a replica has several ranks, each measures its own elements, and squares are added; an element that several ranks
have counts on one. A single replica keeps every other Δ until the next one is there, as the estimator of a server does
(:class:`~paceline.replica.noise_estimator.NoiseEstimator`).
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from paceline.core.noise_scale import NoiseAccumulator, Part, differenced, observation
from paceline.engine.base import Job
from paceline.engine.distributed.rank_status import DeltaNorm, RankStatus
from paceline.engine.run_context import RunContext
from paceline.replica.base import Measured
from paceline.replica.flat_state import FlatLayout, FlatState
from paceline.replica.noise_estimator import WARM_STEPS, Preconditioner, Scales, square
from paceline.replica.optimizer_factory import build_optimizer, shape_only_parameters


class DeltaNorms:
    """Measures the norms of one rank's Δs.

    Args:
        job: of the run.
        delta: buffers of this rank's Δ, and of the sum of all Δs after an exchange.
        counted: names of the parameters that count on this rank.
        full_layout: of A.
    """

    def __init__(self, job: Job, delta: FlatState, counted: Collection[str], full_layout: FlatLayout) -> None:
        self._vectors, self.preconditioner = delta.parameters, Preconditioner(None)
        blocks = delta.layout.parameters
        self._entries = [(i, slice(e.start, e.stop)) for i, block in enumerate(blocks) for e in block.entries]
        if set(delta.layout.parameter_names) <= set(counted):
            self._counted = [(i, slice(0, block.elements)) for i, block in enumerate(blocks)]
        else:
            names = [entry.name for block in blocks for entry in block.entries]
            self._counted = [at for at, name in zip(self._entries, names, strict=True) if name in counted]
        self._single_replica = job.strategy.replicas == 1
        self.adaptive = isinstance(
            build_optimizer(job.program.optimizer, shape_only_parameters(full_layout).values()), torch.optim.Adam
        )
        """Whether norms are those of preconditioned gradients; the same on every rank."""
        self._scales: Scales | None = None
        self._scales_version = -1
        self._gradients = 0.0
        self._previous: tuple[list[Tensor], int] | None = None
        self.updates = 0
        """Updates so far; counted by :class:`NoiseObserver`."""

    @property
    def ready(self) -> bool:
        """Whether norms are measured already: an adaptive optimizer has second moments only after some steps."""
        return not self.adaptive or self.updates >= WARM_STEPS

    def add(self, index: int, gradient: Tensor) -> None:
        """Add one gradient of a Δ that is handed over parameter by parameter; all parameters count."""
        (i, where), scales = self._entries[index], self._current_scales()
        self._gradients += square([gradient.reshape(-1)], None if scales is None else [scales[i][where]])

    def delta(self, measured: Measured, *, by_parameter: bool) -> DeltaNorm:
        """Return the norms of this rank's Δ; call it before the Δ is weighted.

        Args:
            measured: of that Δ.
            by_parameter: whether it was handed over by :meth:`add`.
        """
        added, self._gradients = self._gradients, 0.0
        if not (self.ready and measured.samples and measured.finite):
            return DeltaNorm()
        own = added if by_parameter else self._square(self._vectors)
        if measured.micro is not None and not self.adaptive:
            return DeltaNorm(measured.micro.square, measured.micro.pieces, combined=own)
        if not self._single_replica:
            return DeltaNorm(own, 1)

        # A single replica compares pairs of Δs: every other one is kept until the next is there.
        if self._previous is None:
            self._previous = [v.clone() for v in self._vectors], measured.samples
            return DeltaNorm(own, 1)
        (vectors, samples), self._previous = self._previous, None
        share = samples / (samples + measured.samples)
        mean = [torch.lerp(new, old, share) for new, old in zip(self._vectors, vectors, strict=True)]
        return DeltaNorm(own, 1, self._square(mean), self._square(vectors), samples)

    def combined(self) -> float:
        """Return the square of the norm of the sum of all Δs, after an exchange."""
        return self._square(self._vectors)

    def _square(self, vectors: Sequence[Tensor]) -> float:
        scales = self._current_scales()
        return square(
            (vectors[i][where] for i, where in self._counted),
            None if scales is None else [scales[i][where] for i, where in self._counted],
        )

    def _current_scales(self) -> Scales | None:
        """Return the preconditioner of the next update, computed once for it, also on a rank whose replica has left."""
        if self.ready and self._scales_version != self.updates:
            self._scales, self._scales_version = self.preconditioner.scales(), self.updates
        return self._scales


class NoiseObserver:
    """Accumulates the gradient noise scale from the statuses of each step, on every rank alike.

    Args:
        context: of the run.
        norms: of this rank.
        from_statuses: whether the norm of the sum is in the statuses, since each rank has a part of the sum;
            else it is measured on the sum that this rank has.
    """

    def __init__(self, context: RunContext, norms: DeltaNorms, *, from_statuses: bool) -> None:
        self.accumulator, self.norms = NoiseAccumulator(context.reference_batch), norms
        self._from_statuses = from_statuses

    def applied(self, statuses: Sequence[RankStatus], weighted: Sequence[tuple[int, float]], factor: float) -> None:
        """Observe an update that is about to be made.

        Args:
            statuses: of all replicas.
            weighted: the replicas whose Δs it applies, and their weights.
            factor: multiplies the sum.
        """
        rows = [(statuses[replica], weight) for replica, weight in weighted]
        parts = [Part(row.samples, weight, *(row.norm or DeltaNorm())[:2]) for row, weight in rows]
        observed = None
        if self.norms.ready and len(rows) > 1:
            if self._from_statuses:
                combined = next(row.norm for row in statuses if row.norm is not None).combined
            else:
                combined = self.norms.combined()
            observed = observation(parts, combined * factor**2)
        elif self.norms.ready:  # one replica: by its micro-steps, or by the previous Δ where that was kept
            norm = rows[0][0].norm or DeltaNorm()
            if norm.parts > 1:
                observed = observation(parts, norm.combined * parts[0].weight ** 2)
            elif norm.previous_samples:
                previous = Part(norm.previous_samples, 1.0, norm.previous)
                observed = differenced(previous, parts[0], norm.combined)
        self.accumulator.add(observed)
        self.norms.updates += 1

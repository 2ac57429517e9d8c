"""Norms of Δs and of their sum for the gradient noise scale, exchanged in the status rows of a step.

::

    rank 0   |Δ_0|², before it is weighted --+--> statuses of all --> an observation of the noise, on every rank alike
    rank 1   |Δ_1|² ------------------------+        |Σ w·Δ|² is measured on the sum that all ranks have

Where a replica has several ranks, each measures its own elements, and squares are added; an element that several ranks
have counts on one. A single replica keeps every other Δ until the next one is there, as the estimator of a server does
(:class:`~paceline.replica.noise_estimator.NoiseEstimator`).
"""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from paceline.core.noise_scale import NoiseAccumulator, Observation, Part, differenced, observation
from paceline.core.types import ReplicaId
from paceline.engine.base import Job
from paceline.engine.distributed.rank_status import DeltaNorm, RankStatus
from paceline.engine.run_context import RunContext
from paceline.replica.base import Measured
from paceline.replica.flat_state import FlatLayout, FlatState
from paceline.replica.noise_estimator import WARM_STEPS, LateNumbers, Number, Preconditioner, Scales, square
from paceline.replica.optimizer_factory import build_optimizer, shape_only_parameters

NO_NORM = LateNumbers((), lambda _: DeltaNorm(), None)
"""Of a Δ that was not measured."""


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
        self._gradients: Number = 0.0
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

    def delta(self, measured: Measured, *, by_parameter: bool) -> LateNumbers:
        """Return what reads the norms of this rank's Δ, a :class:`DeltaNorm`; call it before the Δ is weighted.

        Args:
            measured: of that Δ.
            by_parameter: whether it was handed over by :meth:`add`.
        """
        added, self._gradients = self._gradients, 0.0
        if not (self.ready and measured.samples and measured.finite):
            return NO_NORM
        own = added if by_parameter else self._square(self._vectors)
        if measured.micro is not None and not self.adaptive:
            pieces = measured.micro.pieces
            return LateNumbers.of((measured.micro.square, own), lambda read: DeltaNorm(read[0], pieces, read[1]))
        if not self._single_replica:
            return LateNumbers.of((own,), lambda read: DeltaNorm(read[0], 1))

        # A single replica compares pairs of Δs: every other one is kept until the next is there.
        if self._previous is None:
            self._previous = [v.clone() for v in self._vectors], measured.samples
            return LateNumbers.of((own,), lambda read: DeltaNorm(read[0], 1))
        (vectors, samples), self._previous = self._previous, None
        share = samples / (samples + measured.samples)
        mean = [torch.lerp(new, old, share) for new, old in zip(self._vectors, vectors, strict=True)]
        numbers = own, self._square(mean), self._square(vectors)
        return LateNumbers.of(numbers, lambda read: DeltaNorm(read[0], 1, read[1], read[2], samples))

    def combined(self) -> Number:
        """Return the square of the norm of the sum of all Δs, after an exchange."""
        return self._square(self._vectors)

    def _square(self, vectors: Sequence[Tensor]) -> Number:
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
        late: whether statuses have the norms of the Δs before theirs.
    """

    def __init__(self, context: RunContext, norms: DeltaNorms, *, from_statuses: bool, late: bool = False) -> None:
        self.accumulator, self.norms = NoiseAccumulator(context.reference_batch), norms
        self._from_statuses, self._late = from_statuses, late
        self._unread: Callable[[Sequence[DeltaNorm]], Observation | None] | None = None
        """The newest update's observation, which follows from all replicas' norms."""

    def read(self, norms: Sequence[DeltaNorm]) -> None:
        """Observe the newest update, unless that is done, now that its Δs' norms are known.

        Args:
            norms: of all replicas.
        """
        unread, self._unread = self._unread, None
        if unread is not None:
            self.accumulator.add(unread(norms))

    def applied(self, statuses: Sequence[RankStatus], weighted: Sequence[tuple[int, float]], factor: float) -> None:
        """Observe an update that is about to be made.

        Args:
            statuses: of all replicas.
            weighted: the replicas whose Δs it applies, and their weights.
            factor: multiplies the sum.
        """
        rows = [(replica, statuses[replica].samples, weight) for replica, weight in weighted]
        if self.norms.ready and len(rows) > 1 and not self._from_statuses:
            measured = LateNumbers.of((self.norms.combined(),), lambda read: read[0])
            self._unread = lambda norms: observation(_parts(rows, norms), measured.read() * factor**2)
        elif self.norms.ready and len(rows) > 1:  # a sum's norm is that of all replicas
            self._unread = lambda norms: observation(_parts(rows, norms), norms[0].combined * factor**2)
        elif self.norms.ready:
            self._unread = lambda norms: _of_one(_parts(rows, norms)[0], norms[rows[0][0]])
        if not self._late:
            self.read([row.norm or DeltaNorm() for row in statuses])
        self.norms.updates += 1


def _parts(rows: Sequence[tuple[ReplicaId, int, float]], norms: Sequence[DeltaNorm]) -> list[Part]:
    """Return the parts of an update, of these replicas, samples and weights."""
    return [Part(samples, weight, *norms[replica][:2]) for replica, samples, weight in rows]


def _of_one(part: Part, norm: DeltaNorm) -> Observation | None:
    """Return what an update of one replica shows: by its micro-steps, or by the previous Δ where that was kept."""
    if norm.parts > 1:
        return observation([part], norm.combined * part.weight**2)
    if norm.previous_samples:
        return differenced(Part(norm.previous_samples, 1.0, norm.previous), part, norm.combined)
    return None

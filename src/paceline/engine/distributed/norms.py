"""DeltaNorms of what ranks bring and of what becomes of it, told in the rows that they exchange anyway.

::

    rank 0   |Δ_0|², before it is weighed --+--> rows of all --> what the update tells of noise, on every rank alike
    rank 1   |Δ_1|² -----------------------+        |Σ w·Δ|² is that of the sum that all have

Where a replica has several ranks, each tells of its own part, and squares are added; what several of them have counts
with one. A replica alone keeps every other Δ until the next has come, as the meter of a server does
(:class:`~paceline.engine.noise_scale.NoiseEstimator`).
"""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from paceline.core.noise_scale import Observation, Part, differenced, observation
from paceline.engine.base import Job
from paceline.engine.distributed.reduce_buffer import DeltaNorm, RankStatus
from paceline.engine.noise_scale import NoiseAccumulator
from paceline.replica.base import Measured
from paceline.replica.flat_optimizer import FlatOptimizer, stand_ins
from paceline.replica.flat_state import FlatLayout, FlatState
from paceline.replica.noise_norms import WARM_STEPS, Preconditioner, Scales, square


class DeltaNorms:
    """One rank's.

    Args:
        job: of the run.
        brought: where this rank's Δ is written, and where the sum of all lies afterwards.
        counted: the names of the parameters that count here.
        whole: the layout of A.
    """

    def __init__(self, job: Job, brought: FlatState, counted: Collection[str], whole: FlatLayout) -> None:
        self._vectors, self._measure = brought.parameters, Preconditioner(None)
        self._slices = _slices(brought, counted)
        self._entries = [
            (i, slice(e.start, e.stop)) for i, b in enumerate(brought.layout.parameters) for e in b.entries
        ]
        self._alone = job.strategy.replicas == 1
        self.adaptive = isinstance(job.program.optimizer(list(stand_ins(whole).values())), torch.optim.Adam)
        """Whether norms are those of preconditioned gradients, on whichever rank."""
        self._scales: Scales | None = None
        self._scaled_at = -1
        self._gradients = 0.0
        self._before: tuple[list[Tensor], int] | None = None
        self.updates = 0
        """That have been made: for who makes them to count."""

    @property
    def ready(self) -> bool:
        """Whether there is something to measure by."""
        return not self.adaptive or self.updates >= WARM_STEPS

    def measure_by(self, stepper: FlatOptimizer | None) -> None:
        """What steps on this rank's part of A; None: it has none."""
        self._measure = Preconditioner(stepper)

    def add(self, index: int, gradient: Tensor) -> None:
        """One gradient of a Δ that is handed over bit by bit is there; all parameters count."""
        (i, where), scales = self._entries[index], self._scales_now()
        self._gradients += square([gradient.reshape(-1)], None if scales is None else [scales[i][where]])

    def brought(self, measured: Measured, *, sent: bool) -> DeltaNorm:
        """Of this rank's Δ, before it is weighed.

        Args:
            measured: of it.
            sent: whether it was handed over bit by bit.
        """
        given, self._gradients = self._gradients, 0.0
        if not (self.ready and measured.samples and measured.finite):
            return DeltaNorm()
        whole = given if sent else self._square(self._vectors)
        if measured.micro is not None and not self.adaptive:
            return DeltaNorm(measured.micro.square, measured.micro.pieces, together=whole)
        return self._pair(whole, measured.samples) if self._alone else DeltaNorm(whole, 1)

    def together(self) -> float:
        """Of what lies where Δ was: the sum of all."""
        return self._square(self._vectors)

    def _pair(self, whole: float, samples: int) -> DeltaNorm:
        """Every other Δ is kept until the next has come."""
        if self._before is None:
            self._before = [v.clone() for v in self._vectors], samples
            return DeltaNorm(whole, 1)
        (vectors, first), self._before = self._before, None
        share = first / (first + samples)
        mean = [torch.lerp(new, old, share) for new, old in zip(self._vectors, vectors, strict=True)]
        return DeltaNorm(whole, 1, self._square(mean), self._square(vectors), first)

    def _square(self, vectors: Sequence[Tensor]) -> float:
        scales = self._scales_now()
        return square(
            (vectors[i][where] for i, where in self._slices),
            None if scales is None else [scales[i][where] for i, where in self._slices],
        )

    def _scales_now(self) -> Scales | None:
        """Those of the update that comes; a rank whose replica has left goes on with the others."""
        if self.ready and self._scaled_at != self.updates:
            self._scales, self._scaled_at = self._measure.scales(), self.updates
        return self._scales


class NoiseObserver:
    """What a run's rows tell of noise, on every rank alike.

    Args:
        ledger: is told.
        norms: of this rank.
        summed: |Σ|² of what lies where Δ was, of the whole replica.
    """

    def __init__(
        self, ledger: NoiseAccumulator, norms: DeltaNorms, summed: Callable[[Sequence[RankStatus]], float]
    ) -> None:
        self.ledger, self.norms, self._summed = ledger, norms, summed

    def applied(self, rows: Sequence[RankStatus], weighed: Sequence[tuple[int, float]], factor: float) -> None:
        """An update is about to be made.

        Args:
            rows: of all replicas.
            weighed: which of them it is made of, and their weights in it.
            factor: what the sum is multiplied by.
        """
        found = [(rows[replica], weight) for replica, weight in weighed]
        parts = [Part(row.samples, weight, *(row.norm or DeltaNorm())[:2]) for row, weight in found]
        if not self.norms.ready:
            seen = None
        elif len(found) > 1:
            seen = observation(parts, self._summed(rows) * factor**2)
        else:
            seen = _of_one(found[0][0], parts[0])
        self.ledger.take(seen)
        self.norms.updates += 1


def _of_one(row: RankStatus, part: Part) -> Observation | None:
    """By its micro-steps; or by the Δ before it, where that was kept."""
    norm = row.norm or DeltaNorm()
    if norm.pieces > 1:
        return observation([part], norm.together * part.weight**2)
    if not norm.samples_before:
        return None
    return differenced(Part(norm.samples_before, 1.0, norm.before), part, norm.together)


def _slices(state: FlatState, counted: Collection[str]) -> list[tuple[int, slice]]:
    """Where parameters of these names lie, as (vector, elements); whole vectors where all count."""
    blocks = state.layout.parameters
    if set(state.layout.parameter_names) <= set(counted):
        return [(i, slice(0, block.elements)) for i, block in enumerate(blocks)]
    return [(i, slice(e.start, e.stop)) for i, b in enumerate(blocks) for e in b.entries if e.name in counted]

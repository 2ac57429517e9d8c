"""Losses, and norms of Δs, that ranks tell each other an exchange late, so that none waits for its device in a step.

::

    rank r   give the device Δ_k | exchange k: Δ_k on the device, the loss of Δ_{k-1} on the host | give it Δ_{k+1} ...

All ranks note the same Δs and read the same losses, so a Δ that is not finite ends the run on all of them, at one
place. Where the newest losses are asked for at once, at an evaluation say, all ranks gather them.
"""

from collections.abc import Sequence
from typing import final

import torch

from paceline.core.types import Clock, ReplicaId
from paceline.engine.distributed.exchange import GradientSync, ModelParallelSync
from paceline.engine.distributed.norms import NO_NORM, NoiseObserver
from paceline.engine.distributed.rank_status import DeltaNorm, RankStatus, StatusKind, by_replica
from paceline.engine.loop import nonfinite_error
from paceline.engine.run_history import RunHistory
from paceline.engine.spmd.rank_context import RankContext
from paceline.replica.late_figures import LateFigures
from paceline.replica.noise_estimator import LateNumbers


@final
class LateLosses:
    """Losses of the Δs of the newest exchange, and whether they are finite, until all ranks have read them.

    Args:
        context: of this rank.
        history: receives the losses.
        replicas: P; the ranks of one are neighbours.
        sync: the exchange of the statuses, whose table rounds losses; it may have measured norms of sums.
        noise: receives the norms; None: the gradient noise scale is not measured.
    """

    def __init__(
        self,
        context: RankContext,
        history: RunHistory,
        replicas: int,
        sync: GradientSync | ModelParallelSync,
        noise: NoiseObserver | None,
    ) -> None:
        self._context, self._history, self._sync, self._noise = context, history, sync, noise
        self._replicas = replicas
        self._own: LateFigures | None = None
        """Of this rank's newest Δ."""
        self._norm: LateNumbers | None = None if noise is None else NO_NORM
        """The norms of that Δ."""
        self._unread: list[tuple[ReplicaId, Clock, int]] = []
        """Replica, number and samples of the Δs that have arrived and were not read, in the order of their arrival."""

    def next(self, own: LateFigures | None, norm: LateNumbers | None) -> tuple[float, bool, DeltaNorm | None]:
        """Return what is known of this rank's Δ before: loss, whether it was finite, norms; then keep these."""
        before, self._own = self._own, own
        figures = *self._read(before), self._read_norm()
        self._norm = norm
        return figures

    def arrived(self, replica: ReplicaId, clock: Clock, samples: int) -> None:
        """Note a Δ whose loss is read later."""
        if samples:
            self._unread.append((replica, clock, samples))

    def take(self, statuses: Sequence[RankStatus]) -> None:
        """Read the losses of all Δs that were noted, and their norms, from those of each replica's newest.

        Raises:
            NonFiniteError: a Δ was not finite.
        """
        unread, self._unread = self._unread, []
        for replica, clock, samples in unread:
            status = statuses[replica]
            if not status.finite:
                raise nonfinite_error(status.loss, replica, clock)
            self._history.add_loss(status.loss, samples)
        if self._noise is not None:
            self._noise.read([status.norm or DeltaNorm() for status in statuses])

    def settle(self) -> None:
        """Read them now, unless they are read; all ranks call it together."""
        if not self._unread:
            return
        loss, finite = self._read(self._own)
        if self._context.communicator is not None:
            loss = float(torch.tensor(loss, dtype=self._sync.dtype))
        norm = self._read_norm()
        own = RankStatus(StatusKind.delta, 0, finite, stop=False, loss=loss, entered_ns=0, norm=norm)
        self.take(by_replica(self._context.gather(own, "the others' losses"), self._replicas))

    def _read(self, figures: LateFigures | None) -> tuple[float, bool]:
        if figures is None:
            return 0.0, True
        if self._context.communicator is not None and figures.reading is not None:
            # Another rank may have died, for which the device waits.
            self._context.communicator.wait(figures.reading, "the loss of its step")
        return figures.read()

    def _read_norm(self) -> DeltaNorm | None:
        if self._norm is None:
            return None
        norm, combined = self._norm.read(), self._sync.combined  # of the exchange in which that Δ was
        own: DeltaNorm = norm if combined is None else norm._replace(combined=combined.read())
        return own

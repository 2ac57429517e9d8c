"""The history of a run as it is made: when it is scored, what the counts were then, and the account at the end."""

from collections import deque
from collections.abc import Sequence
from typing import Literal

from paceline.core.records import Account, Record, ReplicaExit, WorkerFigures
from paceline.core.types import Seconds
from paceline.engine.base import Progress
from paceline.engine.budget import EvalSchedule
from paceline.engine.coordinator import Coordinator
from paceline.engine.evaluation import SnapshotInfo
from paceline.engine.noise_scale import NoiseAccumulator
from paceline.engine.run_context import RunContext


class RunHistory:
    """One run's.

    Args:
        setup: of the run.
        coordinator: whose counts are told.
        start_digest: of A_0.
        noise: what gradients have told; None: nobody has asked.
    """

    def __init__(
        self, setup: RunContext, coordinator: Coordinator, start_digest: str, noise: NoiseAccumulator | None = None
    ) -> None:
        self._budget, self._meter = setup.job.budget, setup.meter()
        self._coordinator, self._digest, self._noise = coordinator, start_digest, noise
        self._per_step = setup.per_step
        self._losses: deque[float] = deque(maxlen=max(32, 2 * setup.replicas))
        self.points = EvalSchedule(setup.job.budget)
        self.history: list[Record] = []
        self._last: tuple[int, int] | None = None

    def heard(self, loss: float, samples: int) -> None:
        """A Δ's loss is known."""
        if samples:
            self._losses.append(loss)
            if self._noise is not None:
                self._noise.heard(samples / self._per_step)

    def spent(self, time_s: Seconds) -> float:
        """How much of the budget is spent, in its unit."""
        tally = self._coordinator.tally
        return self._meter.spent(time_s, tally.micro_steps, tally.seen_samples)

    def point_reached(self, time_s: Seconds) -> bool:
        """Whether the next evaluation point lies at or before now; then it is passed."""
        return self.points.reached(self.spent(time_s))

    @property
    def moved_on(self) -> bool:
        """Whether anything has arrived or been applied since the last moment."""
        return self._last != (self._coordinator.version, self._coordinator.tally.gradients)

    def moment(self, time_s: Seconds) -> SnapshotInfo:
        """The counts as they are."""
        coordinator = self._coordinator
        self._last = coordinator.version, coordinator.tally.gradients
        return SnapshotInfo(
            time_s=time_s,
            updates=coordinator.version,
            gradients=coordinator.tally.gradients,
            threshold=coordinator.threshold,
            staleness_mean=coordinator.recent_staleness(),
            recent_loss=self._loss(),
            statistics=self._noise.since_last(time_s, coordinator.tally.samples) if self._noise else {},
        )

    def record(self, record: Record) -> bool:
        """Add a scored record; whether it meets the condition that ends the run."""
        self.history.append(record)
        return self._budget.until is not None and self._budget.until.met(record)

    def stands_at(self, time_s: Seconds) -> bool:
        """Whether the newest record already tells how the run stands."""
        last = self.history[-1] if self.history else None
        return last is not None and last.time_s >= time_s and last.updates == self._coordinator.version

    def progress(self, phase: Literal["training", "scoring"], time_s: Seconds) -> Progress:
        """The run as it stands."""
        coordinator, amount = self._coordinator, self._budget.amount
        last = self.history[-1] if self.history else None
        return Progress(
            phase=phase,
            fraction=min(1.0, self.spent(time_s) / amount) if amount else None,
            time_s=time_s,
            updates=coordinator.version,
            gradients=coordinator.tally.gradients,
            threshold=coordinator.threshold,
            staleness_mean=last.staleness_mean if last else None,
            loss=self._loss(),
            record=last,
            statistics=self._noise.now() if self._noise else {},
        )

    def account(
        self,
        seconds: Seconds,
        workers: Sequence[WorkerFigures],
        left: Sequence[ReplicaExit],
        notes: dict[str, str | int | float],
        *,
        interrupted: bool,
    ) -> Account:
        """What happened; every Δ that arrived must have met its fate."""
        tally = self._coordinator.tally
        assert tally.gradients == tally.applied + tally.discarded, f"a Δ was lost or used twice: {tally}"
        return Account(
            seconds=seconds,
            updates=self._coordinator.version,
            gradients=tally.gradients,
            applied=tally.applied,
            discarded=tally.discarded,
            cancelled=tally.cancelled,
            nonfinite=tally.nonfinite,
            samples=tally.samples,
            staleness=dict(sorted(tally.staleness.items())),
            workers=tuple(workers),
            left=tuple(left),
            start_digest=self._digest,
            notes=notes,
            interrupted=interrupted,
            statistics=self._noise.whole(seconds, tally.samples) if self._noise else {},
        )

    def _loss(self) -> float | None:
        return sum(self._losses) / len(self._losses) if self._losses else None

"""The history of a run: records, recent losses, what is spent of the budget, and the account at the end."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from paceline.checkpoint.base import COMPRESSION
from paceline.compression.base import Stateless, parse
from paceline.core.noise_scale import NoiseAccumulator
from paceline.core.records import Account, Record, ReplicaExit, WorkerFigures
from paceline.core.types import BudgetUnit, Seconds
from paceline.engine.base import Progress
from paceline.engine.coordinator import Coordinator
from paceline.engine.evaluation import SnapshotInfo
from paceline.engine.own_states import keeps_own_state, saved_states
from paceline.engine.run_context import RunContext
from paceline.engine.run_state import HistoryState, RunState


class RunHistory:
    """Records of a run, counts for snapshots and display, and the account at the end.

    Args:
        context: of the run.
        coordinator: its counts are recorded.
        initial_digest: digest of A_0.
        noise: accumulates the gradient noise scale; None: it is not measured.
    """

    def __init__(
        self, context: RunContext, coordinator: Coordinator, initial_digest: str, noise: NoiseAccumulator | None
    ) -> None:
        self._budget, self._per_step, self._replicas = context.job.budget, context.per_step, context.replicas
        self._portions = context.policy.portions
        self._coordinator, self._digest, self._noise = coordinator, initial_digest, noise
        self._elastic = context.job.strategy.elastic
        self._samples = context.order.epoch_samples if context.order is not None else 1
        self._losses: deque[float] = deque(maxlen=max(32, 2 * context.replicas))
        self.last: tuple[int, int] | None = None
        """Updates and Δs at the last snapshot."""
        self.records: list[Record] = []
        self.stopped: str | None = None
        """The reason for which a callback has ended training; None: none has."""
        self._pending: list[SnapshotInfo] = []
        """Snapshots whose records have not come."""
        self._before: dict[BudgetUnit, tuple[float, int]] = {"steps": (0.0, 0), "epochs": (0.0, 0)}
        """What was spent before a step or an epoch became that of other replicas or data, and the count by then."""
        self._notes: dict[str, str | int | float] = {}
        self.read_late: Callable[[], None] = lambda: None
        """Adds the losses of Δs that have arrived and were not read yet."""
        self.earlier: tuple[Seconds, tuple[int, ...]] = 0.0, ()
        """Training time and steps of each replica before the run went on, which its workers' figures do not have."""
        if context.job.resume is not None:
            self._resume(context, context.job.resume.run)

    def _resume(self, context: RunContext, run: RunState) -> None:
        """Go on with the history of another run."""
        history = run.history
        self.earlier = run.seconds, tuple(position.clock // self._per_step for position in context.positions)
        self._digest, self.last = history.start_digest, history.last_snapshot
        self.records += history.records
        self._losses.extend(history.losses)
        self._before = {unit: (run.spent[unit], self._counted(unit)) for unit in self._before}
        if self._noise is not None and history.noise is not None:
            self._noise.restore(history.noise)
        self._notes["resumed"] = _resume_note(context, run, self._coordinator)

    def state(self) -> HistoryState:
        """Return the history as it is; what was not evaluated yet has no test figures."""
        self.read_late()
        records = sorted((*self.records, *self._pending), key=lambda record: (record.time_s, record.gradients))
        noise = self._noise.state() if self._noise is not None else None
        return HistoryState(tuple(records), tuple(self._losses), self.last, noise, self._digest)

    def keep(self, record: Record) -> None:
        """Add the record of a snapshot that was evaluated."""
        key = record.time_s, record.updates, record.gradients
        self._pending = [each for each in self._pending if (each.time_s, each.updates, each.gradients) != key]
        self.records.append(record)

    def complete(self, scored: Iterable[Record]) -> list[Record]:
        """Return all records in order, with those that were scored elsewhere; a snapshot lost with its rank is bare."""
        for record in scored:
            self.keep(record)
        return list(self.state().records)

    def add_loss(self, loss: float, samples: int) -> None:
        """Note the mean loss of a Δ, which an own loop need not say, and how many samples it was taken on."""
        if samples:
            if not math.isnan(loss):
                self._losses.append(loss)
            if self._noise is not None:
                self._noise.add_batch(samples / self._per_step)

    def spent(self, time_s: Seconds, unit: BudgetUnit | None = None) -> float:
        """Return how much of the budget is spent in a unit, seconds, steps or epochs; None: in its own."""
        unit = unit or self._budget.unit
        if unit == "seconds":
            return time_s
        if unit == "steps" and self._elastic:
            return max(position.spent for position in self._coordinator.positions) / self._per_step
        before, count = self._before[unit]
        per_unit = self._samples if unit == "epochs" else self._portions or self._replicas * self._per_step
        return before + (self._counted(unit) - count) / per_unit

    def _counted(self, unit: BudgetUnit) -> int:
        """Return the samples or micro-steps so far; of portions, some of which come twice, the applied ones."""
        tally = self._coordinator.tally
        if unit == "epochs":
            return tally.seen_samples if self._portions is None else tally.samples
        return tally.micro_steps if self._portions is None else tally.applied

    def snapshot(self, time_s: Seconds) -> SnapshotInfo:
        """Return the counts as they are, to go with a snapshot of A."""
        self.read_late()
        coordinator = self._coordinator
        self.last = coordinator.version, coordinator.tally.gradients
        info = SnapshotInfo(
            time_s=time_s,
            updates=coordinator.version,
            gradients=coordinator.tally.gradients,
            threshold=coordinator.threshold,
            staleness_mean=coordinator.tally.mean_recent_staleness(),
            train_loss=self._recent_loss(),
            statistics=self._noise.since_last(time_s, coordinator.tally.samples) if self._noise else {},
        )
        self._pending.append(info)
        return info

    def is_current(self, time_s: Seconds) -> bool:
        """Return whether the newest record already describes A as it is at ``time_s``."""
        last = self.records[-1] if self.records else None
        return last is not None and last.time_s >= time_s and last.updates == self._coordinator.version

    def progress(self, phase: Literal["training", "scoring"], time_s: Seconds) -> Progress:
        """Return the state of the run for the live display."""
        coordinator, amount = self._coordinator, self._budget.amount
        last = self.records[-1] if self.records else None
        return Progress(
            phase=phase,
            fraction=min(1.0, self.spent(time_s) / amount) if amount else None,
            time_s=time_s,
            updates=coordinator.version,
            gradients=coordinator.tally.gradients,
            threshold=coordinator.threshold,
            staleness_mean=last.staleness_mean if last else None,
            loss=self._recent_loss(),
            record=last,
            statistics=self._noise.now() if self._noise else {},
        )

    def account(
        self,
        seconds: Seconds,
        workers: Sequence[WorkerFigures],
        exits: Sequence[ReplicaExit],
        notes: dict[str, str | int | float],
        *,
        interrupted: bool,
        signal: str | None = None,
    ) -> Account:
        """Return the account of the run; each Δ that arrived must have been applied or discarded by now."""
        self.read_late()
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
            left=tuple(exits),
            start_digest=self._digest,
            notes=self._notes | notes,
            interrupted=interrupted,
            signal=signal,
            stopped=self.stopped,
            statistics=self._noise.overall(seconds, tally.samples) if self._noise else {},
            earlier_s=self.earlier[0],
            earlier_steps=self.earlier[1],
        )

    def _recent_loss(self) -> float | None:
        return sum(self._losses) / len(self._losses) if self._losses else None


def _resume_note(context: RunContext, run: RunState, coordinator: Coordinator) -> str:
    """Say in a sentence where a run has gone on, and with what."""
    assert context.job.resume is not None
    saved = run.coordinator
    parts = [f"went on from update {saved.version} of {context.job.resume.folder}"]
    if run.replicas != context.replicas:
        parts.append(f"with {context.replicas} replicas instead of {run.replicas}")
    if coordinator.kept is None:
        held = f", and {len(saved.held)} Δs held by {saved.policy} were discarded" if saved.held else ""
        parts.append(f"with the policy begun anew{held}")
    if context.epochs_before:
        parts.append("with a new epoch of data of another length")
    if keeps_own_state(context):
        kept = saved_states(context)
        if new := [str(replica) for replica in range(context.replicas) if replica not in kept]:
            parts.append(
                f"with new optimizers in replicas {', '.join(new)}" if kept else "with new optimizers in the replicas"
            )
    text = context.job.strategy.compression
    saved_residuals = context.replicas > 1 and context.job.resume.checkpoint.names(f"{COMPRESSION}{text}/")
    if not isinstance(parse(text), Stateless) and not saved_residuals:
        parts.append("without what compression had kept for later")
    if context.job.resume.dropped:
        names = ", ".join(f"{name}=" for name in context.job.resume.dropped)
        parts.append(f"without {names} of the run before")
    return ", ".join(parts)

"""Figures of a run: its history records and its account."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, NamedTuple

from paceline.core.types import Clock, ReplicaId, Seconds


@dataclass(frozen=True, slots=True)
class Record:
    """The run at one moment, evaluated on a snapshot of A taken then."""

    time_s: Seconds
    updates: int
    """Updates of A made so far."""
    gradients: int
    """Δs that have arrived so far."""
    threshold: int
    """K: how many Δs the next update waits for."""
    staleness_mean: float | None
    """Mean number of updates of A between reading it and applying the Δ, since the last record; None: no Δ."""
    train_loss: float | None
    """Mean loss on a fixed, seeded sample of the training set."""
    test_loss: float | None = None
    test_accuracy: float | None = None
    """A fraction."""
    test_metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """The program's other metrics on the test set, by name."""
    statistics: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    """Gradient statistics if they were requested: all of :data:`STATISTICS`, or none."""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "Record":
        """Return the record whose :meth:`row` this is."""
        known = {*RECORD_FIELDS, *STATISTICS}
        return cls(
            **{name: row[name] for name in RECORD_FIELDS},
            test_metrics={n.removeprefix("test_"): v for n, v in row.items() if n not in known},
            statistics={name: row[name] for name in STATISTICS if name in row},
        )

    def row(self) -> dict[str, Any]:
        """Return the record as one flat JSON object; other metrics are called ``test_<name>``."""
        fixed = {name: getattr(self, name) for name in RECORD_FIELDS}
        return fixed | {f"test_{name}": value for name, value in self.test_metrics.items()} | dict(self.statistics)


# Names of a record's own figures, in their order in a row.
RECORD_FIELDS = tuple(each.name for each in fields(Record) if each.default_factory is MISSING)

# Gradient statistics by name; None: not known at that moment.
#
# noise_scale: φ, in samples; noise_scale_biased: the share of it that comes from gradients made at different
# A, 0 to 1; efficiency: (φ + m₀)/(φ + m), how much a sample advances training, relative to one in a batch of m₀;
# goodput_samples_per_s: samples per second since the record before · efficiency.
STATISTICS = ("noise_scale", "noise_scale_biased", "efficiency", "goodput_samples_per_s")


@dataclass(frozen=True, slots=True)
class ReplicaExit:
    """A replica that ended before it was done."""

    replica: ReplicaId
    reason: str
    """Text such as ``killed by SIGKILL``."""
    time_s: Seconds


class ReplicaPosition(NamedTuple):
    """How far a replica has come: what it counted, not what it was computing."""

    clock: int = 0
    """Micro-steps; they number the seeds of dropout and the draws of delays."""
    attempt: Clock = 0
    """The newest Δ that arrived or was cancelled, counted from 1."""
    spent: int = 0
    """Micro-steps of a budget in steps."""

    def after(self, micro_steps: int) -> "ReplicaPosition":
        """Return the position after one more Δ."""
        clock, attempt, spent = self
        return ReplicaPosition(clock + micro_steps, attempt + 1, spent + micro_steps)


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """Figures of one worker since the run began or went on; None if not measured (the virtual engine's memory, say)."""

    replica: ReplicaId
    stage: int
    shard: int
    steps: int
    busy_s: Seconds
    """Time in work and delay, not in waiting."""
    step_time_s: Seconds | None
    """Median time of one whole step: data, compute, push, wait."""
    payload_bytes: int | None
    """Sent and received over the run."""
    peak_memory_bytes: int | None
    parameter_bytes: int | None
    peak_saved_bytes: int | None = None
    """The most that was kept for backward at one time, by a pipeline's stage or a shard."""
    optimizer_bytes: int | None = None
    """State of this worker's own optimizer at the end; None: it has one that does not report it."""


@dataclass(frozen=True, slots=True)
class Account:
    """Totals of a run. gradients = applied + discarded: each Δ that arrived has exactly one of these fates."""

    seconds: Seconds
    """Training time."""
    updates: int
    gradients: int
    applied: int
    discarded: int
    cancelled: int
    """Attempts that a policy cancelled before their Δ arrived; not among ``gradients``."""
    nonfinite: int
    """Discarded Δs that were not finite."""
    samples: int
    """Samples in the applied Δs."""
    staleness: Mapping[int, int]
    """staleness -> number of applied Δs of that staleness."""
    workers: tuple[WorkerFigures, ...]
    left: tuple[ReplicaExit, ...]
    start_digest: str
    """SHA-256 of A_0's bytes: equal digests, equal starts."""
    notes: Mapping[str, str | int | float] = field(default_factory=dict[str, str | int | float])
    """Rules the engine followed that a reader of the figures should know."""
    interrupted: bool = False
    signal: str | None = None
    """The first signal that asked this process to end, ``SIGTERM``, say; None: there was none."""
    stopped: str | None = None
    """The reason for which a callback ended training; None: none did."""
    statistics: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    """Gradient statistics over the whole run, if they were requested."""
    earlier_s: Seconds = 0.0
    """Training time before the run went on from a checkpoint, of which the workers' figures have nothing."""
    earlier_steps: tuple[int, ...] = ()
    """Steps of each replica by then; empty: the workers' figures are of the whole run."""

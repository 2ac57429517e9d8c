"""What a run leaves behind, in numbers: history records and the account of what happened."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.core.types import ReplicaId, Seconds


@dataclass(frozen=True, slots=True)
class Record:
    """The run at one moment, scored on a snapshot of A taken then."""

    time_s: Seconds
    updates: int
    """Updates of A made so far."""
    gradients: int
    """Δs that have arrived so far."""
    threshold: int
    """K: how many Δs the next update waits for."""
    staleness_mean: float | None
    """Over the Δs applied since the record before: how many updates A had had since they read it; None: none were."""
    train_loss: float | None
    """Mean loss on a fixed, seeded sample of the training set."""
    test_loss: float | None
    test_accuracy: float | None
    """A fraction."""
    test_metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """The program's other metrics on the test set, by name."""
    statistics: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    """What is told of gradients where that was asked for: all of :data:`STATISTICS`, or none."""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "Record":
        """The record whose :meth:`row` this is."""
        known = {*RECORD_FIELDS, *STATISTICS}
        return cls(
            **{name: row[name] for name in RECORD_FIELDS},
            test_metrics={n.removeprefix("test_"): v for n, v in row.items() if n not in known},
            statistics={name: row[name] for name in STATISTICS if name in row},
        )

    def row(self) -> dict[str, Any]:
        """The record as one flat JSON object; other metrics are called ``test_<name>``."""
        fixed = {name: getattr(self, name) for name in RECORD_FIELDS}
        return fixed | {f"test_{name}": value for name, value in self.test_metrics.items()} | dict(self.statistics)


RECORD_FIELDS = (
    "time_s",
    "updates",
    "gradients",
    "threshold",
    "staleness_mean",
    "train_loss",
    "test_loss",
    "test_accuracy",
)

STATISTICS = ("noise_scale", "noise_scale_biased", "efficiency", "goodput_samples_per_s")
"""Figures of gradients, by name; None: not known at that moment.

``noise_scale``: φ, in samples; ``noise_scale_biased``: how much of it comes from gradients that were made at different
A, 0 to 1; ``efficiency``: (φ + m₀)/(φ + m), how much a sample advances training against one in a batch of m₀ samples;
``goodput_samples_per_s``: samples per second since the record before · efficiency.
"""


@dataclass(frozen=True, slots=True)
class ReplicaExit:
    """A replica that ended before it was done."""

    replica: ReplicaId
    reason: str
    """In words: ``killed by SIGKILL``."""
    time_s: Seconds


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """One worker over the whole run. What was not measured on a host is None (the virtual engine's memory, say)."""

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
    """Of a pipeline's stages, and of shards: the most that was kept for backward at one time."""
    optimizer_bytes: int | None = None
    """Of what this worker's own optimizer remembers at the end; None: it has one and does not say."""


@dataclass(frozen=True, slots=True)
class Account:
    """What happened. gradients = applied + discarded: each Δ that arrived met exactly one of these fates."""

    seconds: Seconds
    """Training time."""
    updates: int
    gradients: int
    applied: int
    discarded: int
    cancelled: int
    """Attempts that a policy cancelled before their Δ arrived; not among ``gradients``."""
    nonfinite: int
    """Of ``discarded``, those that were not finite."""
    samples: int
    """In the applied Δs."""
    staleness: Mapping[int, int]
    """staleness -> how many applied Δs had it."""
    workers: tuple[WorkerFigures, ...]
    left: tuple[ReplicaExit, ...]
    start_digest: str
    """SHA-256 of A_0's bytes: equal digests, equal starts."""
    notes: Mapping[str, str | int | float] = field(default_factory=dict[str, str | int | float])
    """Rules the engine followed that a reader of the figures should know."""
    interrupted: bool = False
    statistics: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    """Of gradients over the whole run, where that was asked for."""

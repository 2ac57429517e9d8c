"""What a coordinator has counted and what it holds between two events, as checkpoints keep it."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from paceline.aggregation.base import Arrival
from paceline.core.errors import InputError
from paceline.core.records import ReplicaPosition
from paceline.core.types import Clock, ReplicaId, Version


@dataclass
class Tally:
    """Counts of a run so far."""

    gradients: int = 0
    applied: int = 0
    discarded: int = 0
    cancelled: int = 0
    nonfinite: int = 0
    samples: int = 0
    """Samples in applied Δs."""
    seen_samples: int = 0
    """Samples in all Δs that arrived."""
    micro_steps: int = 0
    """Micro-steps of all attempts that ended, cancelled ones included."""
    staleness: Counter[int] = field(default_factory=Counter[int])
    recent_staleness: int = 0
    recent_applied: int = 0

    def count_applied(self, staleness: int, samples: int) -> None:
        """Count a Δ of so many samples that was applied to an A so many updates newer than its own."""
        self.staleness[staleness] += 1
        self.recent_staleness += staleness
        self.samples += samples
        self.applied += 1
        self.recent_applied += 1

    def mean_recent_staleness(self) -> float | None:
        """Return the mean staleness of the Δs applied since the last call."""
        mean = self.recent_staleness / self.recent_applied if self.recent_applied else None
        self.recent_staleness = self.recent_applied = 0
        return mean


@dataclass(frozen=True)
class CoordinatorState:
    """The state of a :class:`~paceline.engine.coordinator.Coordinator`, for a checkpoint."""

    version: Version
    """Updates of A."""
    tally: Tally
    policy: str
    """Text of the policy."""
    policy_kind: str
    """What a policy must have in common with it to go on with its state."""
    policy_state: Any
    """As :mod:`~paceline.aggregation.state_codec` encodes it."""
    unfinished: Any
    """The rest of a decision that the end of the run has broken off, encoded likewise."""
    leaving: tuple[ReplicaId, ...]
    """Replicas that are done, of which the policy does not know yet."""
    present: tuple[ReplicaId, ...]
    """Replicas that take part."""
    computing: tuple[ReplicaId, ...]
    """Those that computed, in the order in which they were sent A."""
    positions: tuple[ReplicaPosition, ...]
    """Of each replica; what is under way does not count."""
    held: tuple[Arrival, ...]
    """Δs that the policy holds."""

    def __post_init__(self) -> None:
        numbers = {*self.leaving, *self.present, *self.computing}
        if not numbers <= set(range(len(self.positions))) or not set(self.computing) <= set(self.present):
            raise InputError(f"it has replicas {sorted(numbers)} of {len(self.positions)}")

    @property
    def held_names(self) -> set[tuple[ReplicaId, Clock]]:
        """Return the replica and the clock of each Δ that the policy holds."""
        return {(arrival.replica, arrival.clock) for arrival in self.held}

"""No waiting: every Δ is an update of its own."""

from dataclasses import dataclass
from typing import Literal, TypeAlias, final, get_args

from paceline.aggregation.base import Aggregation, Arrival, Combine, Decision, Release, combined, updates
from paceline.core.checks import check_choice
from paceline.core.registry import register
from paceline.core.types import LeaveReason, ReplicaId, Version

Damping: TypeAlias = Literal["none", "staleness"]
"""Rule that makes the learning rate of an update smaller."""


@final
@register("asynchronous")
@dataclass(frozen=True)
class Asynchronous(Aggregation[Version]):
    """Apply each Δ on arrival and release its replica at once. The state is the version of A.

    Args:
        damping: ``staleness`` divides the learning rate of a Δ by its staleness, the number of updates that A has had
            since it was read, if that is above 1 (Zhang et al. 2015, arXiv 1511.05950).
        combine: of no effect on one Δ; so that a comparison can name one rule for all its strategies.
    """

    damping: Damping = "none"
    combine: Combine = "mean"

    def __post_init__(self) -> None:
        check_choice("asynchronous:damping", self.damping, get_args(Damping))
        check_choice("asynchronous:combine", self.combine, get_args(Combine))

    def start(self, replicas: int) -> Version:
        del replicas
        return 0

    def arrived(self, state: Version, arrival: Arrival) -> tuple[Version, Decision]:
        rate = 1.0 if self.damping == "none" else 1.0 / max(1, state - arrival.version)
        update = combined((arrival,), self.combine, rate)
        return state + updates(update), (*update, Release((arrival.replica,)))

    def left(self, state: Version, replica: ReplicaId, reason: LeaveReason) -> tuple[Version, Decision]:
        del replica, reason
        return state, ()

    def joined(self, state: Version, replica: ReplicaId) -> tuple[Version, Decision]:
        del replica
        return state, ()

    def waits_for(self, state: Version) -> int:
        del state
        return 1

"""No waiting: every Δ is an update of its own."""

from dataclasses import dataclass
from typing import Literal, TypeAlias, final, get_args

from paceline.aggregation.base import Arrival, Combine, Decision, Release, Unsynchronized, combined, updates
from paceline.core.errors import check_choice
from paceline.core.registry import register
from paceline.core.types import Version

# Rule that makes the learning rate of an update smaller.
Damping: TypeAlias = Literal["none", "staleness"]


@final
@register("asynchronous")
@dataclass(frozen=True)
class Asynchronous(Unsynchronized[Version]):
    """Apply each Δ on arrival and release its replica at once. The state is the version of A.

    Args:
        damping: ``staleness`` divides the learning rate of a Δ by its staleness, the number of updates of A since it
            was read, if that is above 1 (Zhang et al. 2015, arXiv 1511.05950).
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
        # The state is the version of A at this point of the log, so this is the staleness of the Δ.
        rate = 1.0 if self.damping == "none" else 1.0 / max(1, state - arrival.version)
        update = combined((arrival,), self.combine, rate)
        return state + updates(update), (*update, Release((arrival.replica,)))

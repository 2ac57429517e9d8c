"""No waiting, and stale gradients corrected for how far A has come since they were begun."""

from dataclasses import dataclass
from typing import final

from paceline.aggregation.base import Arrival, Decision, Release, Unsynchronized, combined
from paceline.core.registry import register
from paceline.reduction.delay_compensation import DelayCompensation


@final
@register("delay-compensated")
@dataclass(frozen=True)
class DelayCompensated(Unsynchronized[None]):
    """Apply each Δ on arrival, as ``asynchronous`` does, but what it would be to first order at the present A.

    That is Δ + λ·Δ⊙Δ⊙(A - A as it was read) (Zheng et al. 2017, arXiv 1609.08326).

    Args:
        strength: λ.
    """

    strength: float = 0.04

    def __post_init__(self) -> None:
        DelayCompensation(self.strength)  # refuses what is no strength

    @property
    def reducer(self) -> DelayCompensation:
        return DelayCompensation(self.strength)

    def start(self, replicas: int) -> None:
        del replicas

    def arrived(self, state: None, arrival: Arrival) -> tuple[None, Decision]:
        return state, (*combined((arrival,), "mean"), Release((arrival.replica,)))

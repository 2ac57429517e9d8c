"""Hogwild: no server, no lock, no Δ."""

from dataclasses import dataclass
from typing import final

from paceline.aggregation.base import Aggregation, Arrival, Decision, Release, combined
from paceline.core.delta import Adopt, Delta, InPlace, Keep
from paceline.core.registry import register
from paceline.core.types import LeaveReason, ReplicaId


@final
@register("hogwild")
@dataclass(frozen=True)
class Hogwild(Aggregation[None]):
    """Replicas write A in place, each step as it comes (Niu et al. 2011, arXiv 1106.5730).

    An arrival reports a step that has been made; its Apply only counts it, and the server has nothing to do.
    For engines that share memory.
    """

    @property
    def delta(self) -> Delta:
        return InPlace()

    @property
    def adopt(self) -> Adopt:
        return Keep()

    def start(self, replicas: int) -> None:
        del replicas

    def arrived(self, state: None, arrival: Arrival) -> tuple[None, Decision]:
        return state, (*combined((arrival,), "sum"), Release((arrival.replica,)))

    def left(self, state: None, replica: ReplicaId, reason: LeaveReason) -> tuple[None, Decision]:
        del replica, reason
        return state, ()

    def joined(self, state: None, replica: ReplicaId) -> tuple[None, Decision]:
        del replica
        return state, ()

    def waits_for(self, state: None) -> int:
        del state
        return 1

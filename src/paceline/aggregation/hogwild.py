"""Hogwild: no server, no lock, no Δ."""

from dataclasses import dataclass
from typing import final

from paceline.aggregation.base import Arrival, Decision, Release, Unsynchronized, combined
from paceline.core.delta import Adopt, Delta, InPlace, Keep
from paceline.core.registry import register


@final
@register("hogwild")
@dataclass(frozen=True)
class Hogwild(Unsynchronized[None]):
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

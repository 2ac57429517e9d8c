"""Replicas on springs: each keeps its own parameters, tied elastically to A."""

from dataclasses import dataclass
from typing import final

from paceline.aggregation.base import Apply, Arrival, Decision, Release, Unsynchronized
from paceline.core.delta import Adopt, Delta, Distance, Mix
from paceline.core.errors import check_int, check_number
from paceline.core.registry import register


@final
@register("elastic-averaging")
@dataclass(frozen=True)
class ElasticAveraging(Unsynchronized[None]):
    """x -= α(x - A) and A += α(x - A), both with x and A as they are on arrival (Zhang et al. 2015, Algorithm 1).

    So the log is the Release first, which mixes x with the A that its own Δ has not yet moved, and then the Apply. No
    replica ever waits for another. A Δ is applied even if its last steps had no sample: the distance exists all the
    same.

    Args:
        period: τ, own steps between two encounters with A.
        elasticity: α, above 0 and at most 1. The paper takes 0.9 / P.

    Raises:
        InputError: an option that is out of its range.
    """

    period: int = 8
    elasticity: float = 0.1

    def __post_init__(self) -> None:
        check_int("elastic-averaging:period", self.period, least=1)
        check_number(
            "elastic-averaging:elasticity",
            self.elasticity,
            "above 0 and at most 1",
            lambda alpha: 0 < alpha <= 1,
            instead=0.1,
        )

    @property
    def delta(self) -> Delta:
        return Distance(self.period)

    @property
    def adopt(self) -> Adopt:
        return Mix(self.elasticity)

    def slots(self, replicas: int) -> int:
        del replicas
        return 2  # it goes on before its Δ is applied

    def start(self, replicas: int) -> None:
        del replicas

    def arrived(self, state: None, arrival: Arrival) -> tuple[None, Decision]:
        # The Release first: the replica mixes with the A that its own Δ has not moved yet.
        return state, (Release((arrival.replica,)), Apply(((arrival, self.elasticity),)))

"""Replicas on springs: each keeps its own parameters, tied elastically to A."""

from dataclasses import dataclass
from typing import final

from paceline.aggregation.base import Aggregation, Apply, Arrival, Buffer, Combine, Decision, Release, released
from paceline.core.delta import Adopt, Delta, Distance, Mix
from paceline.core.errors import InputError, check_bool, check_int, check_number
from paceline.core.registry import register
from paceline.core.types import LeaveReason, ReplicaId


@final
@register("elastic-averaging")
@dataclass(frozen=True)
class ElasticAveraging(Aggregation[Buffer]):
    """x -= α(x - A) and A += α(x - A), both with x and A as they are on arrival (Zhang et al. 2015, Algorithm 1).

    So the log is the Release first, which mixes x with the A that its own Δ has not yet moved, and then the Apply. No
    replica waits for another, unless ``synchronous``: then all meet one A at once, and A += α Σ (x - A), which one
    collective of all replicas makes. A Δ is applied even if its last steps had no sample: the distance exists all the
    same.

    Args:
        period: τ, own steps between two encounters with A.
        elasticity: α, above 0 and at most 1. The paper takes 0.9 / P.
        synchronous: whether all replicas meet A at once.

    Raises:
        InputError: an option that is out of its range; together replicas would move A beyond their mean.
    """

    period: int = 8
    elasticity: float = 0.1
    synchronous: bool = False

    def __post_init__(self) -> None:
        check_int("elastic-averaging:period", self.period, least=1)
        check_number(
            "elastic-averaging:elasticity",
            self.elasticity,
            "above 0 and at most 1",
            lambda alpha: 0 < alpha <= 1,
            instead=0.1,
        )
        check_bool("elastic-averaging:synchronous", self.synchronous)

    def resolved(self, *, learning_rate: float | None, replicas: int) -> "ElasticAveraging":
        del learning_rate
        if self.synchronous and self.elasticity * replicas > 1:
            raise InputError(
                f"elasticity={self.elasticity}: replicas={replicas} at once would move A beyond their mean; write "
                f"elasticity={round(0.9 / replicas, 6)}, which is the paper's, or synchronous=false."
            )
        return self

    @property
    def delta(self) -> Delta:
        return Distance(self.period)

    @property
    def adopt(self) -> Adopt:
        return Mix(self.elasticity)

    @property
    def collective(self) -> Combine | None:
        return "sum" if self.synchronous else None

    def slots(self, replicas: int) -> int:
        del replicas
        return 2  # it goes on before its Δ is applied

    def start(self, replicas: int) -> Buffer:
        return Buffer(frozenset(range(replicas)))

    def arrived(self, state: Buffer, arrival: Arrival) -> tuple[Buffer, Decision]:
        if self.synchronous:
            return self._meet(state.add(arrival))
        # The Release first: the replica mixes with the A that its own Δ has not moved yet.
        return state, (Release((arrival.replica,)), Apply(((arrival, self.elasticity),)))

    def left(self, state: Buffer, replica: ReplicaId, reason: LeaveReason) -> tuple[Buffer, Decision]:
        del reason
        return self._meet(state.without(replica))

    def joined(self, state: Buffer, replica: ReplicaId) -> tuple[Buffer, Decision]:
        return state.joined(replica), ()

    def waits_for(self, state: Buffer) -> int:
        return max(1, len(state.alive)) if self.synchronous else 1

    def _meet(self, buffer: Buffer) -> tuple[Buffer, Decision]:
        """Have all replicas and A meet, once all have arrived."""
        if not buffer.held or len(buffer.waiting) < len(buffer.alive):
            return buffer, ()
        held = sorted(buffer.held, key=lambda a: (a.replica, a.clock))
        update = Apply(tuple((arrival, self.elasticity) for arrival in held))
        return Buffer(buffer.alive), (*released(buffer.waiting), update)

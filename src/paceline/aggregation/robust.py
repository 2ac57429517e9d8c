"""Updates that replicas which err or lie can't spoil."""

from dataclasses import dataclass, field
from typing import final

from paceline.aggregation.base import Aggregation, Arrival, Buffer, Decision
from paceline.core.errors import InputError, check_int
from paceline.core.registry import register
from paceline.core.types import LeaveReason, ReplicaId
from paceline.reduction import Reducer
from paceline.reduction.median import Median


@final
@register("robust")
@dataclass(frozen=True)
class Robust(Aggregation[Buffer]):
    """Apply every k Δs together, combined by a rule that few of them can't move far: the median, say.

    Args:
        by: the rule, ``median``, ``trimmed-mean:trim=2``, ``krum:faulty=2,best=5``, or another reducer.
        k: Δs of an update, of as many replicas, which wait for it; none: of all that take part.

    Raises:
        InputError: k < 1, more than there are replicas, or too few for the rule.
    """

    by: Reducer = field(default_factory=Median)
    k: int | None = None

    def __post_init__(self) -> None:
        if self.k is not None:
            check_int("robust:k", self.k, least=1)

    @property
    def reducer(self) -> Reducer:
        return self.by

    def resolved(self, *, learning_rate: float | None, replicas: int) -> "Robust":
        del learning_rate
        if self.k is not None and self.k > replicas:
            raise InputError(f"k={self.k} Δs of replicas={replicas} can't wait together; write robust:k={replicas}.")
        self.by.check(self.k or replicas)
        return self

    def start(self, replicas: int) -> Buffer:
        return Buffer(frozenset(range(replicas)))

    def arrived(self, state: Buffer, arrival: Arrival) -> tuple[Buffer, Decision]:
        return self._settle(state.add(arrival))

    def left(self, state: Buffer, replica: ReplicaId, reason: LeaveReason) -> tuple[Buffer, Decision]:
        del reason
        return self._settle(state.without(replica))

    def joined(self, state: Buffer, replica: ReplicaId) -> tuple[Buffer, Decision]:
        return state.joined(replica), ()

    def waits_for(self, state: Buffer) -> int:
        alive = max(1, len(state.alive))
        return alive if self.k is None else min(self.k, alive)

    def _settle(self, state: Buffer) -> tuple[Buffer, Decision]:
        return state.settle(self.waits_for(state), "mean")

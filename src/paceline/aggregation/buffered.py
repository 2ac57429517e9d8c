"""A fixed number of Δs per update."""

from dataclasses import dataclass
from typing import final, get_args

from paceline.aggregation.base import Aggregation, Arrival, Buffer, Combine, Decision
from paceline.core.errors import InputError, check_bool, check_choice, check_int
from paceline.core.registry import register
from paceline.core.types import LeaveReason, ReplicaId


@final
@register("buffered")
@dataclass(frozen=True)
class Buffered(Aggregation[Buffer]):
    """Apply every k Δs together: the four variants of Dutta et al. 2018 (arXiv 1803.01113).

    ====================  ======  ========  ===================================================================
    variant               hold    cancel    an update takes
    ====================  ======  ========  ===================================================================
    K-async               true    false     the next k replicas to arrive; the others go on with what they read
    K-batch-async         false   false     the next k Δs, several of one replica maybe
    K-sync                true    true      the first k replicas; the others stop and begin anew with them
    K-batch-sync          false   true      the first k Δs, all computed from the current A
    ====================  ======  ========  ===================================================================

    Args:
        k: K; with ``hold`` never more than the replicas that take part.
        combine: ``mean`` weighs by samples / Σ samples; ``sum`` by 1.
        hold: whether a replica waits for the update that its Δ is in, or goes on at once.
        cancel: whether an update ends the attempts that others are computing.

    Raises:
        InputError: k < 1, or more than there are replicas that could wait.
    """

    k: int = 8
    combine: Combine = "mean"
    hold: bool = True
    cancel: bool = False

    def __post_init__(self) -> None:
        check_int("buffered:k", self.k, least=1)
        check_choice("buffered:combine", self.combine, get_args(Combine))
        check_bool("buffered:hold", self.hold)
        check_bool("buffered:cancel", self.cancel)

    def slots(self, replicas: int) -> int:
        del replicas
        return 1 if self.hold else self.k

    def resolved(self, *, learning_rate: float | None, replicas: int) -> "Buffered":
        del learning_rate
        if self.hold and self.k > replicas:
            raise InputError(
                f"k={self.k} Δs can never wait together: each of replicas={replicas} waits with its first; "
                f"write buffered:k={replicas} or buffered:k={self.k},hold=false."
            )
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
        return max(1, min(self.k, len(state.alive))) if self.hold else self.k

    def _settle(self, state: Buffer) -> tuple[Buffer, Decision]:
        return state.settle(self.waits_for(state), self.combine, hold=self.hold, cancel=self.cancel)

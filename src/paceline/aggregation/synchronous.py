"""The round: all replicas' Δs in one update."""

from dataclasses import dataclass
from typing import NamedTuple, final, get_args

from paceline.aggregation.base import Aggregation, Arrival, Buffer, Combine, Decision, Discard, Release, updates
from paceline.core.errors import InputError, check_choice, check_int
from paceline.core.registry import register
from paceline.core.types import LeaveReason, ReplicaId


class Round(NamedTuple):
    """The state of :class:`Synchronous`."""

    buffer: Buffer
    late: frozenset[ReplicaId] = frozenset()
    """Replicas with an attempt begun before the last update: its Δ is discarded."""


@final
@register("synchronous")
@dataclass(frozen=True)
class Synchronous(Aggregation[Round]):
    """Apply the round once P - backups replicas have arrived, and release all waiting replicas together.

    With P = 3 and one backup; replica 2 is slow, its Δ of the first round comes late and is discarded::

        replica 0   ■■■■|■■■■■|            | Apply, then Release of all that wait
        replica 1   ■■■■■|■■..|
        replica 2   ■■■■■■■x■■|            x Discard, and its own Release at once

    What a replica sent before it left joins the round; the round then waits for the others alone.

    Args:
        backups: number of replicas that a round does not wait for (Chen et al. 2016, arXiv 1604.00981).
        combine: ``mean`` weighs by samples / Σ samples; ``sum`` by 1.

    Raises:
        InputError: a negative number of backups, or as many as there are replicas.
    """

    backups: int = 0
    combine: Combine = "mean"

    def __post_init__(self) -> None:
        check_int("synchronous:backups", self.backups, least=0)
        check_choice("synchronous:combine", self.combine, get_args(Combine))

    @property
    def collective(self) -> Combine | None:
        return None if self.backups else self.combine

    @property
    def current(self) -> bool:
        return True

    def resolved(self, *, learning_rate: float | None, replicas: int) -> "Synchronous":
        del learning_rate
        if self.backups >= replicas:
            raise InputError(
                f"backups={self.backups} leaves no replica to wait for among replicas={replicas}; "
                f"write backups={replicas - 1} or fewer."
            )
        return self

    def start(self, replicas: int) -> Round:
        return Round(Buffer(frozenset(range(replicas))))

    def arrived(self, state: Round, arrival: Arrival) -> tuple[Round, Decision]:
        replica = arrival.replica
        if replica in state.late:
            return Round(state.buffer, state.late - {replica}), (Discard((arrival,)), Release((replica,)))
        return self._settle(state.buffer.add(arrival), state.late)

    def left(self, state: Round, replica: ReplicaId, reason: LeaveReason) -> tuple[Round, Decision]:
        del reason
        return self._settle(state.buffer.without(replica), state.late - {replica})

    def joined(self, state: Round, replica: ReplicaId) -> tuple[Round, Decision]:
        return state._replace(buffer=state.buffer.joined(replica)), ()

    def waits_for(self, state: Round) -> int:
        return max(1, len(state.buffer.alive) - self.backups)

    def _settle(self, buffer: Buffer, late: frozenset[ReplicaId]) -> tuple[Round, Decision]:
        after, decision = buffer.settle(max(1, len(buffer.alive) - self.backups), self.combine)
        # Replicas that compute still do so from the A before this update: their Δs will be discarded.
        if updates(decision):
            late = buffer.alive.difference(buffer.waiting)
        return Round(after, late), decision

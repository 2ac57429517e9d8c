"""Policies with a timer, as a user would write them in one file."""

from dataclasses import dataclass
from typing import NamedTuple

from paceline import Aggregation, Arrival, Decision
from paceline.aggregation.base import Buffer, combined, released
from paceline.core.types import LeaveReason, ReplicaId, Seconds


class Held(NamedTuple):
    """What has come, and when the next update is due."""

    buffer: Buffer
    due_s: Seconds
    ticks: tuple[Seconds, ...] = ()
    arrived: tuple[Seconds, ...] = ()


@dataclass(frozen=True)
class EverySecond(Aggregation[Held]):
    """Merge what has come every so many seconds, be it much or little; all that have sent wait until then."""

    interval_s: float = 1.0

    def start(self, replicas: int) -> Held:
        return Held(Buffer(frozenset(range(replicas))), self.interval_s)

    def arrived(self, state: Held, arrival: Arrival) -> tuple[Held, Decision]:
        return state._replace(buffer=state.buffer.add(arrival), arrived=(*state.arrived, arrival.time_s)), ()

    def left(self, state: Held, replica: ReplicaId, reason: LeaveReason) -> tuple[Held, Decision]:
        del reason
        buffer = state.buffer.without(replica)
        return self._merged(state, buffer) if not buffer.alive else (state._replace(buffer=buffer), ())

    def joined(self, state: Held, replica: ReplicaId) -> tuple[Held, Decision]:
        return state._replace(buffer=state.buffer.joined(replica)), ()

    def waits_for(self, state: Held) -> int:
        return max(1, len(state.buffer.alive))

    def deadline(self, state: Held) -> Seconds | None:
        return state.due_s if state.buffer.held else None

    def tick(self, state: Held, time_s: Seconds) -> tuple[Held, Decision]:
        due = state._replace(due_s=time_s + self.interval_s, ticks=(*state.ticks, time_s))
        return self._merged(due, state.buffer)

    def _merged(self, state: Held, buffer: Buffer) -> tuple[Held, Decision]:
        log = (*combined(tuple(buffer.held), "mean"), *released(tuple(buffer.waiting)))
        return state._replace(buffer=Buffer(buffer.alive)), log

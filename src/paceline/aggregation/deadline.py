"""Updates at a fixed time after the last one, of whatever has arrived."""

from dataclasses import dataclass
from typing import NamedTuple, final

from paceline.aggregation.base import Aggregation, Arrival, Buffer, Decision, combined, released
from paceline.core.errors import check_int, check_positive
from paceline.core.registry import register
from paceline.core.types import LeaveReason, ReplicaId, Seconds


class Window(NamedTuple):
    """The state of :class:`Deadline`."""

    buffer: Buffer
    due_s: Seconds
    """When the update is made that is waited for."""


@final
@register("deadline")
@dataclass(frozen=True)
class Deadline(Aggregation[Window]):
    """Apply what has arrived ``seconds`` after the last update, or once all replicas have; who is late goes on.

    Fixed-time rounds: an update has a random number of Δs and takes a fixed time, where ``buffered`` has a fixed number
    and a random time (Ferdinand et al. 2019, arXiv 2006.05752, has a fixed time of computing).

    Args:
        seconds: between two updates.
        least: Δs without which an update is not made; it is then made as soon as there are so many.
    """

    seconds: float = 1.0
    least: int = 1

    def __post_init__(self) -> None:
        check_positive("deadline:seconds", self.seconds, instead=1.0)
        check_int("deadline:least", self.least, least=1)

    def start(self, replicas: int) -> Window:
        return Window(Buffer(frozenset(range(replicas))), self.seconds)

    def arrived(self, state: Window, arrival: Arrival) -> tuple[Window, Decision]:
        return self._settled(state._replace(buffer=state.buffer.add(arrival)), arrival.time_s)

    def left(self, state: Window, replica: ReplicaId, reason: LeaveReason) -> tuple[Window, Decision]:
        del reason
        return self._settled(state._replace(buffer=state.buffer.without(replica)), None)

    def joined(self, state: Window, replica: ReplicaId) -> tuple[Window, Decision]:
        return state._replace(buffer=state.buffer.joined(replica)), ()

    def waits_for(self, state: Window) -> int:
        return max(1, min(self.least, len(state.buffer.alive)))

    def deadline(self, state: Window) -> Seconds | None:
        return state.due_s if len(state.buffer.held) >= self.waits_for(state) else None

    def tick(self, state: Window, time_s: Seconds) -> tuple[Window, Decision]:
        return self._update(state.buffer, time_s)

    def _settled(self, state: Window, time_s: Seconds | None) -> tuple[Window, Decision]:
        """Make the update if nobody is left to wait for."""
        buffer = state.buffer
        if buffer.held and len(buffer.waiting) >= len(buffer.alive):
            return self._update(buffer, state.due_s - self.seconds if time_s is None else time_s)
        return state, ()

    def _update(self, buffer: Buffer, time_s: Seconds) -> tuple[Window, Decision]:
        after = Window(Buffer(buffer.alive), time_s + self.seconds)
        return after, (*combined(buffer.held, "mean"), *released(buffer.waiting))

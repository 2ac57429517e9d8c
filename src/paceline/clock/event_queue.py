"""The virtual clock: a queue of events in order of time."""

import math
from heapq import heappop, heappush
from typing import Generic, TypeVar, final

from paceline.core.types import Seconds

Event = TypeVar("Event")


@final
class EventQueue(Generic[Event]):
    """Events in order of time; those of one time in the order in which they were pushed.

    Events themselves are never compared, so any object will do, and the order depends on nothing but the calls.

    >>> queue = EventQueue[str]()
    >>> queue.push(2.0, "late"); queue.push(1.0, "first"); queue.push(1.0, "second")
    >>> [queue.pop() for _ in range(3)], queue.now_s
    (['first', 'second', 'late'], 2.0)
    """

    def __init__(self) -> None:
        self.now_s: Seconds = 0.0
        """The time of the event popped last."""
        self._heap: list[tuple[Seconds, int, Event]] = []
        self._pushed = 0

    def push(self, time_s: Seconds, event: Event) -> None:
        """Schedule ``event`` at ``time_s``, which may be now but never before."""
        assert self.now_s <= time_s < math.inf, f"event at {time_s} s, but it is {self.now_s} s: {event!r}"
        # The running number makes ties first in, first out, and keeps heapq from comparing events.
        heappush(self._heap, (time_s, self._pushed, event))
        self._pushed += 1

    def pop(self) -> Event:
        """Take the next event and move the clock to it; an ``IndexError`` if there is none."""
        self.now_s, _, event = heappop(self._heap)
        return event

    @property
    def next_s(self) -> Seconds:
        """Return when the next event happens; infinity where there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def __len__(self) -> int:
        return len(self._heap)

"""The common stretch of time in which the steps of many processes are counted."""

import time
from collections.abc import Callable
from typing import NamedTuple

WARM_UP_S = 1.0
"""All processes are at work for so long before their steps begin to count."""


class Window(NamedTuple):
    """Start and end, in seconds of the monotonic clock, which is one for all processes of a host."""

    start_s: float
    end_s: float

    @classmethod
    def soon(cls, seconds: float) -> "Window":
        """A window of so many seconds, which opens after the warm-up."""
        start_s = time.monotonic() + WARM_UP_S
        return cls(start_s, start_s + seconds)


def counted(step: Callable[[], object], window: Window) -> int:
    """Step from now until the window has closed; how many steps were completed within it."""
    count = 0
    while True:
        step()
        now = time.monotonic()
        if now >= window.end_s:
            return count
        count += now >= window.start_s

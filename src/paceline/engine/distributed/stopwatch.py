"""Training time, on a clock that all ranks share."""

import contextlib
import time
from collections.abc import Iterator

from paceline.core.types import Nanoseconds, Seconds


class Stopwatch:
    """Runs from the moment when all ranks are ready, but not while the run waits for a score.

    Args:
        ahead_ns: how far rank 0's clock is ahead of this host's.
    """

    def __init__(self, ahead_ns: Nanoseconds) -> None:
        self.ahead_ns = ahead_ns
        self.began_ns: Nanoseconds = time.monotonic_ns() + ahead_ns
        """By rank 0's clock."""
        self._paused_ns: Nanoseconds = 0

    def start(self, began_ns: Nanoseconds) -> None:
        """It is said when the run began."""
        self.began_ns = began_ns

    def now_ns(self) -> Nanoseconds:
        """Training time so far."""
        return time.monotonic_ns() + self.ahead_ns - self.began_ns - self._paused_ns

    def local_ns(self, training_ns: Nanoseconds) -> Nanoseconds:
        """What this host's clock showed at a training time."""
        return training_ns + self.began_ns + self._paused_ns - self.ahead_ns

    def now(self) -> Seconds:
        """As :meth:`now_ns`, in seconds."""
        return self.now_ns() * 1e-9

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stand still."""
        since = time.monotonic_ns()
        try:
            yield
        finally:
            self._paused_ns += time.monotonic_ns() - since

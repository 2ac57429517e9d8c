"""One replica's place in virtual time."""

from paceline.core.types import Seconds
from paceline.engine.virtual.attempts import Attempt


class Lane:
    """What one replica is at, and what it has done."""

    def __init__(self) -> None:
        self.clock = self.micro_clock = 0
        self.micro_steps = 0
        """Of attempts that have ended."""
        self.busy_s: Seconds = 0.0
        self.attempt: Attempt | None = None
        self.arrived_s: Seconds | None = None
        self._work = (0.0, 0.0)

    def begin(self, attempt: Attempt, busy_s: Seconds, from_s: Seconds, end_s: Seconds) -> None:
        """An attempt has begun, which is at work for ``busy_s`` from ``from_s`` on, as far as the run lasts."""
        self.clock, self.micro_clock = attempt.clock, self.micro_clock + attempt.micro_steps
        self.attempt = attempt
        self._work = from_s, from_s + busy_s
        self.busy_s += max(0.0, min(self._work[1], end_s) - from_s)

    def arrive(self, attempt: Attempt) -> None:
        """Its Δ has reached the server's door."""
        self.attempt, self.arrived_s = None, attempt.arrives_s
        self.micro_steps += attempt.micro_steps

    def stop(self, attempt: Attempt, at_s: Seconds, end_s: Seconds) -> None:
        """It was cancelled: what it would still have worked is taken back."""
        from_s, to_s = self._work
        self.busy_s -= max(0.0, min(to_s, end_s) - max(from_s, at_s))
        self.attempt, self.arrived_s = None, at_s
        self.micro_steps += attempt.micro_steps

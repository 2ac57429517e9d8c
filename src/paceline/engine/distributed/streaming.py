"""The station of a replica whose weights move within a stream: it goes on, and hears later what came of its steps."""

import time

from paceline.core.types import Clock, Seconds
from paceline.engine.allowance import Allowance
from paceline.engine.distributed.rows import Kind, Row
from paceline.engine.distributed.station import Surroundings, excuse
from paceline.engine.distributed.streamed import StreamedShare
from paceline.engine.nonfinite import not_finite
from paceline.replica.base import Measured
from paceline.replica.state import State


class StreamedStation:
    """A and F, as far as there is anything to ask them.

    Args:
        around: what there is.
        share: of this rank; its replica has the weights.
        ahead: counts the steps as they begin, as the run's own allowance does when it hears of them.
        timeout_s: a pause that is not much shorter is announced, so that nobody takes it for a hang.
    """

    def __init__(self, around: Surroundings, share: StreamedShare, ahead: Allowance, timeout_s: Seconds) -> None:
        self._around, self._share, self._ahead, self._timeout_s = around, share, ahead, timeout_s
        self._course, self._rows, self._replica = around.course, share.rows, share.place.replica
        self._granted = 0
        self.attempt: Clock = 0
        """Which step this replica is at."""

    def going(self) -> bool:
        """Whether it is to go on, by what is known so far: on all ranks the same."""
        if not self._granted:
            self._granted = self._ahead.grant(self._replica)
            self.attempt += bool(self._granted)
        return self._granted > 0 and not self._course.over

    def opens(self) -> bool:
        return True

    def pull(self) -> State:
        return self._around.state

    def closes(self) -> bool:
        self._granted = 0
        return True

    def slot(self) -> State:
        """For the running buffers."""
        return self._around.state

    def push(self, measured: Measured) -> None:
        self._say(Kind.delta, measured)
        while self._rows.due:
            self._hear()

    def leave(self) -> None:
        """The loop has ended: do what is left of the stream, and hear what is still to be heard."""
        if not self._share.drain():
            raise not_finite(float("nan"), self._replica, self.attempt)
        while self._rows.open:
            self._hear()
        while not self._course.over:
            self._say(Kind.farewell, Measured(0.0, 0, True))
            self._hear()

    def called_off(self) -> bool:
        """Never: a step that has begun is made."""
        return False

    def confirm(self) -> int:
        raise AssertionError("no attempt is called off")

    def pause(self, seconds: Seconds) -> None:
        """Be slow for so long, or until told to end."""
        excuse(self._around, seconds, self._timeout_s)
        self._around.woken.wait(seconds)

    def _say(self, kind: Kind, measured: Measured) -> None:
        around = self._around
        now = around.stopwatch.now_ns()
        row = Row(kind, measured.samples, measured.finite, around.asked_to_end(), measured.loss, now)
        self._rows.begin(row, self.attempt)

    def _hear(self) -> None:
        around, began = self._around, time.monotonic_ns()
        rows = self._rows.take()
        around.gauge.waited(began, self.attempt)
        self._course.take(rows)
        around.after()

"""A replica's side of the server: what it was sent, what it tells, and whether it is called off."""

import math
import threading
import time
from collections.abc import Callable
from typing import Any

from paceline.core.types import Clock, Seconds
from paceline.engine.figures import Notes
from paceline.engine.ray.freight import Bytes, arrays_of, state_of
from paceline.engine.ray.messages import Order, Post, Reply, Report
from paceline.replica.base import Measured
from paceline.replica.state import Layout, State


class Switch:
    """What another thread tells a replica while it computes.

    Args:
        run: of which run.
    """

    def __init__(self, run: int) -> None:
        self._run, self._changed = run, threading.Condition()
        self._cancelled: float = 0

    def cancel(self, run: int, attempt: float) -> None:
        """An attempt is called off."""
        if run == self._run:
            with self._changed:
                self._cancelled = attempt
                self._changed.notify_all()

    def end(self, run: int) -> None:
        """Training has ended."""
        self.cancel(run, math.inf)

    def off(self, attempt: Clock) -> bool:
        """Whether an attempt is called off."""
        return self._cancelled >= attempt

    def pause(self, seconds: Seconds, attempt: Clock) -> None:
        """Wait so long, or until the attempt is called off."""
        with self._changed:
            self._changed.wait_for(lambda: self.off(attempt), seconds)


class RayStation:
    """The server, by way of calls to its actor.

    Args:
        ask: calls a method of the server; the answer has to be waited for by ``wait``.
        wait: an answer -> what it is.
        post: which replica this is, and where it begins.
        layout: of A.
        switch: says what is called off.
        notes: told with each Δ.
        timeout_s: how long the server hears nothing before it gives up.
    """

    def __init__(
        self,
        ask: Callable[..., Any],
        wait: Callable[[Any], Reply],
        post: Post,
        layout: Layout,
        switch: Switch,
        notes: Notes,
        timeout_s: Seconds,
    ) -> None:
        self._ask, self._wait, self._replica, self._layout = ask, wait, post.replica, layout
        self._switch, self._notes, self._timeout_s = switch, notes, timeout_s
        self._out = layout.new()
        self._read: State | None = None
        self._answer: Any = None
        self._order: Order | None = Order(post.attempt, 0, 0)
        self._made = 0
        self._under_way = False
        self._heard_of = 0.0
        self.attempt: Clock = post.attempt
        """Which Δ this replica is at."""

    def going(self) -> bool:
        """Wait until the server answers; whether it is to go on."""
        if self._under_way or self._order is None:
            return self._order is not None
        if self._answer is None:
            self._answer = self._ask("first", self._replica)
        self._read = None  # let go of it before the next one comes
        self._order, arrays = self._wait(self._answer)
        if self._order is None:
            return False
        self._read = state_of(self._layout, arrays)
        self.attempt = self._order.attempt
        self._made, self._under_way, self._heard_of = 0, True, time.monotonic()
        return True

    def opens(self) -> bool:
        return self._made == 0

    def pull(self) -> State:
        assert self._read is not None, "nothing was sent"
        return self._read

    def closes(self) -> bool:
        self._made += 1
        assert self._order is not None
        if self._made < self._order.micro_steps:
            return False
        self._made = 0
        return True

    def slot(self) -> State:
        return self._out

    def push(self, measured: Measured) -> None:
        self._report(measured, arrays_of(self._out))

    def called_off(self) -> bool:
        """Whether the attempt under way was cancelled, or the run has ended."""
        return self._switch.off(self.attempt)

    def confirm(self) -> int:
        """The attempt that was called off has stopped; how many micro-steps after this one it leaves undone."""
        assert self._order is not None
        undone = max(0, self._order.micro_steps - self._made - 1)
        self._made = 0
        self._report(Measured(math.nan, 0, True), [])
        return undone

    def pause(self, seconds: Seconds) -> None:
        """Be slow for so long, or until called off."""
        until = time.monotonic() + seconds
        if until - self._heard_of > self._timeout_s / 4:
            self._heard_of = until
            self._ask("excuse", self._replica, seconds)
        self._switch.pause(seconds, self.attempt)

    def _report(self, measured: Measured, arrays: list[Bytes]) -> None:
        assert self._order is not None
        self._under_way = False
        report = Report(
            self._replica,
            self.attempt,
            self._order.version,
            measured.samples,
            measured.finite,
            measured.loss,
            self._notes.seen,
        )
        self._answer = self._ask("push", report, *arrays)

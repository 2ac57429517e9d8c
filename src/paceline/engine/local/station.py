"""A replica's side of the board: its slots, its orders, its reports."""

import math
import time

from paceline.comm.bell import Bell
from paceline.core.types import Clock, ReplicaId
from paceline.engine.local.board import ARRIVED, CANCELLED, END, Board, Report
from paceline.replica.base import Measured
from paceline.replica.state import State


class Cancelled(Exception):  # noqa: N818 (not an error)
    """The attempt under way was called off."""


class Station:
    """The server, as this replica sees it.

    Args:
        board: of the run.
        replica: whose side.
        mine: rung when there is an order or a cancellation.
        coordinator: to ring when there is a report.
        slots: Δ slots of each replica; 0: it writes A in place.
    """

    def __init__(self, board: Board, replica: ReplicaId, mine: Bell, coordinator: Bell, slots: int) -> None:
        self._board, self._replica, self._mine, self._coordinator = board, replica, mine, coordinator
        self._read = board.read_slot(replica) if slots else board.state
        self._deltas = [board.delta_slot(replica, slot) for slot in range(slots)]
        self._order = board.order(replica)
        self._made = 0

    @property
    def attempt(self) -> Clock:
        """Which Δ this replica is at."""
        return self._order.attempt

    def going(self) -> bool:
        """Wait for an order after the last report; whether it is to go on."""
        board, replica = self._board, self._replica
        while True:
            order = board.order(replica)
            if order.kind == END:
                return False
            if order.attempt > board.told(replica):
                if order.attempt != self._order.attempt:
                    self._order, self._made = order, 0
                return True
            self._mine.wait(None)
            self._mine.clear()

    def opens(self) -> bool:
        return self._made == 0

    def pull(self) -> State:
        return self._read

    def closes(self) -> bool:
        self._made += 1
        if self._made < self._order.micro_steps:
            return False
        self._made = 0
        return True

    def slot(self) -> State:
        return self._deltas[self._order.slot] if self._deltas else self._read

    def push(self, measured: Measured) -> None:
        self._report(ARRIVED, measured)

    def called_off(self) -> bool:
        """Whether the attempt under way was cancelled, or the run has ended."""
        cancelled = self._board.cancelled(self._replica)
        return cancelled >= self._order.attempt or self._board.order(self._replica).kind == END

    def confirm(self) -> int:
        """The attempt that was called off has stopped; how many micro-steps after this one it leaves undone."""
        undone = max(0, self._order.micro_steps - self._made - 1)
        self._made = 0
        self._report(CANCELLED, Measured(math.nan, 0, True))
        return undone

    def pause(self, seconds: float) -> None:
        """Be slow for so long, or until called off."""
        until = time.monotonic() + seconds
        self._board.excuse(self._replica, int(until * 1e9))
        while not self.called_off() and (left := until - time.monotonic()) > 0:
            self._mine.wait(left)
            self._mine.clear()

    def _report(self, ending: int, measured: Measured) -> None:
        order = self._order
        self._board.tell(
            self._replica,
            Report(
                ending,
                order.attempt,
                order.version,
                order.slot,
                measured.samples,
                measured.finite,
                measured.loss,
                time.monotonic_ns(),
            ),
        )
        self._coordinator.ring()

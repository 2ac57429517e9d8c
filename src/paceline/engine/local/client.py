"""A replica's side of the board: its orders, its reports, and what it does while it waits."""

import math
import time

from paceline.comm.wakeup import Wakeup
from paceline.core.types import Clock, Nanoseconds, ReplicaId
from paceline.engine.local.arena import ParameterArena
from paceline.engine.local.control_block import ARRIVED, CANCELLED, Completion, ControlBlock, Grant
from paceline.engine.local.parallel_update import SliceOptimizer, UpdateHelper
from paceline.replica.base import Measured
from paceline.replica.flat_state import FlatState


class SharedMemoryClient:
    """The server, by way of the board.

    Args:
        store: the run's vectors.
        board: its words.
        replica: whose side.
        mine: rung when there is something on the board for this replica.
        main: to ring when there is something on the board for main.
    """

    def __init__(
        self, store: ParameterArena, board: ControlBlock, replica: ReplicaId, mine: Wakeup, main: Wakeup
    ) -> None:
        self._store, self._board, self._replica, self._mine, self._main = store, board, replica, mine, main
        self._in_place = store.plan.slots == 0
        self._helper = UpdateHelper(board, SliceOptimizer(store), replica, main.notify)
        self._order = Grant(0, 0, 0, 0, 0, 0, 0, 0)
        self._made = 0
        self._under_way = False
        self._version = 0
        self._began_ns: Nanoseconds = 0
        self._reported_ns: Nanoseconds = 0
        self.attempt: Clock = 0
        """Which Δ this replica is at."""

    def wait_for_grant(self) -> bool:
        """Wait for an order after the last report, and help meanwhile; whether it is to go on."""
        while not self._board.ended(self._replica):
            if self._under_way or self._begun():
                return True
            if self._helper.asked():
                self._helper.help()
            elif not self._mine.spin(self._news):
                self._mine.sleep(self._news, self._mine.event.wait, math.inf)
        return False

    @property
    def order(self) -> Grant:
        """What this replica was told last."""
        return self._order

    def begins_delta(self) -> bool:
        return self._made == 0

    def pull(self) -> FlatState:
        return self._store.version(0) if self._in_place else self._store.readonly_version(self._order.place)

    def ends_delta(self) -> bool:
        self._made += 1
        if self._made < self._order.micro_steps:
            return False
        self._made = 0
        return True

    def delta_buffer(self) -> FlatState:
        return self.pull() if self._in_place else self._store.delta(self._replica, self._order.slot)

    def push(self, measured: Measured) -> None:
        self._report(ARRIVED, measured)

    def cancelled(self) -> bool:
        """Whether the attempt under way was cancelled, or the run has ended."""
        return self._board.cancelled(self._replica) >= self.attempt or self._board.ended(self._replica)

    def ack_cancel(self) -> int:
        """The attempt that was called off has stopped; how many micro-steps after this one it leaves undone."""
        undone = max(0, self._order.micro_steps - self._made - 1)
        self._made = 0
        self._report(CANCELLED, Measured(math.nan, 0, True))
        return undone

    def pause(self, seconds: float) -> None:
        """Be slow for so long, or until called off."""
        until = time.monotonic() + seconds
        self._board.set_pause(self._replica, int(until * 1e9))
        while not self.cancelled() and (left := until - time.monotonic()) > 0:
            self._mine.sleep(self.cancelled, self._mine.event.wait, left)

    def _begun(self) -> bool:
        """Begin the next attempt, if there is an order for it."""
        if self.attempt >= self._board.last_allowed(self._replica):
            return False
        self._order = order = self._board.read_grant(self._replica)
        self._made, self._under_way = 0, True
        self._mine.expect(order.at_ns - self._reported_ns, self._reported_ns - self._began_ns)
        self._began_ns = time.monotonic_ns()
        self.attempt += 1
        # Who writes A in place reads it as all that were told of have left it.
        self._version = self._board.step_count() if self._in_place else order.version
        return True

    def _news(self) -> bool:
        board = self._board
        return board.last_allowed(self._replica) > self.attempt or board.ended(self._replica) or self._helper.asked()

    def _report(self, ending: int, measured: Measured) -> None:
        order, attempt = self._order, self.attempt
        self._under_way, self._reported_ns = False, time.monotonic_ns()
        self._board.write_completion(
            self._replica,
            Completion(
                ending,
                attempt,
                self._version,
                order.slot,
                measured.samples,
                measured.finite,
                measured.loss,
                self._reported_ns,
                *(measured.micro or ()),
            ),
        )
        # One that may be ahead rings when half of that is used up: main then lets it go further before it has to wait.
        if 2 * attempt >= self._board.granted(self._replica) + self._board.last_allowed(self._replica):
            self._main.notify()

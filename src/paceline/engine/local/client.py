"""The parameter client of a worker process over the control block; it computes slices of updates while idle.

::

    worker   wait for a grant ... map A read-only, compute, write the Δ buffer, publish a completion ... wait
"""

import math
import time

from paceline.comm.wakeup import Wakeup
from paceline.core.types import Clock, Nanoseconds, ReplicaId, Seconds
from paceline.engine.local.arena import ParameterArena
from paceline.engine.local.control_block import ARRIVED, CANCELLED, Completion, ControlBlock, Grant
from paceline.engine.local.parallel_update import SliceOptimizer
from paceline.replica.base import Measured
from paceline.replica.flat_state import FlatState


class SharedMemoryClient:
    """The client of one replica.

    Args:
        arena: of the run.
        control: its control block.
        replica: of this worker.
        wakeup: notified when there is a grant or a slice for this replica.
        main: to notify when there is a completion or a finished slice for main.
    """

    def __init__(
        self, arena: ParameterArena, control: ControlBlock, replica: ReplicaId, wakeup: Wakeup, main: Wakeup
    ) -> None:
        self._arena, self._control, self._replica, self._wakeup, self._main = arena, control, replica, wakeup, main
        self._in_place = arena.layout.slots == 0
        self._slices = SliceOptimizer(arena)
        self.grant = Grant(0, 0, 0, 0, 0, 0, 0, 0)
        """The newest grant."""
        self.attempt: Clock = 0
        """The Δ that this replica computes, counted from 1."""
        self._micro_steps = 0
        self._under_way = False
        self._version = 0
        self._began_ns: Nanoseconds = 0
        self._completed_ns: Nanoseconds = 0

    def wait_for_grant(self) -> bool:
        """Wait for a grant after the last completion and return whether to go on; computes slices meanwhile."""
        control, replica = self._control, self._replica
        while not control.ended(replica):
            if self._under_way:
                return True
            if self.attempt < control.last_allowed(replica):
                self._begin()
                return True
            part = control.pending_slice(replica)
            if part is not None:
                control.finish_slice(replica, part, self._slices.step(control.read_task(), part))
                self._main.notify()
            elif not self._wakeup.spin(self._has_news):
                self._wakeup.sleep(self._has_news, self._wakeup.event.wait, math.inf)
        return False

    def begins_delta(self) -> bool:
        return self._micro_steps == 0

    def pull(self) -> FlatState:
        if self._in_place:
            return self._arena.version(0)
        state = self._arena.mapped.get(f"readonly {self.grant.buffer}")
        return state if state is not None else self._arena.readonly_version(self.grant.buffer)

    def ends_delta(self) -> bool:
        self._micro_steps += 1
        if self._micro_steps < self.grant.micro_steps:
            return False
        self._micro_steps = 0
        return True

    def delta_buffer(self) -> FlatState:
        if self._in_place:
            return self._arena.version(0)
        state = self._arena.mapped.get(f"delta {self._replica} {self.grant.slot}")
        return state if state is not None else self._arena.delta(self._replica, self.grant.slot)

    def push(self, measured: Measured) -> None:
        self._complete(ARRIVED, measured)

    def cancelled(self) -> bool:
        """Return whether the attempt under way was cancelled, or the run has ended."""
        return self._control.cancelled[self._replica] >= self.attempt or self._control.ended(self._replica)

    def ack_cancel(self) -> int:
        """Report that the cancelled attempt has stopped; returns how many micro-steps after this one it skips."""
        skipped = max(0, self.grant.micro_steps - self._micro_steps - 1)
        self._micro_steps = 0
        self._complete(CANCELLED, Measured(math.nan, 0, True))
        return skipped

    def pause(self, seconds: Seconds) -> None:
        """Sleep for a delay of the job, or until cancelled."""
        until = time.monotonic() + seconds
        self._control.paused_until_ns[self._replica] = int(until * 1e9)
        while not self.cancelled() and (left := until - time.monotonic()) > 0:
            self._wakeup.sleep(self.cancelled, self._wakeup.event.wait, left)

    def _begin(self) -> None:
        """Begin the next attempt, which is granted."""
        self.grant = grant = self._control.read_grant(self._replica)
        self._micro_steps, self._under_way = 0, True
        # How long main took to answer and how long a step takes: the wakeup spins before it sleeps if that pays.
        self._wakeup.expect(grant.at_ns - self._completed_ns, self._completed_ns - self._began_ns)
        self._began_ns = time.monotonic_ns()
        self.attempt += 1
        # A replica that writes A in place reads it with all completed steps of other replicas in it.
        self._version = self._control.step_count() if self._in_place else grant.version

    def _has_news(self) -> bool:
        control, replica = self._control, self._replica
        return (
            control.last_allowed(replica) > self.attempt
            or control.ended(replica)
            or control.pending_slice(replica) is not None
        )

    def _complete(self, ending: int, measured: Measured) -> None:
        """Publish the end of the attempt, after Δ was written: main reads the buffer once it sees the completion."""
        attempt, slot, control = self.attempt, self.grant.slot, self._control
        self._under_way, self._completed_ns = False, time.monotonic_ns()
        facts = measured.samples, measured.finite, measured.loss, self._completed_ns
        completion = Completion(ending, attempt, self._version, slot, *facts, *(measured.micro or ()))
        control.write_completion(self._replica, completion)
        # With a lead, main is woken when half of it is used up, and grants more before this replica has to wait.
        if 2 * attempt >= control.granted(self._replica) + control.last_allowed(self._replica):
            self._main.notify()

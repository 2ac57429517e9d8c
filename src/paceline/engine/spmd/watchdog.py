"""The watchdog of one rank's collectives, which waits for them and finds out why one is not completed.

It waits in slices of 50 ms, and checks between slices for dead, failed or late ranks::

    collective under way -- 50 ms -- check: a failure in the store? a process of this host gone? -- 50 ms -- check ...
                                       |               |         timeout_s: ping all ranks, name those without an answer
                                       +-- raise it    +-- report the failure: all ranks raise the same error

The first failure that reaches the store wins. A rank that has failed reports its error with its traceback.
"""

import os
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from paceline.core.errors import PacelineError, WaitTimeoutError, WorkerError
from paceline.core.types import Seconds
from paceline.device import CPU
from paceline.engine.spmd.launch_env import kind_of
from paceline.engine.spmd.membership import RankMembership, RanksLost
from paceline.engine.spmd.rank_registry import RankRegistry, StoreSignals

# Time between two checks; a collective that ends sooner costs none.
SLICE = timedelta(milliseconds=50)

# Time between two checks of the store: each is a message to another process.
STORE_CHECK_S: Seconds = 0.25

# Longest wait for other ranks to report why a connection broke, or to answer a ping.
GRACE_S: Seconds = 3.0


@dataclass
class CollectiveWatchdog:
    """Waits for the collectives of one rank, each for as long as the timeout; it checks the store now and then.

    Args:
        membership: of a run that survives deaths, which are then no failures; None: the first death ends the run.
    """

    _signals: StoreSignals
    _registry: RankRegistry
    _timeout_s: Seconds
    _backend: str
    membership: RankMembership | None = None
    suspect_after_s: Seconds | None = None
    """Longest wait for a collective before ranks are suspected; None: the timeout."""
    _checked_s: Seconds = 0.0

    @property
    def _polls(self) -> bool:
        """Whether a wait for the backend can't be broken off and made again, as of most backends for accelerators."""
        return kind_of(self._backend) != CPU.type

    def wait(self, work: Any, description: str) -> None:
        """Wait for a collective that has been started.

        Args:
            work: torch's.
            description: of the collective, in words that follow "waited for".

        Raises:
            WorkerError: a rank has failed or died.
            WaitTimeoutError: a rank did not come in time.
            RanksLost: in a run that survives deaths, a rank has died or is suspected.
        """
        began = time.monotonic()
        while True:
            try:
                if _wait_by_polling(work) if self._polls else _wait_slice(work):
                    return
            except RuntimeError as error:
                if self.membership is not None:
                    self._raise_if_lost(self.membership, error, description, time.monotonic() - began)
                # Backend shm's own words say less than the reason, and are no second failure.
                raise self._reason(error, description) from (None if isinstance(error, PacelineError) else error)
            self._raise_if_peer_died(description, time.monotonic() - began)
            now = time.monotonic()
            if now - self._checked_s < STORE_CHECK_S:
                continue
            self._checked_s = now
            failure = self._check_store(description)
            if failure is not None:
                raise failure
            if self.membership is not None:
                suspects = now - began > (self.suspect_after_s or self._timeout_s) and not self._extended()
                if suspects or self._abandoned(self.membership, description):
                    raise RanksLost(f"{description} did not complete", now - began)
            elif now - began > self._timeout_s and not self._extended():
                absent = self._signals.unanswered_ping(GRACE_S)
                present = ", ".join(f"rank {p.rank}" for p in self._registry.peers if p.rank not in absent)
                late = ", ".join(str(self._registry.peers[r]) for r in absent) or "no rank in particular"
                raise self._agreed(
                    WaitTimeoutError(
                        f"{present} waited {self._timeout_s:g} s for {late} in {description}; write a larger "
                        "timeout_s= if a step takes so long"
                    )
                )

    def _extended(self) -> bool:
        """Return whether a rank has announced that it is slow on purpose, and is so no longer than it said."""
        extended_ns = self._signals.extended_until_ns() + int(self._timeout_s * 1e9)
        return time.monotonic_ns() + self._registry.clock_offset_ns <= extended_ns

    def _raise_if_peer_died(self, description: str, waited_s: Seconds = 0.0) -> None:
        if self.membership is not None:
            if lost := self.membership.lost_now():
                raise RanksLost(f"ranks {sorted(lost)} ended in {description}", waited_s)
            return
        dead = self._registry.first_exited()
        if dead is not None:
            raise self._agreed(self._registry.ended_while(dead, f"waited for {description}"))

    def _raise_if_lost(
        self, membership: RankMembership, error: RuntimeError, description: str, waited_s: Seconds
    ) -> None:
        """Raise RanksLost for a collective that broke, unless it did for what this process or all ranks did wrong."""
        ours = isinstance(error, PacelineError)
        if not ours or membership.lost_now() or self._abandoned(membership, description):
            raise RanksLost(f"{description} broke: {error}", waited_s) from error

    def _abandoned(self, membership: RankMembership, description: str) -> bool:
        """Return whether another rank has given this generation up."""
        try:
            return membership.abandoned
        except RuntimeError as error:
            raise self._store_gone(error, description) from error

    def _agreed(self, error: PacelineError) -> PacelineError:
        """Return the failure that is in the store, or put this one there; the store may be gone with its process."""
        try:
            return self._signals.first_failure() or self._signals.report_failure(error)
        except RuntimeError:
            return error

    def _check_store(self, description: str) -> PacelineError | None:
        """Answer a ping, and return the failure that another rank has reported."""
        try:
            self._signals.answer_ping()
            return self._signals.first_failure()
        except RuntimeError as error:
            return self._store_gone(error, description)

    def _store_gone(self, error: RuntimeError, description: str) -> WorkerError:
        return WorkerError(
            f"the job's store, which rank 0 or torchrun keeps, is gone or cut off while {self._registry.own} waited "
            f"for {description}: {error}"
        )

    def _reason(self, error: RuntimeError, description: str) -> PacelineError:
        """Find out why a collective broke: a reported failure, a dead process, or a rank that answers no ping."""
        absent: list[int] = []
        try:
            if isinstance(error, PacelineError):  # backend shm has found the reason itself
                self._raise_if_peer_died(description)
                return self._check_store(description) or error
            deadline = time.monotonic() + GRACE_S
            while time.monotonic() < deadline:
                failure = self._signals.first_failure()
                if failure is not None:
                    return failure
                self._raise_if_peer_died(description)
                time.sleep(SLICE.total_seconds())  # the store's own wait would print each time that it times out
            absent = self._signals.unanswered_ping(GRACE_S)
        except PacelineError as reason:
            return reason
        except RuntimeError:  # the store is gone
            pass
        lost = ", ".join(str(self._registry.peers[rank]) for rank in absent) or "a rank"
        return self._agreed(
            WorkerError(f"{lost} was lost while {self._registry.own} waited for {description}: {error}")
        )


def _wait_slice(work: Any) -> bool:
    """Wait for one slice; safe on all backends but NCCL, since a wait that has timed out may be made again."""
    try:
        work.wait(SLICE)
        return True
    except RuntimeError:
        if not work.is_completed():
            return False
    work.wait()  # raises the error, unless it ended just then
    return True


def _wait_by_polling(work: Any) -> bool:
    """Poll for one slice: NCCL aborts a collective whose wait has timed out, and others may."""
    deadline = time.monotonic() + SLICE.total_seconds()
    while time.monotonic() < deadline and not work.is_completed():
        os.sched_yield()
    if not work.is_completed():
        return False
    work.wait()
    return True

"""Waits for collectives, and learns meanwhile who has died, failed or does not come.

::

    collective under way -- 50 ms -- look: a verdict? a process of this host gone? -- 50 ms -- look ...
                                       |               |                     timeout_s: call the roll, name the absent
                                       +-- raise it    +-- give the verdict: all ranks raise the same error

The first verdict wins. A rank that has failed gives it with its traceback.
"""

import os
import time
from datetime import timedelta
from typing import Any

from paceline.core.errors import PacelineError, WaitTimeoutError, WorkerError
from paceline.core.types import Seconds
from paceline.engine.team.notices import Notices
from paceline.engine.team.peers import Peers

SLICE = timedelta(milliseconds=50)
"""How long a wait lasts between two looks; a collective that is over sooner costs none."""

GLANCE_S: Seconds = 0.25
"""How often the job's store is asked: that is a message to another process."""

GRACE_S: Seconds = 3.0
"""How long others may take to say why a connection broke, or that they are there."""


class Lookout:
    """One rank's.

    Args:
        notices: of the run.
        peers: of the run.
        timeout_s: the longest wait.
        backend: whose work is waited for.
    """

    def __init__(self, notices: Notices, peers: Peers, timeout_s: Seconds, backend: str) -> None:
        self._notices, self._peers, self._timeout_s, self._backend = notices, peers, timeout_s, backend
        self._glanced_s = 0.0

    def wait(self, work: Any, what: str) -> None:
        """Wait for a collective that has been begun.

        Args:
            work: torch's.
            what: it is, in words that follow "waited for".

        Raises:
            WorkerError: a rank has failed or died.
            WaitTimeoutError: a rank did not come in time.
        """
        began = time.monotonic()
        while not self._over(work, what):
            self._look(what, time.monotonic() - began)

    def _over(self, work: Any, what: str) -> bool:
        try:
            return _by_asking(work) if self._backend == "nccl" else _in_slices(work)
        except RuntimeError as error:
            raise self._why(error, what) from error

    def _look(self, what: str, waited_s: Seconds) -> None:
        self._miss_the_dead(what)
        if time.monotonic() - self._glanced_s < GLANCE_S:
            return
        self._glanced_s = time.monotonic()
        verdict = self._asked(what)
        if verdict is not None:
            raise verdict
        if waited_s > self._timeout_s and time.monotonic_ns() + self._peers.ahead_ns > self._excused_ns():
            raise self._late(what)

    def _miss_the_dead(self, what: str) -> None:
        dead = self._peers.gone()
        if dead is not None:
            raise self._judged(WorkerError(f"{dead} ended while {self._peers.me} waited for {what}"))

    def _judged(self, error: PacelineError) -> PacelineError:
        """What has been said already, or this; also where the store has gone with who kept it."""
        try:
            return self._notices.verdict() or self._notices.judge(error)
        except RuntimeError:
            return error

    def _asked(self, what: str) -> PacelineError | None:
        """What the others have said meanwhile."""
        try:
            if self._notices.roll_called():
                self._notices.here()
            return self._notices.verdict()
        except RuntimeError as error:
            return WorkerError(
                f"the job's store, which rank 0 or torchrun keeps, is gone while {self._peers.me} waited for {what}: "
                f"{error}"
            )

    def _why(self, error: RuntimeError, what: str) -> PacelineError:
        """Why a collective broke: what somebody says, who has died, or who does not answer."""
        try:
            if isinstance(error, PacelineError):  # shared memory has seen it first
                self._miss_the_dead(what)
                return self._asked(what) or error
            said = self._heard_of(what)
            absent = [] if said is not None else self._absent()
        except PacelineError as known:
            return known
        except RuntimeError:
            said, absent = None, []
        who = ", ".join(str(self._peers.all[rank]) for rank in absent) or "a rank"
        return said or self._judged(WorkerError(f"{who} was lost while {self._peers.me} waited for {what}: {error}"))

    def _heard_of(self, what: str) -> PacelineError | None:
        """What is said, or seen of a process of this host, within the time of grace."""
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline:
            said = self._notices.verdict()
            if said is not None:
                return said
            self._miss_the_dead(what)
            time.sleep(SLICE.total_seconds())  # the store's own wait would print each time that it ends in vain
        return None

    def _late(self, what: str) -> PacelineError:
        absent = self._absent()
        present = ", ".join(f"rank {p.rank}" for p in self._peers.all if p.rank not in absent)
        late = ", ".join(str(self._peers.all[rank]) for rank in absent) or "nobody in particular"
        return self._judged(
            WaitTimeoutError(
                f"{present} waited {self._timeout_s:g} s for {late} in {what}; write a larger timeout_s= if a step "
                "takes so long"
            )
        )

    def _absent(self) -> list[int]:
        self._notices.call_roll()
        self._notices.here()
        return self._notices.absent(GRACE_S)

    def _excused_ns(self) -> int:
        return self._notices.excused_ns() + int(self._timeout_s * 1e9)


def _in_slices(work: Any) -> bool:
    """Where a wait that has timed out may be made again, as all do but NCCL."""
    try:
        work.wait(SLICE)
        return True
    except RuntimeError:
        if not work.is_completed():
            return False
    work.wait()  # raises what is wrong, unless it was over just then
    return True


def _by_asking(work: Any) -> bool:
    """NCCL's: it gives up a collective whose wait has timed out."""
    deadline = time.monotonic() + SLICE.total_seconds()
    while time.monotonic() < deadline and not work.is_completed():
        os.sched_yield()
    if not work.is_completed():
        return False
    work.wait()
    return True

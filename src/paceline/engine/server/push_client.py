"""The parameter client of one replica that pushes to servers.

With ``pull_ahead`` a replica does not wait for the answer to its Δ before it computes the next one::

    replica     Δ1 of A0 | Δ2 of A0 ....... | Δ3 of A1 ....... |        A1: the answer to Δ1, with the grant of Δ2
    exchange             | Δ1 ----> A1      | Δ2 ----> A2      |

It begins Δ2 on the batches that follow its own in their stream, which is what it is granted unless others have died or
the budget ends. If it is not, its work was in vain, and it computes Δ2 on the batches of the grant.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import final

from paceline.comm.shared_memory import ALIGNMENT
from paceline.core.data_order import BatchRange
from paceline.core.types import Clock, Nanoseconds, Seconds, Version
from paceline.engine.client_worker import GrantedClient
from paceline.engine.own_states import OwnState
from paceline.engine.server import messages
from paceline.engine.server.delta_codec import DeltaCodec
from paceline.engine.server.messages import ReplicaAssignment
from paceline.engine.server.push_buffers import PushBuffers
from paceline.engine.server.server_link import PendingCall, PendingPush, ServerLinks
from paceline.engine.worker_metrics import InMemorySink
from paceline.replica.base import Measured
from paceline.replica.flat_slices import FlatSlice
from paceline.replica.flat_state import FlatState


class CancelFlag:
    """The newest cancelled attempt of a replica, set by another thread while it computes.

    Args:
        run: number of the run; calls for another run are ignored.
    """

    def __init__(self, run: int) -> None:
        self._run, self._changed = run, threading.Condition()
        self.newest: float = 0

    def cancel(self, run: int, attempt: float) -> None:
        """Cancel an attempt; infinity ends training."""
        if run == self._run:
            with self._changed:
                self.newest = attempt
                self._changed.notify_all()

    def wait(self, attempt: Clock, timeout_s: Seconds) -> None:
        """Wait until the attempt is cancelled, or for the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self.newest >= attempt, timeout_s)


@final
class PushClient(GrantedClient):
    """The client of one replica: each push is answered with the next grant and its A.

    Args:
        links: to the servers.
        slices: of A, one for each server.
        codecs: of what is pushed, one for each server; None: it is not compressed.
        assignment: of this replica.
        attempt: the newest that is complete; 0: there was none.
        buffers: memory of Δ and A, and of what the replica keeps.
        cancel: flag of this replica.
        metrics: sent with each Δ.
        timeout_s: of the server's wait for this replica.
        pull_ahead: whether the next Δ is computed while this one is sent.
    """

    def __init__(
        self,
        links: ServerLinks,
        slices: Sequence[FlatSlice],
        codecs: Sequence[DeltaCodec | None],
        assignment: ReplicaAssignment,
        attempt: Clock,
        buffers: PushBuffers,
        cancel: CancelFlag,
        metrics: InMemorySink,
        timeout_s: Seconds,
        *,
        pull_ahead: bool = False,
    ) -> None:
        super().__init__(attempt)
        self._links, self._slices, self._codecs = links, slices, codecs
        self._link, self._buffers = links.first, buffers
        self._replica = assignment.replica, assignment.incarnation
        self._cancel, self._metrics, self._timeout_s = cancel, metrics, timeout_s
        self._keep: Callable[[], OwnState | None] = lambda: None
        """Returns what the replica keeps, where the server is told of it."""
        self._state: FlatState | None = None
        self._version: Version = 0
        self._pending: Sequence[PendingPush | PendingCall] = ()
        """The exchange under way: one for each server."""
        self._background = _Background() if pull_ahead else None
        self._answer: Future[list[messages.Reply]] | None = None
        """Of the exchange that is under way while the next Δ is computed."""
        self._ahead = False
        """Whether the Δ under way has begun before its grant."""
        self._taken_back = 0
        self.waited: Callable[[Nanoseconds, Clock], None] = lambda *_: None
        """Called after a wait within a step, with the time at which it began and the attempt."""
        self._ended = False
        self._last_contact_s = 0.0

    def wait_for_grant(self) -> bool:
        """Wait for the server's reply and return whether to go on; with ``pull_ahead`` only where it has to."""
        if self._under_way or self._ended:
            return self._under_way
        if self._answer is not None:
            stream, first, size = self._batches
            self.attempt, self._batches = self.attempt + 1, BatchRange(stream, first + size, size)
            self._done, self._under_way, self._ahead = 0, True, True
            return True
        self._state = None  # frees the old A where that is in the object store before the new one comes
        pending, self._pending = self._pending or self._links.begin_all("first", *self._replica, self.attempt), ()
        return self._begin(self._links.results(pending))

    def _begin(self, replies: Sequence[messages.Reply]) -> bool:
        """Begin the Δ that is granted, of the A that came with the grant; return whether there is one."""
        grant, _ = replies[0]
        if grant is None:
            self._ended = True
            return False
        self._read(replies)
        self.attempt, self._batches, _ = grant
        self._done, self._under_way, self._last_contact_s = 0, True, time.monotonic()
        return True

    def _read(self, replies: Sequence[messages.Reply]) -> None:
        """Read the A of which each server has sent its slice, or has written it to the buffers.

        One that came whole is used where it lies, unless that is anywhere: how a product of matrices is rounded
        depends on it.
        """
        buffers, slices = self._buffers, [arrays for _, arrays in replies]
        (grant, whole), *others = replies
        assert grant is not None, "A comes with a grant"
        if not others and whole and all(array.ctypes.data % ALIGNMENT == 0 for array in whole):
            self._state = messages.state_of(buffers.sent.layout, whole)
        else:
            for part, arrays in zip(self._slices, slices, strict=True):
                for target, array in zip(part.cut_bytes(buffers.coming_arrays), arrays, strict=False):
                    target[:] = array
            if buffers.coming is not buffers.sent:
                buffers.sent.copy_(buffers.coming)
            self._state = buffers.sent
        self._state.version = self._version = grant.version

    def pull(self) -> FlatState:
        assert self._state is not None, "nothing was sent"
        return self._state

    def place(self) -> tuple[int, Version, int]:
        """Have the A of the newest grant where all workers read it; there is one buffer, and one slot."""
        if self._state is not None and self._state is not self._buffers.sent:
            self._state = self._buffers.sent.copy_(self._state)
        self._buffers.version.fill_(self._version)
        return 0, self._version, 0

    def delta_buffer(self) -> FlatState:
        if self._answer is not None:  # the last Δ is sent from it
            began = time.monotonic_ns()
            self._answer.exception()
            self.waited(began, self.attempt)
        return self._buffers.delta

    def cancelled(self) -> bool:
        """Return whether the attempt under way was cancelled, or the run has ended."""
        return self._cancel.newest >= self.attempt

    def pause(self, seconds: Seconds) -> None:
        """Sleep for a delay of the job, or until cancelled; a long one is announced to the server."""
        until = time.monotonic() + seconds
        if until - self._last_contact_s > self._timeout_s / 4:
            self._last_contact_s = until
            self._link.call("excuse", *self._replica, seconds)
        self._cancel.wait(self.attempt, seconds)

    def taken_back(self) -> int:
        count, self._taken_back = self._taken_back, 0
        return count

    def last_state(self) -> FlatState | None:
        """Return None: nobody writes to what was pulled last."""
        return None

    def push(self, measured: Measured, *, cancelled: bool = False) -> None:
        self._under_way, replies = False, list[messages.Reply]()
        if self._ahead:
            assert self._answer is not None, "the last Δ is exchanged meanwhile"
            replies, self._answer, self._ahead = self._answer.result(), None, False
            grant, _ = replies[0]
            if grant is None or (grant.batches != self._batches and not cancelled):
                self._taken_back = self._batches.size
                self._begin(replies)
                return
        facts = measured.samples, measured.finite, measured.loss, self._metrics.newest
        (replica, incarnation), version = self._replica, self._version
        left = self._keep() if measured.finite and not cancelled else None
        size = self._buffers.leave(self.attempt, left) if left is not None else 0
        completion = messages.PushCompletion(replica, incarnation, self.attempt, version, *facts, size)
        if replies:
            self._read(replies)
            self._last_contact_s = time.monotonic()
        if self._background is None or cancelled:  # who was cancelled is to compute with the newest A
            self._pending = self._push(completion, cancelled=cancelled)
        else:
            self._answer = self._background.submit(lambda: self._links.results(self._push(completion)))

    def _push(self, completion: messages.PushCompletion, *, cancelled: bool = False) -> list[PendingPush]:
        return self._links.push_all(self._slices, self._codecs, completion, self._buffers, cancelled=cancelled)

    def go_on(self, keep: Callable[[], OwnState | None]) -> OwnState | None:
        """Return what the replica kept, in this run or the one before; tell the server from now on what it keeps."""
        kept: messages.Bytes | None = self._link.call("own_state", *self._replica, self.attempt)
        self._keep = keep
        return None if kept is None else OwnState.read(kept.data)

    def close(self) -> None:
        """Release the memory of Δ and A, and the streams; break off what is under way."""
        if self._background is not None:
            if self._answer is not None and not self._answer.done():
                self._links.break_off()
            self._background.close()
        self._links.close()
        self._buffers.close()


class _Background:
    """A thread that does one thing after the other, and does not keep the process from ending."""

    def __init__(self) -> None:
        self._calls = queue.SimpleQueue[Callable[[], None] | None]()
        threading.Thread(target=self._run, name="exchange", daemon=True).start()

    def submit(self, function: Callable[[], list[messages.Reply]]) -> Future[list[messages.Reply]]:
        """Have the thread call this; return its result to come."""
        future = Future[list[messages.Reply]]()

        def call() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._calls.put(call)
        return future

    def close(self) -> None:
        """Let the thread end."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

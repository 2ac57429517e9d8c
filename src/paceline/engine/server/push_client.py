"""The parameter client of one replica that pushes to servers."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import final

from paceline.comm.shared_memory import ALIGNMENT
from paceline.core.types import Clock, Seconds, Version
from paceline.engine.own_states import OwnState
from paceline.engine.server import messages
from paceline.engine.server.delta_codec import DeltaCodec
from paceline.engine.server.messages import ReplicaAssignment
from paceline.engine.server.push_buffers import PushBuffers
from paceline.engine.server.server_link import PendingPush, ServerLinks
from paceline.engine.worker import GrantedClient, InMemorySink
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
        self._pending = list[PendingPush]()
        """One for each server."""
        self._ended = False
        self._last_contact_s = 0.0

    def wait_for_grant(self) -> bool:
        """Wait for the server's reply and return whether to go on."""
        if self._under_way or self._ended:
            return self._under_way
        self._state = None  # frees the old A where that is in the object store before the new one comes
        pending, self._pending = self._pending or self._links.begin_all("first", *self._replica, self.attempt), []
        replies = self._links.results(pending)
        grant, _ = replies[0]
        if grant is None:
            self._ended = True
            return False
        self._state = self._received([arrays for _, arrays in replies])
        self.attempt, self._batches, self._version = grant
        self._state.version = self._version
        self._done, self._under_way, self._last_contact_s = 0, True, time.monotonic()
        return True

    def _received(self, slices: Sequence[Sequence[messages.Bytes]]) -> FlatState:
        """Return the A of which each server has sent its slice, or has written it to the buffers.

        One that came whole is used where it lies, unless that is anywhere: how a product of matrices is rounded
        depends on it.
        """
        buffers = self._buffers
        if len(slices) == 1 and slices[0] and all(array.ctypes.data % ALIGNMENT == 0 for array in slices[0]):
            return messages.state_of(buffers.sent.layout, slices[0])
        for part, arrays in zip(self._slices, slices, strict=True):
            for target, array in zip(part.cut_bytes(buffers.sent_arrays), arrays, strict=False):
                target[:] = array
        return buffers.sent

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

    def push(self, measured: Measured, *, cancelled: bool = False) -> None:
        self._under_way = False
        facts = measured.samples, measured.finite, measured.loss, self._metrics.newest
        (replica, incarnation), version = self._replica, self._version
        left = self._keep() if measured.finite and not cancelled else None
        size = self._buffers.leave(self.attempt, left) if left is not None else 0
        completion = messages.PushCompletion(replica, incarnation, self.attempt, version, *facts, size)
        self._pending = self._links.push_all(self._slices, self._codecs, completion, self._buffers, cancelled=cancelled)

    def go_on(self, keep: Callable[[], OwnState | None]) -> OwnState | None:
        """Return what the replica kept, in this run or the one before; tell the server from now on what it keeps."""
        kept: messages.Bytes | None = self._link.call("own_state", *self._replica, self.attempt)
        self._keep = keep
        return None if kept is None else OwnState.read(kept.data)

    def close(self) -> None:
        """Release the memory of Δ and A, and the streams."""
        self._links.close()
        self._buffers.close()

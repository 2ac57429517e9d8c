"""What a process has begun and not ended, in all its groups, and how it waits for it.

There is no helper thread: a call goes as far as it can when it is made, and on whenever this process waits for any.

What a call returns: something to wait for.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from paceline.comm.shm import wakeup_page
from paceline.comm.shm.p2p import Receive
from paceline.comm.shm.region import Region
from paceline.comm.shm.staging import Steps
from paceline.core.errors import CollectiveError, WaitTimeoutError
from paceline.core.types import Seconds

LOOK_AROUND_S: Seconds = 0.1
"""Who waits looks so often whether those that it waits for are still there."""


class LateError(CollectiveError, WaitTimeoutError):
    """A rank waited for others longer than its group's timeout."""


class Operation:
    """One call under way.

    Args:
        room: of its group.
        steps: what it does between waits.
        what: says what it is, in messages.
        awaited: ranks in the group that it waits for.
        line: of operations that go one after the other, this one among them; None: it goes by itself.
    """

    def __init__(
        self,
        room: Region,
        steps: Steps,
        what: Callable[[], str],
        awaited: Callable[[], Sequence[int]],
        line: "deque[Operation] | None" = None,
    ) -> None:
        self.room, self.what, self.awaited, self.line = room, what, awaited, line
        self._steps = steps
        self.ready: Callable[[], bool] = _always
        self.done = False
        self.error: Exception | None = None

    def advance(self) -> None:
        """Go on until something has to be waited for."""
        try:
            while self.ready():
                self.ready = next(self._steps)
        except StopIteration:
            self.done = True
        except Exception as error:
            self.fail(error)
        except BaseException:  # Ctrl-C: its steps can't be gone on with
            self.fail(
                CollectiveError(
                    f"{self.what()} of group {self.room.name} was interrupted; nothing more can be sent in this group"
                )
            )
            raise

    def __str__(self) -> str:
        return f"{self.what()} in group {self.room.name}"

    def fail(self, error: Exception) -> None:
        """End it with an error, of which all ranks are told."""
        self.done, self.error = True, error
        self.room.fail(str(error))


class Progress:
    """All operations under way in this process."""

    def __init__(self) -> None:
        self._door = wakeup_page.mine()
        self._active: list[Operation] = []
        self._lock = threading.RLock()

    def start(self, operation: Operation) -> None:
        """Begin it, or have it begin once those before it in its line have ended."""
        with self._lock:
            failure = operation.room.failure()
            if failure is not None:
                operation.done, operation.error = True, CollectiveError(failure)
                return
            line = operation.line
            if line is not None:
                line.append(operation)
                if len(line) > 1:
                    return
            self._begin(operation)

    def wait(self, operation: Operation, timeout_s: Seconds, slice_s: Seconds | None = None) -> None:
        """Go on with all of them until this one has ended.

        Args:
            operation: waited for.
            timeout_s: of its group; when that is up, the group is done for.
            slice_s: how long this wait may last; when that is up, the operation goes on and may be waited for again.

        Raises:
            CollectiveError: ranks made different calls, or one of those that are waited for has gone.
            LateError: the time is up.
        """
        wakeup, began = self._door.wakeup, time.monotonic()
        bound_s = timeout_s if slice_s is None else min(slice_s, timeout_s)
        while not operation.done:
            if wakeup.spin(self._move):
                continue
            left_s = bound_s - (time.monotonic() - began)
            wakeup.sleep(self._move, wakeup.event.wait, max(0.0, min(left_s, LOOK_AROUND_S)))
            if not self._move():
                self._look_around(operation, late=left_s <= 0, timeout_s=bound_s, spoils=bound_s == timeout_s)
        if operation.error is not None:
            raise operation.error

    def poll(self) -> None:
        """Go on with what can, without waiting."""
        while self._move():
            pass

    def drop(self, room: Region) -> None:
        """Forget what is under way in a group."""
        with self._lock:
            self._active = [operation for operation in self._active if operation.room is not room]

    def _begin(self, operation: Operation | None) -> None:
        while operation is not None:
            operation.advance()
            if not operation.done:
                self._active.append(operation)
                return
            operation = self._next(operation)

    def _next(self, ended: Operation) -> Operation | None:
        if ended.line is None:
            return None
        ended.line.popleft()
        return ended.line[0] if ended.line else None

    def _move(self) -> bool:
        """Go on with whatever can; whether anything could."""
        moved = False
        with self._lock:
            for operation in tuple(self._active):
                if operation.ready():
                    moved = True
                    operation.advance()
                    if operation.done:
                        self._active.remove(operation)
                        self._begin(self._next(operation))
        return moved

    def _look_around(self, operation: Operation, *, late: bool, timeout_s: Seconds, spoils: bool) -> None:
        """End an operation with an error where waiting for it has become vain; raise where only this wait is over."""
        with self._lock:
            if operation.done:
                return
            error = _vain(operation) or (_late(operation, timeout_s) if late else None)
            if isinstance(error, LateError) and not spoils:
                try:
                    raise error
                finally:
                    del error  # else it, this frame and what is being sent would keep each other
            if error is not None:
                if operation in self._active:
                    self._active.remove(operation)
                operation.fail(error)


def _vain(operation: Operation) -> CollectiveError | None:
    """Why it will never end."""
    room = operation.room
    failure = room.failure()
    if failure is not None:
        return CollectiveError(failure)
    gone = room.gone(operation.awaited())
    if not gone or operation.ready():  # what they did last may have come meanwhile
        return None
    me = room.named([room.rank])
    return CollectiveError(f"{room.named(gone)} ended while {me} waited in {operation}; look at what it printed last")


def _late(operation: Operation, timeout_s: Seconds) -> LateError:
    room, awaited = operation.room, operation.awaited()
    return LateError(
        f"{room.named([room.rank])} waited {timeout_s:g} s for {room.named(awaited)} in {operation}; see what "
        f"{'they do' if len(awaited) > 1 else 'it does'} instead, or give the group a larger timeout (timeout=)"
    )


@cache
def mine() -> Progress:
    """This process's."""
    return Progress()


def _always() -> bool:
    return True


class Works(dist.Work):
    """Several calls that are waited for as one."""

    def __init__(self, works: "Sequence[Work]") -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until all results are there."""
        return all(work.wait(timeout) for work in self._works)

    def is_completed(self) -> bool:
        """Whether all have ended."""
        return all(work.is_completed() for work in self._works)

    def result(self) -> list[Tensor]:
        """The outputs of all."""
        return [output for work in self._works for output in work.result()]

    def get_future(self) -> "Future[list[Tensor]]":
        """As that of one."""
        return completed(self.result())


class Work(dist.Work):
    """A call that has been made.

    Args:
        operation: what it does.
        timeout_s: how long ``wait`` waits where it is not told.
        outputs: its results, once it has ended.
        receive: of a receive, where its source will stand.
    """

    def __init__(
        self, operation: Operation, timeout_s: Seconds, outputs: Sequence[Tensor] = (), receive: Receive | None = None
    ) -> None:
        super().__init__()
        self._operation, self.timeout_s, self._outputs, self._receive = operation, timeout_s, outputs, receive

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until the results are there; raises where they can't be had, or not within ``timeout``."""
        operation = self._operation
        if not operation.done or operation.error is not None:
            mine().wait(operation, self.timeout_s, timeout.total_seconds() if timeout else None)
        return True

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        if not self._operation.done:
            mine().poll()
        return self._operation.done

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._operation.done and self._operation.error is None

    def exception(self) -> Exception | None:
        """What went wrong."""
        return self._operation.error

    def synchronize(self) -> None:
        """As ``wait``."""
        self.wait()

    def result(self) -> list[Tensor]:
        """What it was made for; waits for it."""
        self.wait()
        return list(self._outputs)

    def source_rank(self) -> int:
        """Of a receive that has ended: where its message came from."""
        source = self._receive.came_from if self._receive else None
        assert source is not None, "no message has been received"
        return source

    _source_rank = source_rank

    def get_future(self) -> "Future[list[Tensor]]":
        """A future that is complete: DDP asks for it at once, and nobody would complete it later."""
        return completed(self.result())


def completed(result: list[Tensor]) -> "Future[list[Tensor]]":
    """A future that has come: nobody would complete it later."""
    future: Future[list[Tensor]] = Future()
    future.set_result(result)
    return future

"""The progress engine: what this process has started and not finished, in all its groups, and how it waits for it.

There is no helper thread. A call goes as far as it can when it is made, and goes on whenever this process waits for any
call. So a wait for one call is safe although another one must come first: the wait moves all of them.
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

from paceline.comm.shm.p2p import Receive
from paceline.comm.shm.region import Region, own_wakeup_page, wakeup_on
from paceline.comm.shm.staging import Steps
from paceline.core.errors import CollectiveError, WaitTimeoutError
from paceline.core.types import Seconds

CHECK_S: Seconds = 0.1
"""How often a wait checks whether the processes that it waits for are still running."""


class LateError(CollectiveError, WaitTimeoutError):
    """A rank waited for others longer than its group's timeout."""


class Operation:
    """A call that has been started.

    Args:
        region: of its group.
        steps: what it does between waits.
        describe: returns what it is, for messages.
        awaited: returns the ranks in the group that it waits for.
        queue: operations that run one after the other, this one among them; None: it runs by itself.
    """

    def __init__(
        self,
        region: Region,
        steps: Steps,
        describe: Callable[[], str],
        awaited: Callable[[], Sequence[int]],
        queue: "deque[Operation] | None" = None,
    ) -> None:
        self.region, self.describe, self.awaited, self.queue = region, describe, awaited, queue
        self._steps = steps
        self.ready: Callable[[], bool] = _always
        self.done = False
        self.error: Exception | None = None

    def advance(self) -> None:
        """Run steps until one has to wait."""
        try:
            while self.ready():
                self.ready = next(self._steps)
        except StopIteration:
            self.done = True
        except Exception as error:
            self.fail(error)
        except BaseException:  # Ctrl-C within a step: the generator is finished, and the others would wait for ever
            call = f"{self.describe()} of group {self.region.name}"
            self.fail(CollectiveError(f"{call} was interrupted; nothing more can be sent in this group"))
            raise

    def __str__(self) -> str:
        return f"{self.describe()} in group {self.region.name}"

    def fail(self, error: Exception) -> None:
        """End it with an error, which is reported to all ranks."""
        self.done, self.error = True, error
        self.region.fail(str(error))


def _always() -> bool:
    return True


class Progress:
    """All operations under way in this process."""

    def __init__(self) -> None:
        self._wakeup = wakeup_on(own_wakeup_page())
        self._active: list[Operation] = []
        self._lock = threading.RLock()

    def start(self, operation: Operation) -> None:
        """Start an operation, or queue it behind those of its queue."""
        with self._lock:
            failure = operation.region.failure()
            if failure is not None:
                operation.done, operation.error = True, CollectiveError(failure)
                return
            queue = operation.queue
            if queue is not None:
                queue.append(operation)
                if len(queue) > 1:
                    return
            self._run(operation)

    def wait(self, operation: Operation, timeout_s: Seconds, slice_s: Seconds | None = None) -> None:
        """Advance all operations until this one has ended.

        Args:
            operation: waited for.
            timeout_s: of its group; when that is up, the group is of no use any more.
            slice_s: longest time of this wait; when that is up, the operation goes on and may be waited for again.

        Raises:
            CollectiveError: ranks made different calls, or one that is waited for has ended.
            LateError: the time is up.
        """
        wakeup, began = self._wakeup, time.monotonic()
        bound_s = timeout_s if slice_s is None else min(slice_s, timeout_s)
        while not operation.done:
            if wakeup.spin(self._advance_ready):
                continue
            left_s = bound_s - (time.monotonic() - began)
            wakeup.sleep(self._advance_ready, wakeup.event.wait, max(0.0, min(left_s, CHECK_S)))
            if not self._advance_ready():
                self._check(operation, late=left_s <= 0, timeout_s=bound_s, spoils=bound_s == timeout_s)
        if operation.error is not None:
            raise operation.error

    def poll(self) -> None:
        """Advance what is ready, without waiting."""
        while self._advance_ready():
            pass

    def drop(self, region: Region) -> None:
        """Forget what is under way in a group."""
        with self._lock:
            self._active = [operation for operation in self._active if operation.region is not region]

    def _run(self, operation: Operation | None) -> None:
        """Run an operation, and those behind it in its queue, until one has to wait."""
        while operation is not None:
            operation.advance()
            if not operation.done:
                self._active.append(operation)
                return
            operation = self._next(operation)

    def _next(self, ended: Operation) -> Operation | None:
        if ended.queue is None:
            return None
        ended.queue.popleft()
        return ended.queue[0] if ended.queue else None

    def _advance_ready(self) -> bool:
        """Advance the operations that are ready; return whether there was one."""
        moved = False
        with self._lock:
            for operation in tuple(self._active):
                if operation.ready():
                    moved = True
                    operation.advance()
                    if operation.done:
                        self._active.remove(operation)
                        self._run(self._next(operation))
        return moved

    def _check(self, operation: Operation, *, late: bool, timeout_s: Seconds, spoils: bool) -> None:
        """Fail an operation that can't end any more, or, if the time is up, end its group or this wait alone.

        Args:
            operation: waited for.
            late: the time is up.
            timeout_s: that was waited.
            spoils: the time of the group is up, not only that of this wait.
        """
        with self._lock:
            if operation.done:
                return
            region = operation.region
            own, failure = region.named([region.rank]), region.failure()
            exited = region.exited(operation.awaited()) if failure is None else []
            error: CollectiveError | None = None
            if failure is not None:
                error = CollectiveError(failure)
            elif exited and not operation.ready():  # what they wrote last may have arrived meanwhile
                error = CollectiveError(
                    f"{region.named(exited)} ended while {own} waited in {operation}; look at what it printed last"
                )
            elif late:
                awaited = operation.awaited()
                error = LateError(
                    f"{own} waited {timeout_s:g} s for {region.named(awaited)} in {operation}; see what "
                    f"{'they do' if len(awaited) > 1 else 'it does'} instead, or give the group a larger timeout "
                    "(timeout=)"
                )
                if not spoils:
                    try:
                        raise error
                    finally:
                        del error  # or it, this frame and what is being sent would keep each other alive
            if error is not None:
                if operation in self._active:
                    self._active.remove(operation)
                operation.fail(error)


@cache
def own_progress() -> Progress:
    """Return this process's progress engine."""
    return Progress()


class Works(dist.Work):
    """Several calls that are waited for as one."""

    def __init__(self, works: "Sequence[Work]") -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        return all(work.wait(timeout) for work in self._works)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def result(self) -> list[Tensor]:
        return [output for work in self._works for output in work.result()]

    def get_future(self) -> "Future[list[Tensor]]":
        return completed(self.result())


class Work(dist.Work):
    """A call that has been made, as torch.distributed returns it.

    Args:
        operation: started.
        timeout_s: of ``wait`` if that is given none.
        outputs: results, once the operation has ended.
        receive: for a receive, to read the source of its message.
    """

    def __init__(
        self, operation: Operation, timeout_s: Seconds, outputs: Sequence[Tensor] = (), receive: Receive | None = None
    ) -> None:
        super().__init__()
        self._operation, self.timeout_s, self._outputs, self._receive = operation, timeout_s, outputs, receive

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the results; raise if they can't come, or do not come within ``timeout``."""
        operation = self._operation
        if not operation.done or operation.error is not None:
            own_progress().wait(operation, self.timeout_s, timeout.total_seconds() if timeout else None)
        return True

    def is_completed(self) -> bool:
        """Return whether it has ended, with or without an error."""
        if not self._operation.done:
            own_progress().poll()
        return self._operation.done

    def is_success(self) -> bool:
        return self._operation.done and self._operation.error is None

    def exception(self) -> Exception | None:
        return self._operation.error

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        """Wait, and return the outputs."""
        self.wait()
        return list(self._outputs)

    def source_rank(self) -> int:
        """Return where the message of a receive that has ended came from."""
        source = self._receive.received_from if self._receive else None
        assert source is not None, "no message has been received"
        return source

    _source_rank = source_rank

    def get_future(self) -> "Future[list[Tensor]]":
        """Wait, and return a completed future: DDP asks for it at once, and no thread would complete it later."""
        return completed(self.result())


def completed(result: list[Tensor]) -> "Future[list[Tensor]]":
    """Return a future that has its result."""
    future: Future[list[Tensor]] = Future()
    future.set_result(result)
    return future

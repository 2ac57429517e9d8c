"""The progress engine: what this process has started and not finished, in all its groups, and how it waits for it.

There is no helper thread. A call goes as far as it can when it is made, and goes on whenever this process waits for any
call. So a wait for one call is safe although another one must come first: the wait moves all of them.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from paceline.comm.shm.p2p import Receive
from paceline.comm.shm.region import Region, Steps
from paceline.comm.shm.rendezvous import own_wakeup_page, wakeup_on
from paceline.core.errors import CollectiveError, WaitTimeoutError
from paceline.core.types import Seconds

# How often a wait checks whether the processes that it waits for are still running.
CHECK_S: Seconds = 0.1


class LateError(CollectiveError, WaitTimeoutError):
    """A rank waited for others longer than its group's timeout."""


@dataclass(eq=False, slots=True)
class Operation:
    """A call that has been started.

    Args:
        region: of its group.
        steps: what it does between waits.
        describe: returns what it is, for messages.
        awaited: returns the ranks in the group that it waits for.
        queue: operations that run one after the other, this one among them; None: it runs by itself.
        ready: whether its next step can run.
        done: it has ended, with or without an error.
        error: that it has ended with.
    """

    region: Region
    steps: Steps
    describe: Callable[[], str]
    awaited: Callable[[], Sequence[int]]
    queue: "deque[Operation] | None" = None
    ready: Callable[[], bool] = lambda: True
    done: bool = False
    error: Exception | None = None

    def advance(self) -> None:
        """Run steps until one has to wait."""
        try:
            while self.ready():
                self.ready = next(self.steps)
        except StopIteration:
            self.done = True
        except Exception as error:
            self.fail(error)
        except BaseException:  # Ctrl-C within a step: the generator is finished, and the others would wait for ever
            call = f"{self.describe()} of group {self.region.name}"
            self.fail(CollectiveError(f"{call} was interrupted; nothing more can be sent in this group"))
            raise

    def fail(self, error: Exception) -> None:
        """End it with an error, which is reported to all ranks."""
        self.done, self.error = True, error
        self.region.fail(str(error))


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
            self._active.append(operation)
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

    def _run(self, operation: Operation) -> None:
        """Advance an active operation; if it ends, those behind it in its queue, until one has to wait."""
        operation.advance()
        while operation.done:
            self._active.remove(operation)
            queue = operation.queue
            if queue is None:
                return
            queue.popleft()
            if not queue:
                return
            operation = queue[0]
            self._active.append(operation)
            operation.advance()

    def _advance_ready(self) -> bool:
        """Advance the operations that are ready; return whether there was one."""
        moved = False
        with self._lock:
            for operation in tuple(self._active):
                if operation.ready():
                    moved = True
                    self._run(operation)
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
            region, awaited = operation.region, operation.awaited()
            own, failure = region.named([region.rank]), region.failure()
            call = f"{operation.describe()} in group {region.name}"
            exited = region.exited(awaited) if failure is None else []
            if failure is not None:
                error = CollectiveError(failure)
            elif exited and not operation.ready():  # what they wrote last may have arrived meanwhile
                error = CollectiveError(
                    f"{region.named(exited)} ended while {own} waited in {call}; look at what it printed last"
                )
            elif late:
                text = (
                    f"{own} waited {timeout_s:g} s for {region.named(awaited)} in {call}; see what "
                    f"{'they do' if len(awaited) > 1 else 'it does'} instead, or give the group a larger timeout "
                    "(timeout=)"
                )
                if not spoils:  # bound to no name: it, this frame and what is being sent would keep each other alive
                    raise LateError(text)
                error = LateError(text)
            else:
                return
            if operation in self._active:
                self._active.remove(operation)
            operation.fail(error)


@cache
def own_progress() -> Progress:
    """Return this process's progress engine."""
    return Progress()


class PythonWork(dist.Work):
    """A call that has been made, as torch.distributed returns it; subclasses wait for it.

    Args:
        outputs: results, once it has ended.
    """

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._outputs = outputs

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        """Wait, and return the outputs."""
        self.wait()
        return list(self._outputs)

    def get_future(self) -> "Future[list[Tensor]]":
        """Wait, and return a completed future: DDP asks for it at once, and no thread would complete it later."""
        future: Future[list[Tensor]] = Future()
        future.set_result(self.result())
        return future


class Work(PythonWork):
    """A call over shared memory.

    Args:
        operation: started.
        timeout_s: of ``wait`` if that is given none.
        outputs: results, once the operation has ended.
        receive: for a receive, to read the source of its message.
    """

    def __init__(
        self, operation: Operation, timeout_s: Seconds, outputs: Sequence[Tensor] = (), receive: Receive | None = None
    ) -> None:
        super().__init__(outputs)
        self._operation, self.timeout_s, self._receive = operation, timeout_s, receive

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

    def source_rank(self) -> int:
        """Return where the message of a receive that has ended came from."""
        source = self._receive.received_from if self._receive else None
        assert source is not None, "no message has been received"
        return source

    _source_rank = source_rank


class Works(PythonWork):
    """Several calls that are waited for as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__([output for work in works for output in work._outputs])
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        return all(work.wait(timeout) for work in self._works)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

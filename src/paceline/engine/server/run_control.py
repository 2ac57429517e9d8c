"""What controls a run at the server: its clock, first failure, background tasks, and what wakes those who wait."""

import asyncio
import contextlib
import threading
import time
import traceback
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from paceline.core.errors import PacelineError, WorkerError
from paceline.core.types import Nanoseconds, Seconds

T = TypeVar("T")


class ServerLostError(WorkerError):
    """A server that has a slice of A is no more."""


def server_error(error: BaseException) -> PacelineError:
    """Return an error of the server as those see it who are told of it."""
    if isinstance(error, PacelineError):
        return error
    text = "".join(traceback.format_exception(error))
    return WorkerError(f"the server failed: {type(error).__name__}: {error}\n\n{text}")


class RunControl:
    """Phase, first failure and clock of a run at the server, and the events that wake its loop and the driver.

    Args:
        start_s: training time before the run was resumed.
        began: when training would have begun without a break; 0: it has not.
    """

    def __init__(self, start_s: Seconds, began: Nanoseconds) -> None:
        self._start_s, self.began = start_s, began
        self.failure: PacelineError | None = None
        self.sound = True
        """False once A or the counts may be wrong: what failed was no replica."""
        self.over = self.done = False
        """True once training is to end; once nothing is awaited any more."""
        self.wake, self.changed = asyncio.Event(), asyncio.Event()
        """Set to wake the training loop; to answer the driver that waits for a change."""

    def now(self) -> Seconds:
        """Return how long training has lasted."""
        return (time.monotonic_ns() - self.began) * 1e-9 if self.began else self._start_s

    def begin(self) -> None:
        """Start the clock."""
        self.began = time.monotonic_ns() - int(self._start_s * 1e9)

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Context manager: an error inside ends the run, not one replica's call."""
        try:
            yield
        except Exception as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End the run with an error, unless it has failed before."""
        self.sound &= isinstance(error, WorkerError) and not isinstance(error, ServerLostError)
        self.failure = self.failure or server_error(error)
        self.give_over()

    def give_over(self) -> None:
        """End training with what there is."""
        self.over = True
        self.wake.set()
        self.changed.set()


class BackgroundTasks:
    """Coroutines that run beside; the references keep them alive."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine."""
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        """Cancel those that have not ended."""
        for task in self._tasks:
            task.cancel()


class EventLoopThread:
    """An event loop in a thread of its own.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine there."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Cancel what runs there, and end the thread; idempotent."""
        if not self._loop.is_closed():
            self.submit(self._cancel()).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _cancel(self) -> None:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()


async def wait_for(event: asyncio.Event, timeout_s: Seconds) -> None:
    """Wait until an event is set, or for the timeout; then clear it: the caller looks at what has changed."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)
    event.clear()

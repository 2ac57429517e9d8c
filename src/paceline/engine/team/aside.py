"""Waits that can't be given up and made again, made in a thread of their own, so that who waits can look around.

Gloo's messages are such: a wait for one that times out closes the connection (torch 2.13).
"""

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeAlias

from paceline.core.types import Seconds

Asked: TypeAlias = "queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]"
"""Waits, and who wants to know what came of them; None: no more."""


LEAVE_S: Seconds = 2.0
"""How long the thread may take to end: at once, but where it waits for somebody who has died."""


class Aside:
    """One thread, which makes one wait after the other; it ends when nobody holds this any more.

    The end of the process waits for it: a thread that is stopped while it lets go of a message aborts the process
    (torch 2.13).
    """

    def __init__(self) -> None:
        self._asked: Asked = queue.SimpleQueue()
        thread = threading.Thread(target=_serve, args=(self._asked,), name="paceline: waits", daemon=True)
        thread.start()
        weakref.finalize(self, _end, self._asked, thread)

    def begin(self, wait: Callable[[], Any]) -> "Waiting":
        """Have it made."""
        future: Future[Any] = Future()
        self._asked.put((wait, future))
        return Waiting(future)


def _end(asked: Asked, thread: threading.Thread) -> None:
    asked.put(None)
    if thread is not threading.current_thread():
        thread.join(LEAVE_S)


def _serve(asked: Asked) -> None:
    while (wanted := asked.get()) is not None:
        _make(*wanted)
        del wanted  # it holds a message, which is to be let go of now


def _make(wait: Callable[[], Any], future: "Future[Any]") -> None:
    try:
        future.set_result(wait())
    except BaseException as error:
        future.set_exception(error)


class Waiting:
    """A wait under way, in the form of torch's Work."""

    def __init__(self, future: "Future[Any]") -> None:
        self._future = future

    def is_completed(self) -> bool:
        """Whether it is over, well or badly."""
        return self._future.done()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises RuntimeError when it is not over in time, and what it has raised itself."""
        try:
            self._future.result(None if timeout is None else timeout.total_seconds())
        except TimeoutError as error:
            if self._future.done():
                raise
            raise RuntimeError("not yet") from error
        return True

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

Asked: TypeAlias = "queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]"
"""Waits, and who wants to know what came of them; None: no more."""


class Aside:
    """One thread, which makes one wait after the other; it ends when nobody holds this any more."""

    def __init__(self) -> None:
        self._asked: Asked = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(self._asked,), name="paceline: waits", daemon=True).start()
        weakref.finalize(self, self._asked.put, None)

    def begin(self, wait: Callable[[], Any]) -> "Waiting":
        """Have it made."""
        future: Future[Any] = Future()
        self._asked.put((wait, future))
        return Waiting(future)


def _serve(asked: Asked) -> None:
    while (wanted := asked.get()) is not None:
        wait, future = wanted
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

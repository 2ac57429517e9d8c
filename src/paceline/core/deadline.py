"""A bound on the time of a block of Python code in this thread, whichever that is."""

import contextlib
import ctypes
import threading
from collections.abc import Iterator

from paceline.core.types import Seconds

# Between two exceptions, where the code has caught the last one and goes on.
AGAIN_S: Seconds = 1.0


class _Expired(BaseException):
    """Raised within a block whose time is up; no Exception, which the code in it might handle."""


@contextlib.contextmanager
def limited(seconds: Seconds) -> Iterator[None]:
    """Context manager: raise TimeoutError in this thread when the block has run for so long.

    It interrupts Python code between two instructions, and a call into C when that returns.

    >>> with limited(60):
    ...     sum(range(10))
    45
    """
    thread, done, lock = threading.get_ident(), threading.Event(), threading.Lock()
    expired = False

    def watch() -> None:
        nonlocal expired
        left = seconds
        while not done.wait(left):
            with lock:
                if not done.is_set():
                    expired, left = True, AGAIN_S
                    _raise_in(thread, _Expired)

    watcher = threading.Thread(target=watch, name="deadline", daemon=True)
    watcher.start()
    try:
        try:
            yield
        finally:
            _stop(done, lock, thread)
    except BaseException as error:
        if expired and isinstance(error, (_Expired, Exception)):  # the code may have made another error of it
            raise TimeoutError(f"not done within {seconds:g} s") from error
        raise
    finally:  # once more: the exception may have come within the first
        _stop(done, lock, thread)
        watcher.join()
    if expired:  # the code has caught it, and what it did then is not known
        raise TimeoutError(f"not done within {seconds:g} s")


def _stop(done: threading.Event, lock: threading.Lock, thread: int) -> None:
    """End the watch, and take back an exception that has not been raised yet."""
    with lock:
        done.set()
        _raise_in(thread, None)


def _raise_in(thread: int, kind: type[BaseException] | None) -> None:
    """Have a thread raise an exception at its next instruction; None: what was asked for is dropped."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None if kind is None else ctypes.py_object(kind))

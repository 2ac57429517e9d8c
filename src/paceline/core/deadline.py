"""A bound on the time of a block of Python code in this thread, whichever that is."""

import contextlib
import ctypes
import threading
from collections.abc import Iterator

from paceline.core.types import Seconds

# Between two exceptions, where the code has caught the last one and goes on.
AGAIN_S: Seconds = 1.0

# Rounds of a loop within which a thread raises what it was asked for: it looks in each of them.
_ROUNDS = 1000


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

    def stop() -> None:
        with lock:
            done.set()
        if expired:
            _catch_pending(thread)

    watcher = threading.Thread(target=watch, name="deadline", daemon=True)
    watcher.start()
    try:
        try:
            yield
        finally:
            stop()
    except BaseException as error:
        if expired and isinstance(error, (_Expired, Exception)):  # the code may have made another error of it
            raise TimeoutError(f"not done within {seconds:g} s") from error
        raise
    finally:  # once more: the exception may have come within the first
        stop()
        watcher.join()
    if expired:  # the code has caught it, and what it did then is not known
        raise TimeoutError(f"not done within {seconds:g} s")


def _catch_pending(thread: int) -> None:
    """Catch an exception that this thread has been asked for, and that may not have been raised yet.

    Taken back instead, it would leave CPython's word that something is pending for good (3.11): all code is slower
    then, and a profiler that is enabled later hangs.
    """
    try:
        _raise_in(thread, _Expired)  # in place of one that is pending
        for _ in range(_ROUNDS):
            pass
    except _Expired:
        return


def _raise_in(thread: int, kind: type[BaseException]) -> None:
    """Have a thread raise an exception at its next instruction."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))

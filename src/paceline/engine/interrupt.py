"""Ctrl-C that ends a run cleanly: noted at once, acted on between two events."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType


class Interruptible:
    """While it is entered, the first Ctrl-C is noted instead of raised; a second one is raised.

    Outside the main thread, where Python delivers no signals, it notes nothing.

    Args:
        wake: called when a Ctrl-C is noted, so that a wait ends.
    """

    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
        self.noted = False
        self._wake = wake
        self._before: Callable[[int, FrameType | None], object] | int | None = None

    def __enter__(self) -> "Interruptible":
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self.noted:
            raise KeyboardInterrupt
        self.noted = True
        self._wake()

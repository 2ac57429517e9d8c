"""Ctrl-C that ends a run cleanly: noted at once, acted on between two events."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType


class Interruptible:
    """While it is entered, the first two Ctrl-C are noted instead of raised; a third one is raised.

    Outside the main thread, where Python delivers no signals, it notes nothing.

    Args:
        wake: called when a Ctrl-C is noted, so that a wait ends.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.heard = 0
        """How many there have been: the first one asks to end, the second one not to wait for anything either."""
        self._wake = wake
        self._before: Callable[[int, FrameType | None], object] | int | None = None

    @property
    def insisted(self) -> bool:
        """Whether nothing is to be waited for."""
        return self.heard > 1

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
        self.heard += 1
        if self.heard > 2:
            raise KeyboardInterrupt
        self._wake()

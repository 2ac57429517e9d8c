"""Ctrl-C that ends a run cleanly: noted at once, acted on between two events."""

import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any


class Interruptible:
    """While it is entered, the first two Ctrl-C are noted instead of raised; a third one is raised.

    Outside the main thread, where Python delivers no signals, it notes nothing.

    Args:
        wake: called when a Ctrl-C is noted, so that a wait ends.
        signals: what counts as one.
    """

    def __init__(self, wake: Callable[[], None], signals: Sequence[signal.Signals] = (signal.SIGINT,)) -> None:
        self.heard = 0
        """How many there have been: the first one asks to end, the second one not to wait for anything either."""
        self._wake = wake
        self._signals = signals
        self._before: dict[signal.Signals, Any] = {}

    @property
    def insisted(self) -> bool:
        """Whether nothing is to be waited for."""
        return self.heard > 1

    def __enter__(self) -> "Interruptible":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in self._signals}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            if before is not None:  # who came first was no Python function
                signal.signal(number, before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.heard += 1
        if self.heard > 2:
            raise KeyboardInterrupt
        self._wake()

"""Ctrl-C as something to ask for, so that it never falls into the middle of a decision."""

import signal
import threading
from types import FrameType
from typing import Any


class Interrupts:
    """While entered, the first Ctrl-C is noted, and further ones raise KeyboardInterrupt as ever.

    Python delivers signals to the main thread alone; entered in another one, nothing is changed and nothing noted.
    """

    def __init__(self) -> None:
        self.heard = False
        self._before: Any = None

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self.heard:
            raise KeyboardInterrupt
        self.heard = True

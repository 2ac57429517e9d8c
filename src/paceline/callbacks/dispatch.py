"""Calls the callbacks of one run, in the process that the engine tells of what happens."""

import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, final

from paceline.callbacks.base import Callback, RunHandle
from paceline.core.errors import CallbackError
from paceline.core.records import Record
from paceline.engine.base import Logged, Progress, RunEvent, StopAsked
from paceline.run import Run


@final
class Callbacks:
    """The callbacks of one run.

    Args:
        callbacks: each is called in turn.
        run: the handle that they are given.
        active: returns whether this process calls them; a rank may begin to after the first one has died.
    """

    def __init__(self, callbacks: Sequence[Callback], run: RunHandle, active: Callable[[], bool]) -> None:
        self._callbacks, self.run, self._active = callbacks, run, active
        self._begun: list[Callback] = []
        """Those that have been started and not ended."""
        self._starts = True

    def start(self) -> None:
        """Begin, unless another process calls them."""
        if not self._active():
            return
        self._starts = False
        for callback in self._callbacks:
            self._begun.append(callback)
            self._call(callback, "on_start", self.run)

    def progress(self, progress: Progress) -> None:
        """Note the training time."""
        self.run.time_s = max(self.run.time_s, progress.time_s)

    def take(self, event: RunEvent) -> None:
        """Call the method for what has happened.

        Raises:
            CallbackError: a callback has raised something.
        """
        if isinstance(event, StopAsked):
            self.run.stop(event.reason)
            return
        if isinstance(event, Record):
            self.run.history.append(event)
            self.run.time_s = max(self.run.time_s, event.time_s)
        if self._starts:
            self.start()
        for callback in self._begun:
            if isinstance(event, Record):
                self._call(callback, "on_record", event, self.run)
            elif isinstance(event, Path):
                self._call(callback, "on_checkpoint", event, self.run)
            elif isinstance(event, Logged):
                self._call(callback, "on_log", *event, self.run)
            else:
                self._call(callback, "on_departure", event, self.run)

    def stopped(self) -> str | None:
        """Return the reason for which a callback, or a loop, ends training; None: it goes on."""
        return self.run.stopped

    def end(self, run: Run | None, only: Collection[Callback] | None = None) -> None:
        """End those that have begun, or ``only`` these; tell on stderr, and in the run's summary, what they raise."""
        ending = [callback for callback in self._begun if only is None or callback in only]
        self._begun = [callback for callback in self._begun if callback not in ending]
        for callback in ending:
            try:
                self._call(callback, "on_end", run)
            except CallbackError as error:
                print(f"paceline: {error}; the run itself is over", file=sys.stderr)
                if run is not None:
                    run.summary.setdefault("callback_error", str(error))

    @staticmethod
    def _call(callback: Callback, method: str, *args: Any) -> None:
        try:
            getattr(callback, method)(*args)
        except Exception as error:
            name = f"{type(callback).__name__}.{method}"
            raise CallbackError(f"callback {name} failed: {type(error).__name__}: {error}") from error

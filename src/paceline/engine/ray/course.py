"""How a run stands at the server: its clock, its phase, its first failure, and who is woken when that changes.

::

    starting --> training --> scoring --> done
                        \\ give_over: the budget is spent, the condition met, Ctrl-C, a failure
"""

import asyncio
import contextlib
import time
import traceback
from collections.abc import Callable
from typing import Any

from paceline.core.errors import PacelineError, WorkerError
from paceline.core.types import Nanoseconds, Seconds
from paceline.engine.ray.messages import Phase

TICK_S: Seconds = 0.2
"""How often the driver is told how things stand, and how often the server looks who is late."""


class Course:
    """One run's."""

    def __init__(self) -> None:
        self.phase: Phase = "starting"
        self.failure: PacelineError | None = None
        self.over = False
        """Whether training is to end."""
        self.began: Nanoseconds = 0
        """When training did; 0: it has not."""
        self._news, self._told = asyncio.Event(), asyncio.Event()

    def start(self) -> None:
        """From now on time counts."""
        self.began = time.monotonic_ns()

    def now(self) -> Seconds:
        """How long training has lasted."""
        return (time.monotonic_ns() - self.began) * 1e-9 if self.began else 0.0

    # ----------------------------------------------------------------------------------------------------- what happens

    def guarded(self, act: Callable[[], Any]) -> None:
        """What fails here ends the run, not one replica's call."""
        try:
            act()
        except Exception as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """The first failure wins."""
        if not isinstance(error, PacelineError):
            text = "".join(traceback.format_exception(error))
            error = WorkerError(f"the server failed: {type(error).__name__}: {error}\n\n{text}")
        self.failure = self.failure or error
        self.give_over()

    def give_over(self) -> None:
        """Training is to end with what there is."""
        self.over = True
        self.stir()
        self.tell()

    def pass_to(self, phase: Phase) -> None:
        """The next phase has come."""
        self.phase = phase
        self.tell()

    # ----------------------------------------------------------------------------------------------------- who is woken

    def stir(self) -> None:
        """Wake the training loop."""
        self._news.set()

    async def stirred(self, timeout_s: Seconds) -> None:
        """Wait for that, or so long."""
        try:
            await asyncio.wait_for(self._news.wait(), timeout_s)
        except TimeoutError:
            return
        self._news.clear()

    def tell(self) -> None:
        """Answer the driver that asked how things stand."""
        self._told.set()

    async def changed(self) -> None:
        """Wait for that, or a tick."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._told.wait(), TICK_S)
        self._told.clear()

"""The contract of a callback, and the handle by which it sees a run and ends it."""

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from paceline.core.errors import InputError, unknown
from paceline.core.records import Record, ReplicaExit
from paceline.core.types import ReplicaId, Seconds
from paceline.run import Run

# Characters of the longest reason to end training.
LONGEST_REASON = 1000


class RunHandle:
    """A run under way.

    Args:
        program: name of the program.
        strategy: the strategy's text.
        engine: name of the engine.
        out: folder that the run is going to be saved in; None: there is none.
        history: records from before the run was resumed.
    """

    def __init__(self, program: str, strategy: str, engine: str, out: Path | None, history: list[Record]) -> None:
        self.program, self.strategy, self.engine, self.out = program, strategy, engine, out
        self.history = history
        """Records so far, those from before the run was resumed too, in the order in which they came."""
        self.time_s: Seconds = history[-1].time_s if history else 0.0
        """Training time at the newest record, or later."""
        self.stopped: str | None = None
        """The reason for which training is to end; None: it goes on."""

    def stop(self, reason: str) -> None:
        """End training as a budget that is spent does: a last record, a last checkpoint, ``summary["stopped"]``.

        What is under way is finished first: under torchrun all ranks end after one more step, and elsewhere replicas go
        on until the engine looks, within 0.2 s. The first reason counts; after the end of training none does.

        Args:
            reason: for the summary; at most 1000 characters.

        Raises:
            InputError: it is no text of that length.
        """
        if not isinstance(reason, str) or not 0 < len(reason) <= LONGEST_REASON:
            raise InputError(
                f"reason={reason!r} must be a text of 1 to {LONGEST_REASON} characters; write run.stop('loss is flat')"
            )
        if self.stopped is None:
            self.stopped = reason


class Callback:
    """What is done while a run lasts; each method does nothing unless a subclass says otherwise.

    All are called in the process that called :func:`~paceline.train`, under torchrun on the rank that shows progress,
    one at a time and in this order::

        on_start --> on_record | on_departure | on_checkpoint | on_log, as they happen --> on_end

    Training may wait for them, so what takes long belongs in a thread. Where servers of A are threads of ranks, what
    comes between ``on_start`` and ``on_end`` is called from another thread than those.

    What one of them raises ends the run with a :class:`~paceline.CallbackError` that names the callback; ``on_end`` is
    called all the same, and what that raises is told on stderr, for the run is over.
    """

    def on_start(self, run: RunHandle) -> None:
        """Begin: nothing has been started yet. ``run.history`` has the records of a run that is resumed."""

    def on_record(self, record: Record, run: RunHandle) -> None:
        """Take the record of a snapshot that was scored, which ``run.history`` has already."""

    def on_departure(self, exit: ReplicaExit, run: RunHandle) -> None:
        """Take a replica that has died or left: its number, why, and the training time, in seconds."""

    def on_checkpoint(self, path: Path, run: RunHandle) -> None:
        """Take the folder of a checkpoint that is whole; it is removed later, when ``keep`` newer ones are there."""

    def on_log(self, replica: ReplicaId, step: int, values: Mapping[str, float], run: RunHandle) -> None:
        """Take figures that a loop of yours has logged on a replica, by name, after so many of its steps."""

    def on_end(self, run: Run | None) -> None:
        """End: the run is over, and saved if it has a folder; None: an error has ended it."""


# Those that are called.
_METHODS = tuple(name for name in vars(Callback) if name.startswith("on_"))

_MISSPELT = 0.8
"""Likeness of two names, from 0 to 1, from which one is taken for the other misspelt: on_reccord has 0.95."""


def check_callbacks(callbacks: Any) -> None:
    """Raise InputError unless this is a sequence of callbacks, without a method whose name is misspelt."""
    if isinstance(callbacks, Callback):
        name = type(callbacks).__name__
        raise InputError(f"callbacks={name}(…) is one callback; write callbacks=[{name}(…)]")
    if not isinstance(callbacks, (list, tuple)):
        raise InputError(f"callbacks={callbacks!r} is no list; write callbacks=[paceline.callbacks.EarlyStopping()]")
    for each in callbacks:
        if isinstance(each, type) and issubclass(each, Callback):
            raise InputError(f"callbacks=[{each.__name__}] has a class; write callbacks=[{each.__name__}(…)]")
        if not isinstance(each, Callback):
            raise InputError(
                f"callbacks=[{each!r}] has no Callback; write class Mine(paceline.callbacks.Callback) with def "
                "on_record(self, record, run): …, and callbacks=[Mine()]"
            )
        for name in dir(type(each)):
            if name not in _METHODS and get_close_matches(name, _METHODS, cutoff=_MISSPELT):
                raise unknown(f"method of the callback {type(each).__name__}", name, _METHODS)

"""Where and how often checkpoints are written, how many are kept, and which options they have; no torch."""

import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.clock.times import Delay, Times
from paceline.core.errors import InputError, check_int
from paceline.core.safe_files import LOCK_WAIT_S, lock_alone
from paceline.core.types import Seconds

# Seconds of each unit of time.
_UNITS = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0}

# Arguments of train that a checkpoint has besides strategy, engine, budget and interval, as far as they have a text.
OPTIONS = (
    *("delay", "times", "trace", "on_nonfinite", "on_death", "suspect_after_s", "timeout_s", "noise_scale"),
    *("loop", "callbacks"),
)

_INTERVAL = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(s|sec|min|h|steps?)\s*")


@dataclass(frozen=True)
class CheckpointOptions:
    """Where and how often checkpoints are written; exactly one of ``every_s`` and ``every_steps`` is set.

    Args:
        folder: absolute path of the folder of all checkpoints of a run.
        every_s: seconds of training between two checkpoints.
        every_steps: steps of each replica between two checkpoints, as a budget counts them.
        keep: how many sound checkpoints are kept.
    """

    folder: Path
    every_s: Seconds | None
    every_steps: float | None
    keep: int = 3

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of :func:`~paceline.train` other than the folder that say the same.

        >>> CheckpointOptions.of("/ckpt", "500 steps", 2).arguments()
        {'checkpoint_every': '500 steps', 'keep': 2}
        """
        every = f"{self.every_s:g} s" if self.every_s is not None else f"{self.every_steps:g} steps"
        return {"checkpoint_every": every, "keep": self.keep}

    def check_free(self) -> None:
        """Raise InputError if another run, which has not ended, writes its checkpoints into the folder."""
        with suppress(FileNotFoundError):
            try:
                handle = lock_alone(self.folder, LOCK_WAIT_S)
            except BlockingIOError:
                raise InputError(other_run(self.folder)) from None
            if handle is not None:
                os.close(handle)

    @classmethod
    def of(
        cls, checkpoint: str | os.PathLike[str], every: str | float | None = None, keep: int = 3
    ) -> "CheckpointOptions":
        """Read what a user writes.

        Args:
            checkpoint: the folder.
            every: "90 s", "5min", "1.5h" or "500 steps", or a number of seconds; None: five minutes.
            keep: at least 1.

        Raises:
            InputError: one of them can't be read as that.

        >>> CheckpointOptions.of("/ckpt", "500 steps", 2)
        CheckpointOptions(folder=PosixPath('/ckpt'), every_s=None, every_steps=500.0, keep=2)
        """
        check_int("keep", keep, least=1)
        if not os.fspath(checkpoint):
            raise InputError("checkpoint='' names no folder; write checkpoint='ckpt'")
        number, unit = _interval(5 * 60.0 if every is None else every)
        folder = Path(checkpoint).absolute()
        return cls(folder, None, number, keep) if unit.startswith("step") else cls(folder, number, None, keep)


def written_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return those of a run's options that JSON can hold, as train takes them, and the names of the others.

    >>> written_options({"delay": Delay.parse("0.1"), "times": None, "trace": True, "loop": print})
    ({'delay': 'fraction=0.5 0.1', 'trace': True}, ('loop',))
    """
    written, others = dict[str, Any](), list[str]()
    for name, value in options.items():
        if isinstance(value, bool | int | float | str):
            written[name] = value
        elif isinstance(value, Delay | Times) and _is_read_back(value):
            written[name] = str(value)
        elif value is not None and value != ():
            others.append(name)
    return written, tuple(others)


def _is_read_back(value: Delay | Times) -> bool:
    """Return whether the text of a value is read as that value: a distribution of the user's may have none."""
    try:
        return type(value).parse(str(value)) == value
    except InputError:
        return False


def other_run(folder: Path) -> str:
    """Return the sentence for a folder that another run writes to."""
    return (
        f"another run that has not ended writes its checkpoints to {folder}; end that one first, or write another "
        "folder, checkpoint='ckpt-2' for instance"
    )


def _interval(every: str | float) -> tuple[float, str]:
    """Return seconds and "s", or a number of steps and "steps"."""
    found = _INTERVAL.fullmatch(every) if isinstance(every, str) else None
    number, unit = (float(found[1]), found[2]) if found else (every, "s")
    if isinstance(number, str | bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
        raise InputError(
            f"checkpoint_every={every!r} is neither a time nor a number of steps; write checkpoint_every='5min', "
            "'90 s' or '500 steps', or a number of seconds"
        )
    return float(number) * _UNITS.get(unit, 1.0), unit

"""What the workers of one replica tell each other: its first one, the leader, says what to do, the others follow.

::

    leader      Adopt --- Advance, samples --- ... --- Finish ---------- next attempt ... --- End
    follower                         (loss)                  Said
"""

import pickle
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeAlias

from paceline.core.errors import WaitTimeoutError
from paceline.core.types import Clock, Seconds, Version


class Parted(Exception):  # noqa: N818 (who has ended is for main to say)
    """Another worker of this replica has ended."""


class Adopt(NamedTuple):
    """Take your part of the A that lies there."""

    place: int
    version: Version
    step: Clock
    anew: bool
    """Whether nothing of what you have of your own is of use any more."""


class Advance(NamedTuple):
    """Make a micro-step; the samples follow over the replica's group."""

    clock: Clock
    samples: int
    forms: Any
    """(input, target), with tensors that have no values; None where there are no samples."""


class Finish(NamedTuple):
    """Write your part of Δ."""

    slot: int


class End(NamedTuple):
    """There is nothing more to do."""


Word: TypeAlias = Adopt | Advance | Finish | End


class Said(NamedTuple):
    """What a worker says of its part of a Δ, once that is written."""

    version: Version
    """Of the A that it has read."""
    finite: bool
    samples: int
    loss: float
    """NaN where it is not known."""


class Line:
    """Between the leader and one follower, at either end.

    Args:
        fd: of a socket of its own.
        whom: who is at the other end.
        timeout_s: how long an answer may take.
    """

    def __init__(self, fd: int, whom: str, timeout_s: Seconds) -> None:
        self._connection, self._whom, self._timeout_s = Connection(fd), whom, timeout_s

    def say(self, what: Any) -> None:
        """Tell the other end something.

        Raises:
            Parted: nobody is there.
        """
        try:
            self._connection.send_bytes(pickle.dumps(what))
        except OSError as error:
            raise Parted(self._whom) from error

    def hear(self) -> Any:
        """Wait, as long as it takes, for what the other end says.

        Raises:
            Parted: nobody is there.
        """
        try:
            return pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise Parted(self._whom) from error

    def answer(self, what: str) -> Any:
        """Wait for an answer.

        Args:
            what: it is, in words.

        Raises:
            Parted: nobody is there.
            WaitTimeoutError: none has come in time.
        """
        if not self._connection.poll(self._timeout_s):
            raise WaitTimeoutError(
                f"waited {self._timeout_s:g} s for {what} of {self._whom}; write a larger timeout_s= if a step takes "
                "so long"
            )
        return self.hear()


def say_all(lines: Sequence[Line], word: Word) -> None:
    """Tell all followers."""
    for line in lines:
        line.say(word)

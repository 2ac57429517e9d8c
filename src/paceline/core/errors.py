"""Every error that Paceline raises on purpose, and errors as messages from one process to another.

An error's text gives the values, the rule they break, and the line to write instead.
"""

import json
import traceback
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from paceline.core.types import ReplicaId

SCORER = -1
"""Number of the scorer in messages, where replicas have theirs."""

LONGEST_TRACEBACK = 20_000
"""Characters of a traceback that are sent to main, at most six bytes each: one message must hold them."""


class PacelineError(Exception):
    """The root: ``except PacelineError`` catches all that Paceline refuses or reports."""


class InputError(PacelineError, ValueError):
    """What the user wrote can't be done as written; nothing has been started."""


class NonFiniteError(PacelineError, ArithmeticError):
    """A loss or a gradient is infinite or not a number."""


class WorkerError(PacelineError, RuntimeError):
    """A worker failed; has its coordinates and its own traceback."""


class CollectiveError(PacelineError, RuntimeError):
    """Ranks did not make the same call, or one of them has exited; every rank of the group raises the same error."""


class WaitTimeoutError(PacelineError, TimeoutError):
    """A wait exceeded its timeout; the message names the waiting process and the one that it waited for."""


def unknown(kind: str, name: str, known: Iterable[str]) -> InputError:
    """Return the error for a name that is not known, with the nearest one that is.

    >>> str(unknown("policy", "asynchronos", ["synchronous", "asynchronous"]))
    "unknown policy 'asynchronos'; did you mean 'asynchronous'? Known: asynchronous, synchronous."
    """
    names = sorted(known)
    near = get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return InputError(f"unknown {kind} {name!r}; {hint}Known: {', '.join(names) or 'none'}.")


def encode_failure(process: ReplicaId | str, error: BaseException) -> bytes:
    """Encode an error as a message to the main process.

    Args:
        process: the replica, with its worker where it has several, or :data:`SCORER`.
        error: what was raised.
    """
    text = "".join(traceback.format_exception(error))[-LONGEST_TRACEBACK:]
    summary = traceback.format_exception_only(error)[-1].strip()[:1000]
    return json.dumps({"failed": process, "what": summary, "traceback": text}).encode()


def failure_text(message: dict[str, Any]) -> str:
    """Return the text of a worker's failure: its coordinates, the error, its own traceback.

    >>> failure_text(json.loads(encode_failure(2, KeyError("x")))).splitlines()[0]
    "replica 2 failed: KeyError: 'x'"
    """
    process = "the scorer" if message["failed"] == SCORER else f"replica {message['failed']}"
    return f"{process} failed: {message['what']}\n\n{message['traceback']}"


def kind_and_text(process: ReplicaId | str, error: BaseException) -> tuple[str, str]:
    """Return the class name and text of one of our errors; any other becomes a worker's failure."""
    if isinstance(error, PacelineError):
        return type(error).__name__, str(error)
    return WorkerError.__name__, failure_text(json.loads(encode_failure(process, error)))
